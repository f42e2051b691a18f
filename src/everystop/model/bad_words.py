"""Words that must not come about in an output, as sequences of token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from everystop.core.errors import RequestError


def bad_word_ids(words: Iterable[str], encode: Callable[[str], Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The sequences that spell each word at the beginning of a text, and where it differs, behind a blank; as vLLM.

    `encode` gives the ids of a text without special tokens, such as `partial(tokenizer.encode, add_special=False)`. The
    form behind a blank counts where it has as many tokens, and another first one. Raises RequestError for a word that
    is none.

    Example: "the" may be (1169,), and " the" (262,): both are bad. Other spellings of the same text by other tokens are
    not found, nor is a word that begins inside of a token.
    """
    sequences: list[tuple[int, ...]] = []
    for word in words:
        bare = word.lstrip()
        plain = tuple(encode(bare)) if bare else ()
        if not plain:
            raise RequestError(f"bad_words holds {word!r}, which is no word; leave it out", param="bad_words")
        behind_blank = tuple(encode(" " + bare))
        sequences.append(plain)
        if len(behind_blank) == len(plain) and behind_blank[0] != plain[0]:
            sequences.append(behind_blank)
    return tuple(dict.fromkeys(sequences))
