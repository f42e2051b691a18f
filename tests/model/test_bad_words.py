"""Which token sequences a bad word forbids."""

from __future__ import annotations

import pytest

from everystop.core.errors import RequestError
from everystop.model.bad_words import bad_word_ids

VOCABULARY = {"the": 1, " the": 2, "cat": 3, " c": 4, "at": 5, " dog": 6, "d": 7, "og": 8, "▁": 9}


def encode(text: str) -> list[int]:
    """The longest token first, as far as it goes."""
    ids: list[int] = []
    while text:
        token = max((token for token in VOCABULARY if text.startswith(token)), key=len)
        ids.append(VOCABULARY[token])
        text = text[len(token) :]
    return ids


def test_both_forms_of_one_token_are_forbidden() -> None:
    assert bad_word_ids(["the"], encode) == ((1,), (2,))


def test_form_behind_a_blank_counts_only_where_it_is_as_long() -> None:
    """`cat` is one token, ` cat` two; `dog` two, ` dog` one."""
    assert bad_word_ids(["cat"], encode) == ((3,),)
    assert bad_word_ids(["dog"], encode) == ((7, 8),)


def test_blanks_before_a_word_are_not_its_own_and_repeats_are_one() -> None:
    assert bad_word_ids(["  the", "the"], encode) == ((1,), (2,))


@pytest.mark.parametrize("word", ["", " ", "\n"])
def test_no_word_is_refused(word: str) -> None:
    with pytest.raises(RequestError, match="bad_words"):
        bad_word_ids(["the", word], encode)
