"""Finds stop strings in text that arrives piece by piece, and never lets a part of one through."""

from __future__ import annotations

from collections.abc import Callable

from everystop.core.request import SamplingParams


class StopMatcher:
    """Watches one sequence's text for stop strings.

    The stop that is complete first wins; where two are complete at the same character, the longer. So the result does
    not depend on how the text is cut into pieces. Text is held back only while it could be the beginning of a stop.

    Example, stops ("DEFG",): feed("ABCDE") gives ("ABC", None) and holds "DE"; then feed("FX") gives ("DEFX", None),
    while feed("FGH") gives ("", "DEFG") and "H" is dropped. With `shows_stop` the stop itself is shown too, so nothing
    is held back, and only "H" is dropped.
    """

    __slots__ = ("_held", "_longest", "_shows_stop", "_stops")

    def __init__(self, stops: tuple[str, ...], *, shows_stop: bool = False) -> None:
        assert all(stops), "an empty stop string is refused at the edge"
        self._stops = stops
        self._shows_stop = shows_stop
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def feed(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop that ended it; after a match nothing more may be fed.

        Unless it `may_stop`, a stop that is complete in this text is none; one that only begins in it may be later.
        """
        window = self._held + text
        shown = len(self._held) if self._shows_stop else 0
        match = self._first_match(window) if may_stop else None
        if match is not None:
            start, stop = match
            self._held = ""
            return window[shown : start + len(stop) if self._shows_stop else start], stop
        cut = len(window) - self._num_held(window)
        self._held = window[cut:]
        return (window[shown:] if self._shows_stop else window[:cut]), None

    def flush(self) -> str:
        """The text that was held back, once no more can come."""
        held, self._held = self._held, ""
        return "" if self._shows_stop else held

    def _first_match(self, window: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None  # (end, start, stop)
        for stop in self._stops:
            start = window.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def _num_held(self, window: str) -> int:
        """Characters at the end of `window` that begin some stop."""
        for size in range(min(self._longest - 1, len(window)), 0, -1):
            tail = window[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


def shown_control_stop(
    params: SamplingParams, stop_reason: str | int | None, token_bytes: Callable[[int], bytes]
) -> str:
    """The text of the control token that ended an answer, where it is one of the stop strings, these are to be shown,
    and control tokens are not: the decoder leaves it out. Else nothing.
    """
    if not isinstance(stop_reason, int) or not params.include_stop_str_in_output or not params.skip_special_tokens:
        return ""
    text = token_bytes(stop_reason).decode(errors="replace")
    return text if text in params.stop else ""
