"""The shape of a JSON text, seen before it is decoded: how deep it is nested and how many keys it names.

A decoder recurses, and so does whatever walks what it has made: the depth must be bounded before either. And a decoder
keeps the last of two equal keys, where a proxy in front may have looked at the first, so none are taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

MAX_DEPTH = 64
_PIECE_BYTES = 1 << 20  # others may run between pieces: each step below keeps the interpreter lock
_KEPT = b'"[]{}:'
_DROPPED = bytes(set(range(256)) - set(_KEPT))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def skeleton(body: bytes) -> bytes:
    """The brackets and colons of a JSON text that stand outside of its strings.

    Example: `{"a": [1, "]", {"b:": "\\""}]}` gives `{:[{:}]}`.
    """
    outside, is_inside = [], False
    for piece in _pieces(body):
        parts = _marks(piece).split(b'"')  # every other one stands in a string
        outside.append(b"".join(parts[is_inside::2]))
        is_inside ^= len(parts) % 2 == 0
    return b"".join(outside)


def _marks(piece: bytes) -> bytes:
    """Quotes, brackets and colons; escapes, which stand in strings alone, are taken out first, pair by pair."""
    if b"\\" in piece:
        piece = piece.replace(rb"\\", b"").replace(rb"\"", b"")
    return piece.translate(None, _DROPPED)


def _pieces(body: bytes) -> Iterator[bytes]:
    """The text cut where no escape is: behind an even number of backslashes."""
    start = 0
    while start < len(body):
        piece = body[start : start + _PIECE_BYTES]
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        if num_backslashes % 2 and start + len(piece) < len(body):
            piece = piece[:-1]
        yield piece
        start += len(piece)


def is_deeper(marks: bytes, limit: int = MAX_DEPTH) -> bool:
    """Whether arrays and objects stand in each other more than `limit` deep, by the text's skeleton."""
    if marks.count(b"[") + marks.count(b"{") <= limit:
        return False
    depth, brackets = 0, marks.replace(b":", b"")
    for start in range(0, len(brackets), _PIECE_BYTES // 16):
        steps = map(_STEP.__getitem__, brackets[start : start + _PIECE_BYTES // 16])
        depths = list(accumulate(steps, initial=depth))
        if max(depths) > limit:
            return True
        depth = depths[-1]
    return False


def has_equal_keys(marks: bytes, value: Any) -> bool:
    """Whether an object of the text named a key twice: `value`, which was made of it, has fewer keys then.

    The walk ends as soon as all keys are found, and takes long lists last, so a prompt of token ids is not walked.
    """
    num_missing = marks.count(b":")
    objects, arrays = ([value], []) if type(value) is dict else ([], [value])
    while num_missing and (objects or arrays):
        item = objects.pop() if objects else arrays.pop()
        if type(item) is dict:
            num_missing -= len(item)
            item = item.values()
        for child in item:
            if type(child) is dict:
                objects.append(child)
            elif type(child) is list:
                arrays.append(child)
    return num_missing != 0
