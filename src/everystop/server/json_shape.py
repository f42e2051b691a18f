"""The shape of a JSON text, seen before it is decoded: how deep it is nested and how many keys it names.

A decoder recurses, and so does whatever walks what it has made: the depth must be bounded before either. And a decoder
keeps the last of two equal keys, where a proxy in front may have looked at the first, so none are taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

MAX_DEPTH = 64
_PIECE_BYTES = 1 << 20  # others may run between pieces: each step below keeps the interpreter lock
_KEPT = b'"[]{}:'
_DROPPED = bytes(set(range(256)) - set(_KEPT))
_STRING = re.compile(rb'"[^"]*"')
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def skeleton(body: bytes) -> bytes:
    """The brackets and colons of a JSON text that stand outside of its strings.

    Example: `{"a": [1, "]", {"b:": "\\""}]}` gives `{:[{:}]}`.
    """
    return _STRING.sub(b"", b"".join(_marks(piece) for piece in _pieces(body)))


def _marks(piece: bytes) -> bytes:
    """Quotes, brackets and colons; escapes, which stand in strings alone, are taken out first, pair by pair."""
    if b"\\" in piece:
        piece = piece.replace(rb"\\", b"").replace(rb"\"", b"")
    return piece.translate(None, _DROPPED)


def _pieces(body: bytes) -> Iterator[bytes]:
    """The text cut where no escape is: never behind a backslash."""
    start = 0
    while start < len(body):
        end = min(start + _PIECE_BYTES, len(body))
        while end < len(body) and body[end - 1] == ord("\\"):
            end += 1
        yield body[start:end]
        start = end


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
    """Whether an object of the text named a key twice: `value`, which was made of it, has fewer keys then."""
    return marks.count(b":") != _num_keys(value)


def _num_keys(value: Any) -> int:
    """The keys of all objects in a value."""
    num, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if type(item) is dict:
            num += len(item)
            waiting.extend(child for child in item.values() if type(child) in (dict, list))
        elif type(item) is list:
            waiting.extend(child for child in item if type(child) in (dict, list))
    return num
