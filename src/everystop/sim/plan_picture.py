"""Draws a plan: p95 of TTFT and ITL over arrival rate and replicas, the border of the targets, and the cliff.

It draws the figures of `plan_report.plan_figures` and computes nothing. matplotlib is imported only here.
"""

from __future__ import annotations

import importlib
import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everystop.core.errors import EverystopError
from everystop.sim.plan_report import of_ms, source

DPI = 110
WIDTH, ROW, LINE, SMALL_LINE = 13.0, 0.5, 0.235, 0.18  # inches: the figure, a row, lines of words
BAR, CHARACTER = 0.98, 0.082  # inches: colour bar with its labels, a character in a cell
ANSWER_CHARS, BASIS_CHARS = 146, 165  # that fit on a line
COLOURS = "cividis"  # even in lightness, and the same to every kind of colour vision


class PictureError(EverystopError):
    """matplotlib is not installed."""


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of one variant."""

    suffix: str
    page: str
    ink: str
    faint: str


THEMES = (Theme("", "#FFFFFF", "#1A1A1A", "#8A8A8A"), Theme("-dark", "#111418", "#ECECEC", "#7C828A"))


def draw_plan(figures: Mapping[str, Any], folder: Path) -> list[str]:
    """Write the plan as `plan.svg` and `plan.png`, and both dark; returns their names. The same figures give the same
    bytes under one version of matplotlib. Raises PictureError without matplotlib, and OSError.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        raise PictureError(
            "no picture was drawn, because matplotlib is not installed; install everystop[pictures], or matplotlib"
        ) from None
    names = []
    for theme in THEMES:
        with matplotlib.rc_context({"svg.hashsalt": "everystop", "svg.fonttype": "none", "font.family": "DejaVu Sans"}):
            figure = _Drawing(figures, theme).draw()
            for kind, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
                names.append(f"plan{theme.suffix}.{kind}")
                figure.savefig(folder / names[-1], dpi=DPI, facecolor=theme.page, metadata=metadata)
    return names


