"""Writes the page: one HTML file that opens without a network, shows everything without JavaScript, and lets a reader
point, select, zoom and sort with it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from everystop.observe.comparison import Comparison
from everystop.observe.report.curves import averaged, slots_at_work, thinned, tokens_so_far
from everystop.observe.report.drawing import PictureError
from everystop.observe.report.grammar import INLINE, INLINE_NAMES, strokes
from everystop.observe.report.headline import verdict
from everystop.observe.report.inline_svg import inline_svg
from everystop.observe.report.pictures import NARROW, Picture, pictures
from everystop.observe.report.remarks import alarms, caption, equality, lead, limits, method
from everystop.observe.report.sheets import Sheet, drawing_style
from everystop.observe.report.shown import shown_runs
from everystop.observe.report.tables import Table, bench_table, picture_table, request_rows, request_table

MAX_REQUESTS = 20_000
MAX_POINTS = 400
FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture in the page: drawn wide and narrow, what to see in it, and its figures as a table."""

    name: str
    title: str
    svgs: Markup
    caption: str
    table: Table | None
    is_timed: bool
    is_half: bool


def render_page(comparison: Comparison) -> str:
    """The whole page. Without matplotlib it has no pictures, and says how to get them."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    template = environment.from_string((FOLDER / "page.html").read_text(encoding="utf-8"))
    figures, no_pictures = _figures(comparison)
    verdicts = [verdict(comparison, policy) for policy in comparison.policies[1:] if comparison.runs_of(policy)]
    return template.render(
        title=f"{comparison.workload}: {' against '.join(comparison.policies)}",
        comparison=comparison,
        num_requests=len(comparison.runs[0].requests) if comparison.runs else 0,
        alarms=list(alarms(comparison, no_pictures)),
        verdicts=verdicts,
        lead=lead(comparison),
        figures=figures,
        requests=request_table(comparison),
        keys=bench_table(comparison),
        equality=equality(comparison),
        method=list(method(comparison)),
        limits=list(limits(comparison)),
        style=Markup((FOLDER / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=Markup(_as_script(_data(comparison))),
        glyphs={policy: stroke.glyph for policy, stroke in strokes(comparison.policies).items()},
    )


def _as_script(data: Any) -> str:
    """JSON that may stand in a script element: no name in it can end the element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _figures(comparison: Comparison) -> tuple[list[Figure], str]:
    """The pictures, and why there are none if there are none."""
    try:
        with drawing_style():
            return [_figure(comparison, picture) for picture in pictures(comparison)], ""
    except PictureError as error:
        return [], str(error)


def _figure(comparison: Comparison, picture: Picture) -> Figure:
    label = f"{picture.title}. The figures are in the table below."
    sheets = [picture.draw(INLINE, width, False) for width in (picture.width, NARROW)]
    svgs = [
        inline_svg(
            sheet.as_svg(),
            name=f"{picture.name}-{size}",
            label=label,
            css_class=f"picture {size}",
            colours=INLINE_NAMES,
            data=_time_data(sheet),
        )
        for sheet, size in zip(sheets, ("wide", "narrow"), strict=True)
    ]
    return Figure(
        picture.name,
        picture.title,
        Markup("".join(svgs)),
        " ".join([*caption(comparison, picture.name), *sheets[0].notes]),
        picture_table(comparison, picture.name),
        sheets[0].timed is not None,
        picture.is_half,
    )


def _time_data(sheet: Sheet) -> dict[str, str]:
    if sheet.timed is None:
        return {}
    left, width, end_s = sheet.timed
    return {"left": f"{left:.2f}", "width": f"{width:.2f}", "end": f"{end_s:.6f}"}


def _data(comparison: Comparison) -> dict[str, Any]:
    """What the page's script knows: requests by index, and the curves under the cursor."""
    runs = shown_runs(comparison)
    end_s = max((run.duration_s for run in runs), default=1.0)
    curves: dict[str, list[list[list[float]]]] = {"at work": [], "tokens": []}
    for run in runs:
        points = averaged(slots_at_work(run), end_s / MAX_POINTS)
        curves["at work"].append(_columns(points, 2))
        curves["tokens"].append(_columns(thinned(tokens_so_far(run), MAX_POINTS), 0))
    rows = request_rows(comparison)
    return {
        "policies": list(comparison.policies),
        "curves": curves,
        "requests": [
            [row.index, row.group, row.num_prompt_tokens, row.num_output_tokens, [_short(t) for t in row.times]]
            for row in rows[:MAX_REQUESTS]
        ],
    }


def _columns(points: Sequence[tuple[float, float]], digits: int) -> list[list[float]]:
    return [[round(x, 4) for x, _ in points], [round(y, digits) for _, y in points]]


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
