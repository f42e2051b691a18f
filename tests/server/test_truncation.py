"""Which tokens are kept of a prompt that may be cut."""

from __future__ import annotations

import pytest

from everystop.server.truncation import Truncation

BOS = 1


@pytest.mark.parametrize(
    ("num_tokens", "keeps_end", "prompt", "kept"),
    [
        (3, True, (5, 6, 7, 8), (6, 7, 8)),
        (3, False, (5, 6, 7, 8), (5, 6, 7)),
        (4, True, (5, 6, 7, 8), (5, 6, 7, 8)),
        (3, True, (BOS, 6, 7, 8), (BOS, 7, 8)),
        (3, False, (BOS, 6, 7, 8), (BOS, 6, 7)),
        (1, True, (BOS, 6, 7, 8), (8,)),
        (0, True, (5, 6), ()),
        (-1, True, (5, 6, 7, 8), (7, 8)),
        (-1, True, (BOS, 6, 7, 8), (BOS, 8)),
        (-1, False, (5, 6, 7, 8), (5, 6)),
        (-1, True, (5, 6), (5, 6)),
    ],
)
def test_end_or_beginning_is_kept_and_the_start_of_the_text(
    num_tokens: int, keeps_end: bool, prompt: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    """Two tokens fit; the tokenizer begins a text with token 1."""
    assert Truncation(num_tokens, keeps_end).cut(prompt, 2, (BOS,)) == kept


def test_tokenizer_that_adds_nothing_keeps_nothing() -> None:
    assert Truncation(2).cut((5, 6, 7), 9) == (6, 7)