class _Drawing:
    """One picture in one theme: two heat maps, one row for each number of replicas, one column for each rate."""

    def __init__(self, figures: Mapping[str, Any], theme: Theme) -> None:
        self._figures = figures
        self._theme = theme
        self._rows = [carried["num_replicas"] for carried in figures["replicas"]]
        self._edges = column_edges(figures["rates"])
        self._cells = {(point["num_replicas"], point["rate"]): point for point in figures["points"]}
        self._pieces = {
            name: importlib.import_module(f"matplotlib.{name}")
            for name in ("figure", "colors", "patches", "patheffects", "lines", "ticker")
        }

    def draw(self) -> Any:
        """The whole figure, not yet written."""
        answer = [part for line in self._figures["answer"]["sentences"] for part in textwrap.wrap(line, ANSWER_CHARS)]
        basis = textwrap.wrap(self._basis(), BASIS_CHARS)
        top, bottom = 0.6 + LINE * len(answer), 1.05 + SMALL_LINE * len(basis)
        height = top + bottom + ROW * min(max(len(self._rows), 4), 24)
        figure = self._pieces["figure"].Figure(figsize=(WIDTH, height), facecolor=self._theme.page)
        margin = 0.75 if self._figures["price"] is None else 1.75
        width = (WIDTH - margin - 2 * BAR) / 2
        panels = (("ttft", "TTFT p95 in ms (arrival to first token)"), ("itl", "ITL p95 in ms (gap between tokens)"))
        for i, (name, title) in enumerate(panels):
            left = margin + i * (width + BAR)
            boxes = ((left, width), (left + width + 0.08, 0.16))
            axes, bar = (
                figure.add_axes((x / WIDTH, bottom / height, w / WIDTH, 1 - (top + bottom) / height)) for x, w in boxes
            )
            self._panel(axes, bar, name, title)
            self._label_cells(axes, name, width)
            if i == 0:
                axes.set_ylabel("replicas", color=self._theme.ink, fontsize=11)
            else:
                axes.set_yticklabels([])
        self._words(figure, height, answer, basis)
        self._legend(figure, (0.12 + SMALL_LINE * len(basis)) / height)
        return figure

    def _panel(self, axes: Any, bar: Any, name: str, title: str) -> None:
        target = self._figures["target"][f"{name}_p95_ms"]
        norm = self._norm(name, target)
        mesh = axes.pcolormesh(
            self._edges,
            [i - 0.5 for i in range(len(self._rows) + 1)],
            [[self._value(name, row, rate) for rate in self._figures["rates"]] for row in self._rows],
            norm=norm,
            cmap=COLOURS,
            edgecolors=self._theme.page,
            linewidth=1.0,
        )
        self._cliff(axes)
        self._border(axes)
        self._wanted(axes)
        self._axes(axes, title)
        self._colour_bar(bar, mesh, target)

    def _value(self, name: str, row: int, rate: float) -> float:
        point = self._cells[row, rate]
        return max(float(point[f"{name}_ms"]["p95"]), 1e-3) if point["is_stable"] else math.nan

    def _norm(self, name: str, target: float) -> Any:
        """A log scale over what was measured and the target."""
        values = [self._value(name, row, rate) for row, rate in self._cells]
        values = [value for value in values if not math.isnan(value)] + [target]
        low, high = min(values), max(values)
        return self._pieces["colors"].LogNorm(low, max(high, low * 1.5))

    def _cliff(self, axes: Any) -> None:
        """Hatch what the replicas cannot serve, from the cliff of each row on, and grid points given up before it."""
        last = self._edges[-1]
        for i, carried in enumerate(self._figures["replicas"]):
            cliff = max(carried["cliff"], self._edges[0])
            if cliff < last:
                axes.add_patch(self._hatch(cliff, i, last - cliff))
            for rate, (low, high) in zip(self._figures["rates"], itertools.pairwise(self._edges), strict=True):
                if not self._cells[carried["num_replicas"], rate]["is_stable"] and low < cliff:
                    axes.add_patch(self._hatch(low, i, min(high, cliff) - low))

    def _hatch(self, left: float, row: int, width: float) -> Any:
        return self._pieces["patches"].Rectangle(
            (left, row - 0.5), width, 1.0, facecolor=self._theme.page, edgecolor=self._theme.faint, hatch="////", lw=0
        )

    def _label_cells(self, axes: Any, name: str, width: float) -> None:
        """Write the duration into each cell, if there is room for it; `width` is the panel's in inches."""
        norm, colours = self._norm(name, self._figures["target"][f"{name}_p95_ms"]), axes.collections[0].cmap
        inches = width / math.log(self._edges[-1] / self._edges[0])
        for i, carried in enumerate(self._figures["replicas"]):
            for j, rate in enumerate(self._figures["rates"]):
                value = self._value(name, carried["num_replicas"], rate)
                low, high = self._edges[j], min(self._edges[j + 1], carried["cliff"])
                if math.isnan(value) or math.log(high / low) * inches < CHARACTER * len(in_cell(value)):
                    continue
                colour = colours(norm(value))
                ink = "#000000" if 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] > 0.5 else "#FFFFFF"
                box = {"facecolor": colour, "edgecolor": "none", "pad": 1.0}
                words = {"ha": "center", "va": "center", "color": ink, "fontsize": 9, "bbox": box, "zorder": 5.5}
                axes.text(math.sqrt(low * high), i, in_cell(value), **words)

    def _border(self, axes: Any) -> None:
        """The highest rate within both targets, from row to row."""
        rates = [max(carried["highest_rate"], self._edges[0]) for carried in self._figures["replicas"]]
        xs = [rate for rate in rates for _ in range(2)]
        ys = [i + side for i in range(len(rates)) for side in (-0.5, 0.5)]
        axes.plot(xs, ys, color="#FFFFFF", lw=2.6, path_effects=self._halo(), solid_capstyle="butt", zorder=4)

    def _halo(self) -> list[Any]:
        return [self._pieces["patheffects"].withStroke(linewidth=5.0, foreground="#000000")]

    def _wanted(self, axes: Any) -> None:
        """The wanted rate as a line, the answer as a star on it."""
        rate, best = self._figures["wanted_rate"], self._figures["answer"]["best"]
        axes.axvline(rate, color="#E69F00", lw=1.6, ls=(0, (2, 2)), zorder=5)
        if self._figures["answer"]["is_met"]:
            row = self._rows.index(best["num_replicas"])
            star = {"marker": "*", "ms": 19, "mfc": "#E69F00", "mec": "#000000", "mew": 1.2}
            axes.plot([rate], [row - 0.3], zorder=6, clip_on=False, **star)

    def _axes(self, axes: Any, title: str) -> None:
        ink = self._theme.ink
        axes.set_facecolor(self._theme.page)
        axes.set_title(title, color=ink, fontsize=12, loc="left")
        axes.set_xscale("log")
        axes.set_xlim(self._edges[0], self._edges[-1])
        axes.set_ylim(-0.5, len(self._rows) - 0.5)
        axes.set_xticks(*tick_labels(self._figures["rates"]))
        axes.xaxis.set_minor_locator(self._pieces["ticker"].NullLocator())
        axes.set_yticks(range(len(self._rows)), [self._row_label(num) for num in self._rows])
        axes.set_xlabel("arrival rate, requests/s (log scale)", color=ink, fontsize=11)
        axes.tick_params(colors=ink, labelsize=10, length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)

    def _row_label(self, num: int) -> str:
        price = self._figures["price"]
        if price is None:
            return str(num)
        return f"{num}   {price['per_hour'] * num:,.2f} {price['currency']}/h"

    def _colour_bar(self, axes: Any, mesh: Any, target: float) -> None:
        """The colours beside the panel, with a mark at the target."""
        bar = axes.figure.colorbar(mesh, cax=axes)
        ticker = self._pieces["ticker"]
        bar.ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
        bar.ax.yaxis.set_minor_locator(ticker.NullLocator())
        bar.ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda ms, _: of_ms(ms)))
        bar.ax.tick_params(colors=self._theme.ink, labelsize=9, length=2)
        bar.outline.set_visible(False)
        bar.ax.axhline(target, color="#FFFFFF", lw=2.6, path_effects=self._halo())

    def _words(self, figure: Any, height: float, answer: Sequence[str], basis: Sequence[str]) -> None:
        """The answer above, and below what it rests on."""
        ink = self._theme.ink
        above = {"color": ink, "fontsize": 12, "va": "top", "linespacing": 1.35}
        figure.text(0.012, 1 - 0.14 / height, "\n".join(answer), **above)
        below = {"color": ink, "fontsize": 9.5, "va": "bottom", "linespacing": 1.3}
        figure.text(0.012, 0.1 / height, "\n".join(basis), **below)

    def _basis(self) -> str:
        """What the picture rests on."""
        trace, setup, method = (self._figures[name] for name in ("trace", "setup", "method"))
        return (
            f"Simulated, flags as given: policy {setup['policy']}, router {setup['router']}, max-num-seqs "
            f"{setup['limits']['max_num_seqs']}, max-num-batched-tokens {setup['limits']['max_num_batched_tokens']}; "
            f"{trace['file']}, {method['num_requests']:,} requests in each simulation. "
            f"Step times: {source(self._figures)}."
        )

    def _legend(self, figure: Any, bottom: float) -> None:
        line, patch = self._pieces["lines"].Line2D, self._pieces["patches"].Patch
        star = {"marker": "*", "ms": 14, "mfc": "#E69F00", "mec": "#000000", "lw": 0}
        handles = [
            line(
                [],
                [],
                color="#FFFFFF",
                lw=2.6,
                path_effects=self._halo(),
                label="both targets met to the left (targets marked on the scales)",
            ),
            patch(
                facecolor=self._theme.page, edgecolor=self._theme.faint, hatch="////", label="queue grows without bound"
            ),
            line([], [], color="#E69F00", lw=1.6, ls=(0, (2, 2)), label="wanted rate"),
        ]
        if self._figures["answer"]["is_met"]:
            given, best = self._figures["as_given"], self._figures["answer"]["best"]
            flags = "" if given == {name: best[name] for name in given or ()} else ", with the flags above"
            handles.append(line([], [], label=f"fewest replicas that carry it{flags}", **star))
        figure.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(0.006, bottom),
            ncols=4,
            frameon=False,
            fontsize=10,
            labelcolor=self._theme.ink,
        )


def in_cell(ms: float) -> str:
    """Milliseconds without their unit, longer ones in seconds with it."""
    return of_ms(ms).removesuffix(" ms")


def column_edges(rates: Sequence[float]) -> list[float]:
    """Borders of the columns: half way between rates on a log scale, and as far beyond the first and the last.

    Example: rates 1, 4, 16 have the borders 0.5, 2, 8, 32.
    """
    if len(rates) == 1:
        return [rates[0] / 1.5, rates[0] * 1.5]
    middles = [math.sqrt(low * high) for low, high in itertools.pairwise(rates)]
    return [rates[0] ** 2 / middles[0], *middles, rates[-1] ** 2 / middles[-1]]


def tick_labels(rates: Sequence[float]) -> tuple[list[float], list[str]]:
    """Rates to mark on the axis, none nearer than a fortieth of it to the one before, and what to write there."""
    span = math.log(rates[-1] / rates[0]) if len(rates) > 1 else 1.0
    shown = [rates[0]]
    for rate in rates[1:]:
        if math.log(rate / shown[-1]) > span / 20:
            shown.append(rate)
    return shown, [f"{rate:.3g}" for rate in shown]
