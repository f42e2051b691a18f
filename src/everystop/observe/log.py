"""A list that forgets its beginning, for what is remembered only for a while."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Log(Generic[T]):
    """A list that forgets its beginning; positions count from the first item ever appended."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._num_dropped = 0
        self._num_hidden = 0  # forgotten, and not yet removed from the list

    def __len__(self) -> int:
        return len(self._items) - self._num_hidden

    def __getitem__(self, position: int) -> T:
        return self._items[position - self._num_dropped]

    @property
    def start(self) -> int:
        """Position of the first item that is remembered."""
        return self._num_dropped + self._num_hidden

    @property
    def end(self) -> int:
        """One past the last position."""
        return self._num_dropped + len(self._items)

    def append(self, item: T) -> None:
        """Add an item."""
        self._items.append(item)

    def since(self, position: int) -> list[T]:
        """Items from that position on, as far as they are remembered."""
        return self._items[max(position, self.start) - self._num_dropped :]

    def between(self, first: int, last: int) -> list[T]:
        """Items from position `first` up to, without, `last`, as far as they are remembered."""
        return self._items[max(first, self.start) - self._num_dropped : max(last, self.start) - self._num_dropped]

    def excerpt(self, first: int, last: int) -> Log[T]:
        """A log of the items that `between` gives, under the same positions; of one at least, where there is any."""
        copy: Log[T] = Log()
        first = max(self.start, min(first, self.end - 1))
        copy._items, copy._num_dropped = self.between(first, max(last, first + 1)), first
        return copy

    def position_of(self, value: int, key: Callable[[T], int]) -> int:
        """Position of the first remembered item whose key is `value` or more; keys must not fall."""
        positions = range(self.start, self.end)
        return self.start + bisect_left(positions, value, key=lambda position: key(self[position]))

    def forget_before(self, position: int) -> None:
        """Drop what lies before, at once; their places in the list are only cut when they are half of it, so each item
        is moved once or so.
        """
        hidden = max(self._num_hidden, min(position, self.end) - self._num_dropped)
        for i in range(self._num_hidden, hidden):
            self._items[i] = cast("T", None)  # nobody looks there any more
        self._num_hidden = hidden
        if self._num_hidden * 2 > len(self._items):
            del self._items[: self._num_hidden]
            self._num_dropped += self._num_hidden
            self._num_hidden = 0
