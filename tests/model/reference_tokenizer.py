"""Slow, obvious tokenizers, written from the published rules; the oracles of the tokenizer tests."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from itertools import pairwise

CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")


def byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level BPE (GPT-2)."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    characters, spare = [], 256
    for byte in range(256):
        characters.append(chr(byte if byte in visible else spare))
        spare += byte not in visible
    return characters


def kind(character: str) -> str:
    """Whether a character is a letter, a number, a blank or something else."""
    category = unicodedata.category(character)
    if character.isspace():
        return "blank"
    return {"L": "letter", "N": "number"}.get(category[0], "other")


def gpt2_pieces(text: str) -> Iterator[str]:
    """GPT-2's cut: contractions, an optional blank before a run of one kind, blanks but the last, blanks at the end."""
    position = 0
    while position < len(text):
        end = gpt2_piece_end(text, position)
        yield text[position:end]
        position = end


def gpt2_piece_end(text: str, start: int) -> int:
    for contraction in CONTRACTIONS:
        if text.startswith(contraction, start):
            return start + len(contraction)
    first = start + (text[start] == " ")
    if first < len(text) and kind(text[first]) != "blank":
        end = first
        while end < len(text) and kind(text[end]) == kind(text[first]):
            end += 1
        return end
    end = start
    while end < len(text) and kind(text[end]) == "blank":
        end += 1
    return end - 1 if end < len(text) and end - start > 1 else end


def single_digit_pieces(text: str) -> Iterator[str]:
    """Each numeric character by itself, GPT-2's cut between them."""
    between = ""
    for character in text:
        if kind(character) == "number":
            yield from gpt2_pieces(between)
            yield character
            between = ""
        else:
            between += character
    yield from gpt2_pieces(between)


def byte_level_ids(pieces: Iterator[str], vocabulary: dict[str, int], merges: list[str]) -> list[int]:
    """Byte-level BPE of pieces: the earliest merge of the list first, leftmost first."""
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    characters = byte_characters()
    ids: list[int] = []
    for piece in pieces:
        symbols = [characters[byte] for byte in piece.encode()]
        while len(symbols) > 1:
            pairs = [(ranks.get((a, b), len(ranks)), i) for i, (a, b) in enumerate(pairwise(symbols))]
            rank, i = min(pairs)
            if rank == len(ranks):
                break
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        ids.extend(vocabulary[symbol] for symbol in symbols)
    return ids


def sentencepiece_ids(text: str, vocabulary: dict[str, int], scores: list[float]) -> list[int]:
    """SentencePiece BPE: the pair whose join has the best score first, leftmost first; bytes for unknown characters."""
    symbols = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        joins = [(-scores[vocabulary[a + b]], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in vocabulary]
        if not joins:
            break
        _, i = min(joins)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    ids: list[int] = []
    for symbol in symbols:
        known = vocabulary.get(symbol)
        ids.extend([known] if known is not None else [vocabulary[f"<0x{byte:02X}>"] for byte in symbol.encode()])
    return ids
