"""Tracks and what is marked on them: slices, instants and counts, in no viewer's format."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from heapq import heappop, heappush
from operator import attrgetter
from typing import NamedTuple

Arguments = tuple[tuple[str, int | str], ...]


class Kind(Enum):
    """What a mark does on its track."""

    BEGIN = 1
    END = 2
    INSTANT = 3
    COUNT = 4


class Track(NamedTuple):
    """One line of the picture; the children of a `parent` (0: none) are shown in the order of their ranks.

    Siblings of one name and rank are the lanes of one track. A track with a `unit` has counts, others slices.
    """

    number: int
    name: str
    parent: int
    rank: int
    unit: str | None = None


class Mark(NamedTuple):
    """A slice's begin or end, an instant, or a count that holds from then on.

    The slices of a track nest: a begin belongs to the innermost open slice. Slices with the same `flow` (above 0) are
    joined in the order of time; nothing follows the one that `ends_flow`.
    """

    now_ns: int
    kind: Kind
    track: int
    name: str = ""
    value: int = 0
    arguments: Arguments = ()
    flow: int = 0
    ends_flow: bool = False


class Picture(NamedTuple):
    """Tracks by number, parents before their children, and their marks in the order of time."""

    tracks: list[Track]
    marks: list[Mark]

    @property
    def start_ns(self) -> int:
        """The first mark."""
        return self.marks[0].now_ns if self.marks else 0


class Pen:
    """Draws on one track, whose marks must come in the order of time; an end goes before a begin of the same time only
    if it is drawn before it.
    """

    def __init__(self, track: Track) -> None:
        self.track = track
        self.marks: list[Mark] = []

    def begin(
        self, now_ns: int, name: str, arguments: Arguments = (), flow: int = 0, *, ends_flow: bool = False
    ) -> None:
        """Open a slice."""
        self.marks.append(Mark(now_ns, Kind.BEGIN, self.track.number, name, 0, arguments, flow, ends_flow))

    def end(self, now_ns: int, arguments: Arguments = ()) -> None:
        """Close the innermost open slice; these arguments are added to those of its begin."""
        self.marks.append(Mark(now_ns, Kind.END, self.track.number, arguments=arguments))

    def slice(self, start_ns: int, end_ns: int, name: str, arguments: Arguments = ()) -> None:
        """A slice with nothing in it."""
        self.begin(start_ns, name, arguments)
        self.end(end_ns)

    def instant(self, now_ns: int, name: str, arguments: Arguments = ()) -> None:
        """Something without a duration."""
        self.marks.append(Mark(now_ns, Kind.INSTANT, self.track.number, name, 0, arguments))

    def count(self, now_ns: int, value: int) -> None:
        """The count from now on; nothing is drawn if it is the same as before."""
        if not self.marks or self.marks[-1].value != value:
            self.marks.append(Mark(now_ns, Kind.COUNT, self.track.number, value=value))


class Canvas:
    """Where tracks are made, in the order in which they are shown."""

    def __init__(self) -> None:
        self._tracks: list[Track] = []
        self._pens: list[Pen] = []

    def group(self, name: str, parent: int = 0) -> int:
        """A track that only holds others; returns its number."""
        number = len(self._tracks) + 1
        self._tracks.append(Track(number, name, parent, number))
        return number

    def pen(self, name: str, parent: int, *, unit: str | None = None, rank: int | None = None) -> Pen:
        """A new track to draw on; its rank is its number unless it is a lane."""
        number = len(self._tracks) + 1
        pen = Pen(Track(number, name, parent, rank or number, unit))
        self._tracks.append(pen.track)
        self._pens.append(pen)
        return pen

    def picture(self) -> Picture:
        """What has been drawn."""
        marks = [mark for pen in self._pens for mark in pen.marks]
        marks.sort(key=attrgetter("now_ns"))  # stable: marks of one time stay in the order of their track
        return Picture(self._tracks, marks)


class Lanes:
    """Tracks of one name for slices that overlap: each gets the first lane that is free, and few lanes are needed."""

    def __init__(self, canvas: Canvas, name: str, parent: int) -> None:
        self._canvas, self._name, self._parent = canvas, name, parent
        self._pens: list[Pen] = []
        self._free: list[int] = []
        self._busy: list[tuple[int, int]] = []  # (end of the lane's last slice, lane)

    def pen(self, start_ns: int, end_ns: int) -> Pen:
        """The track for a slice of this time; slices must come in the order of their starts."""
        while self._busy and self._busy[0][0] <= start_ns:
            heappush(self._free, heappop(self._busy)[1])
        if self._free:
            lane = heappop(self._free)
        else:
            lane = len(self._pens)
            rank = self._pens[0].track.rank if self._pens else None
            self._pens.append(self._canvas.pen(self._name, self._parent, rank=rank))
        heappush(self._busy, (end_ns, lane))
        return self._pens[lane]


def present(pairs: Iterable[tuple[str, int | str | None]]) -> Arguments:
    """Arguments without those that say nothing: None, 0 and an empty text."""
    return tuple((name, value) for name, value in pairs if value)
