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
from everystop.observe.report.grammar import INLINE_NAMES, strokes
from everystop.observe.report.headline import verdict
from everystop.observe.report.inline_svg import inline_svg
from everystop.observe.report.pictures import Drawing
from everystop.observe.report.remarks import alarms, caption, equality, facts, lead, limits, method
from everystop.observe.report.sheets import Scale
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


def render_page(comparison: Comparison, drawings: Sequence[Drawing], no_pictures: str = "") -> str:
    """The whole page, with these pictures, or with the reason why there are none."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    template = environment.from_string((FOLDER / "page.html").read_text(encoding="utf-8"))
    served = comparison.served if comparison.policies[0] in comparison.served else ()
    verdicts = [verdict(comparison, policy) for policy in comparison.policies[1:] if policy in served]
    return template.render(
        title=f"{comparison.workload}: {' against '.join(comparison.policies)}",
        comparison=comparison,
        facts=list(facts(comparison)),
        alarms=list(alarms(comparison, no_pictures)),
        verdicts=verdicts,
        lead=lead(comparison),
        figures=[_figure(comparison, drawing) for drawing in drawings],
        requests=request_table(comparison),
        keys=bench_table(comparison),
        equality=equality(comparison),
        method=list(method(comparison)),
        limits=list(limits(comparison)),
        style=Markup((FOLDER / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=Markup(_as_script(_data(comparison, drawings))),
        glyphs={policy: stroke.glyph for policy, stroke in strokes(comparison.policies).items()},
    )


def _as_script(data: Any) -> str:
    """JSON that may stand in a script element: no name in it can end the element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _figure(comparison: Comparison, drawing: Drawing) -> Figure:
    picture = drawing.picture
    svgs = [
        inline_svg(
            document,
            name=f"{picture.name}-{size}",
            label=f"{picture.title}. The figures are in the table below.",
            css_class=f"picture {size}",
            colours=INLINE_NAMES,
            data={} if timed is None else {"left": timed.left, "width": timed.width, "end": timed.end_s},
        )
        for document, timed, size in zip(drawing.documents, drawing.timed, ("wide", "narrow"), strict=True)
    ]
    return Figure(
        picture.name,
        picture.title,
        Markup("".join(svgs)),
        " ".join([*caption(comparison, picture.name), *drawing.notes]),
        picture_table(comparison, picture.name),
        drawing.timed[0] is not None,
        picture.is_half,
    )


def _data(comparison: Comparison, drawings: Sequence[Drawing]) -> dict[str, Any]:
    """What the page's script knows: requests by index, the curves under the cursor, and the axes of durations."""
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
        "scales": [[[*map(_figures, scale)] for scale in scales] for scales in _scales(drawings)],
        "requests": [
            [row.index, row.group, row.num_prompt_tokens, row.num_output_tokens, [_short(t) for t in row.times]]
            for row in rows[:MAX_REQUESTS]
        ],
    }


def _scales(drawings: Sequence[Drawing]) -> tuple[list[Scale], list[Scale]]:
    """Those of the wide and of the narrow picture that has any."""
    return next((drawing.scales for drawing in drawings if drawing.scales[0]), ([], []))


def _figures(value: float) -> float:
    return value if isinstance(value, bool) else float(f"{value:.6g}")


def _columns(points: Sequence[tuple[float, float]], digits: int) -> list[list[float]]:
    return [[round(x, 4) for x, _ in points], [round(y, digits) for _, y in points]]


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
