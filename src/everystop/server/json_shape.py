"""The shape of a JSON text, seen before it is decoded: how much it holds, how deep it is nested, how long numbers are.

A decoder recurses, and so does whatever walks what it has made: the depth must be bounded before either. And a decoder
keeps the last of two equal keys, where a proxy in front may have looked at the first, so none are taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

MAX_DEPTH = 64
MAX_DIGITS = 400  # of one number; the time that the decoder takes grows with their square
_PIECE_BYTES = 1 << 18  # others may run between pieces: each step below keeps the interpreter lock
_DIGITS = b"0123456789"
_KEPT = b'"[]{}:,'
_DROPPED = bytes(set(range(256)) - set(_KEPT))
_DROPPED_BUT_DIGITS = bytes(set(_DROPPED) - set(_DIGITS))
_TO_ZERO = bytes.maketrans(_DIGITS, b"0" * 10)
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class Size(NamedTuple):
    """How many keys, lists (arrays and objects), and commas a JSON text has outside of its strings."""

    num_keys: int
    num_lists: int
    num_commas: int


def skeleton(body: bytes, dropped: bytes = _DROPPED) -> bytes:
    """The brackets, colons and commas of a JSON text that stand outside of its strings: all but `dropped` bytes.

    Example: `{"a": [1, "]", {"b:": "\\""}]}` gives `{:[,,{:}]}`.
    """
    outside, is_inside = [], False
    for piece in _pieces(body):
        parts = _marks(piece, dropped).split(b'"')  # every other one stands in a string
        outside.append(b"".join(parts[is_inside::2]))
        is_inside ^= len(parts) % 2 == 0
    return b"".join(outside)


def _marks(piece: bytes, dropped: bytes) -> bytes:
    """Quotes and what else is not dropped; escapes, which stand in strings alone, are taken out first, pair by pair."""
    if b"\\" in piece:
        piece = piece.replace(rb"\\", b"").replace(rb"\"", b"")
    return piece.translate(None, dropped)


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


def size_of(marks: bytes) -> Size:
    """What a text with this skeleton holds."""
    return Size(marks.count(b":"), marks.count(b"[") + marks.count(b"{"), marks.count(b","))


def has_long_number(body: bytes) -> bool:
    """Whether a number of the text has more than MAX_DIGITS digits."""
    run = b"0" * (MAX_DIGITS + 1)
    starts = range(0, len(body), _PIECE_BYTES)
    if not any(run in body[start : start + _PIECE_BYTES + MAX_DIGITS].translate(_TO_ZERO) for start in starts):
        return False
    return run in skeleton(body, _DROPPED_BUT_DIGITS).translate(_TO_ZERO)  # it might stand in a string


def is_deeper(marks: bytes, limit: int = MAX_DEPTH) -> bool:
    """Whether arrays and objects stand in each other more than `limit` deep, by the text's skeleton."""
    if marks.count(b"[") + marks.count(b"{") <= limit:
        return False
    depth, brackets = 0, marks.translate(None, b":,")
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
