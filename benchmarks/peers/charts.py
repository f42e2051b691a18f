"""Three pictures from a report, light and dark: clients, rows with the machine's limits, length of the context."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.report import QUIET_SHARE
from everystop.claims.plots import draw_line, frame, legend_line, log_ticks, panels
from everystop.observe.report.grammar import DARK, KNOWN_STROKES, LIGHT, OTHER_STROKES, Stroke, Theme
from everystop.observe.report.sheets import Sheet, drawing_style

PALETTE = (KNOWN_STROKES["continuous"], KNOWN_STROKES["static"], KNOWN_STROKES["static-padded"], *OTHER_STROKES)
LIMIT = Stroke("", (0, (1, 2)), "")
Curves = Mapping[str, Mapping[str, Mapping[str, float]]]


def draw_all(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """The pictures for which there are runs, as PNG in both themes; returns the files."""
    makers: dict[str, tuple[bool, Callable[[Mapping[str, Any], Theme], Sheet]]] = {
        "peers-clients": (bool(found["clients"]), clients),
        "peers-rows": (bool(found["rows"] and found["limits"]), rows),
        "peers-context": (bool(found["context"]["itl_ms"]), context),
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with drawing_style():
        for stem, (is_there, make) in makers.items():
            for theme, suffix in ((LIGHT, ""), (DARK, "-dark")):
                if is_there:
                    paths.append(folder / f"{stem}{suffix}.png")
                    make(found, theme).write_png(paths[-1])
                    _in_few_colours(paths[-1])
    return paths


def clients(found: Mapping[str, Any], theme: Theme) -> Sheet:
    """Throughput against the number of clients."""
    curves, strokes = found["clients"], _strokes(found)
    title = _title(found, "Output tokens a second by number of clients")
    sheet, (axes,) = panels(theme, title, 1, _legend(curves, strokes), head=44.0)
    frame(axes, theme, x="clients, each with one request at a time", y="output tokens/s", grid="y")
    _draw(axes, theme, curves, strokes)
    axes.set_ylim(bottom=0)
    return sheet


def context(found: Mapping[str, Any], theme: Theme) -> Sheet:
    """What a token and a prompt cost behind a context of each length."""
    gaps, firsts = found["context"]["itl_ms"], found["context"]["ttft_ms"]
    strokes, title = _strokes(found), _title(found, "Cost by length of the context, one client")
    sheet, (left, right) = panels(theme, title, 2, _legend(gaps, strokes))
    frame(left, theme, title="a token of the answer", x="tokens in the prompt", y="median gap, ms", grid="y")
    frame(right, theme, title="the first token", x="tokens in the prompt", y="TTFT, ms", grid="y")
    for axes, curves in ((left, gaps), (right, firsts)):
        _draw(axes, theme, curves, strokes)
        axes.set_yscale("log")
        frame_ticks(axes)
    return sheet


def rows(found: Mapping[str, Any], theme: Theme) -> Sheet:
    """Step time and tokens a second against rows, and the line under which memory or arithmetic lets none get."""
    curves, limits, strokes = found["rows"], found["limits"], _strokes(found)
    entries = [
        *_legend(curves, strokes),
        legend_line("the machine's limit: reading weights, or int8 arithmetic", LIMIT),
    ]
    sheet, (left, right) = panels(theme, _title(found, "A decode step by number of rows"), 2, entries)
    frame(left, theme, title="step time", x="rows", y="ms", grid="y")
    frame(right, theme, title="tokens", x="rows", y="tokens/s", grid="y")
    counts = sorted({int(at) for curve in curves.values() for at in curve})
    least_ms = [limit_ms(limits, count) for count in counts]
    _draw(left, theme, curves, strokes)
    draw_line(left, theme, counts, least_ms, LIMIT)
    rates = {
        name: {at: {"median": int(at) / point["median"] * 1e3} for at, point in curve.items()}
        for name, curve in curves.items()
    }
    _draw(right, theme, rates, strokes)
    draw_line(right, theme, counts, [count / ms * 1e3 for count, ms in zip(counts, least_ms, strict=True)], LIMIT)
    left.set_yscale("log")
    frame_ticks(left)
    right.set_ylim(bottom=0)
    for axes in (left, right):
        log_ticks(axes, counts)
    return sheet


def limit_ms(limits: Mapping[str, float], count: int) -> float:
    """The least time of a step: all weights once from memory, or all operations at the instructions' peak."""
    read_s = limits["bytes_per_step"] / limits["bytes_per_s"]
    compute_s = count * limits["operations_per_row"] / limits["operations_per_s"] if limits["operations_per_s"] else 0.0
    return max(read_s, compute_s) * 1e3


def frame_ticks(axes: Any) -> None:
    """A logarithmic axis whose ticks are written out, not as powers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _title(found: Mapping[str, Any], title: str) -> str:
    """With a warning where other work took processors."""
    others = found["others_share"]
    return title if others is None or others["most"] <= QUIET_SHARE else f"{title} (preliminary: a busy machine)"


def _strokes(found: Mapping[str, Any]) -> dict[str, Stroke]:
    """A stroke for each line, no two alike, and the same in every picture."""
    names = dict.fromkeys((*found["clients"], *found["context"]["itl_ms"], *found["rows"]))
    return dict(zip(names, PALETTE, strict=False))


def _legend(curves: Curves, strokes: Mapping[str, Stroke]) -> list[Any]:
    return [legend_line(name, strokes[name]) for name in curves]


def _draw(axes: Any, theme: Theme, curves: Curves, strokes: Mapping[str, Stroke]) -> None:
    counts = sorted({int(at) for curve in curves.values() for at in curve})
    for name, curve in curves.items():
        xs = sorted(map(int, curve))
        medians = [curve[str(x)]["median"] for x in xs]
        draw_line(axes, theme, xs, medians, strokes[name])
        spreads = [curve[str(x)] for x in xs]
        if all("least" in each for each in spreads):
            low, high = [each["least"] for each in spreads], [each["most"] for each in spreads]
            axes.fill_between(xs, low, high, color=strokes[name].colour or theme.ink, alpha=0.18, lw=0, zorder=2)
    log_ticks(axes, counts)


def _in_few_colours(path: Path) -> None:
    """As the repository keeps its pictures."""
    from PIL import Image

    with Image.open(path) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
