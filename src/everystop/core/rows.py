"""The rows of a step: what is computed for whom, kept as plain numbers in one buffer."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from struct import Struct
from typing import NamedTuple, overload


class Row(NamedTuple):
    """One scheduled row: `num_tokens` tokens of a request, from position `start` on.

    `logits_from` is the offset inside the row of the first token whose logits are needed to sample: num_tokens - 1
    where the row samples, num_tokens where it does not (a prefill chunk that is not the last, or one of a request that
    generates nothing). What scores a prompt stands apart, in `StepPlan.prompt_logits`. `num_draft` counts drafted
    tokens at the row's end (0 now).
    """

    request_id: int
    start: int
    num_tokens: int
    num_draft: int
    logits_from: int


NUM_FIELDS = len(Row._fields)
_DECODE = array("q", Row(request_id=0, start=0, num_tokens=1, num_draft=0, logits_from=0))
_unpack_rows = Struct(f"{NUM_FIELDS}q").iter_unpack
_make_row: Callable[[tuple[int, ...]], Row] = partial(tuple.__new__, Row)  # in half the time of Row(...)


class Rows(Sequence[Row]):
    """Rows in the order in which they are computed; `numbers` holds the five of each, one row after the other.

        numbers  [7, 40, 1, 0, 0,  9, 0, 32, 0, 31]     request 7 decodes at position 40; 9 computes its prompt of 32

    One row more is no object more: a `Row` is made when it is read, and forgotten after. Whoever reads many rows, and
    of each a number or two, takes columns, each a new array. Rows are only ever added.
    """

    __slots__ = ("numbers",)

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.numbers = array("q")
        if rows:
            self.numbers.extend(chain.from_iterable(rows))

    def append(self, row: Row) -> None:
        """One more row."""
        self.numbers.extend(row)

    def append_decodes(self, request_ids: Iterable[int], starts: array[int]) -> None:
        """For each of these requests a row of one token that samples, at its position in `starts`."""
        numbers, first = self.numbers, len(self.numbers)
        numbers += _DECODE * len(starts)
        numbers[first::NUM_FIELDS] = array("q", request_ids)
        numbers[first + 1 :: NUM_FIELDS] = starts

    @property
    def request_ids(self) -> array[int]:
        """Whose each row is."""
        return self.numbers[0::NUM_FIELDS]

    @property
    def starts(self) -> array[int]:
        """The first position of each row."""
        return self.numbers[1::NUM_FIELDS]

    @property
    def nums_tokens(self) -> array[int]:
        """The number of tokens of each row."""
        return self.numbers[2::NUM_FIELDS]

    @property
    def logits_from(self) -> array[int]:
        """The offset in each row of the first token whose logits are needed."""
        return self.numbers[4::NUM_FIELDS]

    def tuples(self) -> Iterator[tuple[int, ...]]:
        """The rows as plain tuples, which are made in a third of the time; a row added meanwhile is a BufferError."""
        return _unpack_rows(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers) // NUM_FIELDS

    def __iter__(self) -> Iterator[Row]:
        return map(_make_row, self.tuples())

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Rows: ...

    def __getitem__(self, index: int | slice) -> Row | Rows:
        where = range(len(self))[index]
        if isinstance(where, range):
            return Rows(self[i] for i in where)
        return Row(*self.numbers[where * NUM_FIELDS : (where + 1) * NUM_FIELDS])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Rows):
            return self.numbers == other.numbers
        return list(self) == other if isinstance(other, list) else NotImplemented

    def __repr__(self) -> str:
        return f"Rows({list(self)})"
