"""Every claim's picture, from what it finds in virtual time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.claims.labs import figures_of, make_lab

from everystop.claims import larger_batch, no_gain
from everystop.claims.everything import CLAIMS
from everystop.claims.findings import Findings, Verdict
from everystop.claims.page import render
from everystop.claims.results import Result, draw_result
from everystop.observe.report.grammar import DARK, LIGHT
from everystop.observe.report.sheets import drawing_style


@pytest.fixture(scope="module")
def findings() -> Iterator[Mapping[int, Findings]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(larger_batch, "NUM_SIMULATED", 512)
        patch.setattr(larger_batch, "NUM_MEASURED", 128)
        patch.setattr(no_gain, "LOADS", (0.01, 0.3))
        patch.setattr(no_gain, "NUM_ARRIVALS", 32)
        patch.setattr(no_gain, "DEVIATIONS", (0.0, 0.5, 1.25))
        yield {claim.number: claim.measure(make_lab(2)) for claim in CLAIMS}


def test_all_claims_hold_on_two_cores_as_they_were_measured(findings: Mapping[int, Findings]) -> None:
    assert {number: found.verdict for number, found in findings.items()} == dict.fromkeys(range(10), Verdict.HELD)


def test_a_larger_static_batch_wastes_more_though_it_brings_more(findings: Mapping[int, Findings]) -> None:
    data = findings[3].data
    assert data["share"]["static"] == sorted(data["share"]["static"], reverse=True)
    assert data["rate"]["static"] == sorted(data["rate"]["static"])
    figures = figures_of(findings[3])
    assert figures["tokens/s simulated for the 128, off the measured, at most"].value < 0.01


def test_the_page_of_all_names_every_condition(findings: Mapping[int, Findings]) -> None:
    results = {n: Result(findings=found, settings={}, seconds=1.0) for n, found in findings.items()}
    page = render(CLAIMS, results, "claims")
    for found in findings.values():
        assert all(f"| {condition.figure.name} |" in page for condition in found.conditions)
    assert not re.search(r"\bnan\b", page.lower())


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_texts_are_large_enough_and_inside(claim: Any, theme: Any, findings: Mapping[int, Findings]) -> None:
    agg = pytest.importorskip("matplotlib.backends.backend_agg")
    data = json.loads(json.dumps(findings[claim.number].data))
    with drawing_style():
        sheet = claim.draw(data, theme)
        sizes = [float(size) for size in re.findall(r"<text[^>]*font-size: ([\d.]+)px", sheet.as_svg())]
        box = sheet.figure.get_tightbbox(agg.FigureCanvasAgg(sheet.figure).get_renderer())
    assert sizes
    assert min(sizes) >= 12
    assert -0.02 <= box.x0 <= box.x1 <= sheet.width / 72 + 0.02
    assert -0.02 <= box.y0 <= box.y1 <= sheet.height / 72 + 0.02


def test_pictures_are_written_light_and_dark(findings: Mapping[int, Findings], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    claim = CLAIMS[0]
    paths = draw_result(tmp_path, claim, findings[0])
    assert [path.name for path in paths] == ["0-full-batch.png", "0-full-batch-dark.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
