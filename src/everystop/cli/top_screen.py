"""The screen of `everystop top`: which panels a terminal of a given size has room for, and how many lines each gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from everystop.cli import top_panels as panels
from everystop.cli.top_lines import Line
from everystop.cli.top_view import LiveView

UNBOUNDED = 30  # requests and decisions where there may be as many lines as there need to be


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines below a title: at least `least` of them, or none of the panel, and at most `most`.

    Neither depends on what happens, so that nothing jumps. `draw` is told how many there are; without a bound on
    lines `whole` is.
    """

    title: Callable[[], Line]
    draw: Callable[[int], list[Line]]
    least: int
    most: int
    whole: int


class LiveScreen:
    """Draws a `LiveView` of the server at a URL as lines."""

    def __init__(self, view: LiveView, url: str) -> None:
        self._view = view
        self._url = url

    def lines(self, width: int | None, height: int | None) -> list[Line]:
        """All lines, none wider than `width`, and exactly `height` of them; None bounds neither.

        Panels that there is no room for are left out whole, those first that `_panels` names last.
        """
        lines = [panels.header(self._view, self._url), *panels.tiles(self._view, width)]
        by_name = self._panels(width)
        given = {name: panel.whole for name, panel in by_name.items()}
        if height is not None:
            given = _dealt(by_name, height - len(lines))
        for name in ("slots", "steps", "kv", "waiting", "requests", "decisions"):
            if name in given:
                drawn = by_name[name].draw(given[name])[: given[name]]
                blank = [] if height is None else [Line()] * (given[name] - len(drawn))
                lines += [by_name[name].title(), *drawn, *blank]
        if height is not None:
            lines = [*lines, *[Line()] * (height - len(lines))][:height]
        return lines if width is None else [line.cut(width) for line in lines]

    def _panels(self, width: int | None) -> dict[str, Panel]:
        """By name, the most important first."""
        view, server = self._view, self._view.server
        num_slots = server["max_num_seqs"]
        return {
            "slots": Panel(
                lambda: self._slots_title(width),
                lambda num: panels.slots(view, width, num),
                least=min(num_slots, 4),
                most=num_slots,
                whole=num_slots,
            ),
            "waiting": Panel(
                lambda: panels.title(width, f"waiting {view.message['num_waiting']:,}"),
                lambda num: panels.waiting(view, num),
                least=1,
                most=6,
                whole=max(1, len(view.waiting)),
            ),
            "decisions": Panel(
                lambda: panels.title(width, "decisions"),
                lambda num: panels.decisions(view, num),
                least=2,
                most=UNBOUNDED,
                whole=UNBOUNDED,
            ),
            "kv": Panel(
                lambda: panels.title(width, "KV cache", legend=panels.kv_legend(view)),
                lambda num: [panels.kv_bar(view, width)],
                least=1,
                most=1,
                whole=1,
            ),
            "requests": Panel(
                lambda: panels.title(width, "recent requests", tail="your own" if server["sees"] == "own" else ""),
                lambda num: panels.recent(view, width, num),
                least=2,
                most=UNBOUNDED + 1,
                whole=UNBOUNDED + 1,
            ),
            "steps": Panel(
                lambda: self._steps_title(width),
                lambda num: panels.steps(view, width, num),
                least=3,
                most=8,
                whole=8,
            ),
        }

    def _slots_title(self, width: int | None) -> Line:
        tiles = self._view.message["tiles"]
        name = f"slots {tiles['slots_busy']}/{tiles['slots']}"
        seconds = panels.chart_seconds(width)
        return panels.title(width, name, legend=panels.legend(panels.SLOT_KINDS, panels.MARKS), tail=seconds)

    def _steps_title(self, width: int | None) -> Line:
        name = f"steps, budget of {self._view.server['max_num_batched_tokens']:,} tokens"
        kinds = panels.legend(panels.STEP_KINDS, panels.MARKS).add(" ┄", "dim").add(" budget")
        return panels.title(width, name, legend=kinds, tail=panels.chart_seconds(width))


def _dealt(by_name: dict[str, Panel], num_lines: int) -> dict[str, int]:
    """Lines for each panel that there is room for, its title not counted; what is left over goes round."""
    given: dict[str, int] = {}
    for name, panel in by_name.items():
        if panel.least + 1 > num_lines:
            break
        given[name] = panel.least
        num_lines -= panel.least + 1
    for name in _rounds(by_name, given):
        if num_lines <= 0:
            break
        given[name] += 1
        num_lines -= 1
    return given


def _rounds(by_name: dict[str, Panel], given: dict[str, int]) -> Iterator[str]:
    """Who gets the next line: slots as often as all others together, until each has its most."""
    others = [name for name in given if name in ("requests", "decisions", "waiting", "steps")]
    turn = [name for other in others for name in ("slots", other)] or list(given)
    while any(given[name] < by_name[name].most for name in turn):
        for name in turn:
            if given[name] < by_name[name].most:
                yield name
