"""The documents name things that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean

from tools.flag_table import PAGE, with_tables

from everystop.observe.comparison import Run, from_json
from everystop.observe.history import StepRecord
from everystop.observe.report.slot_picture import lanes_of
from everystop.words import in_time

ROOT = Path(__file__).parent.parent


def test_the_life_of_a_request_is_short_and_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "request-life.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    named = re.findall(r"`((?:src|csrc)/[\w/]+\.(?:py|cpp|hpp))`", text)
    assert len(set(named)) >= 14
    missing = [name for name in named if not (ROOT / name).is_file()]
    assert not missing


def test_links_between_documents_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_tables_of_options_are_those_of_the_configuration() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run python -m tools.flag_table"


def test_the_slot_chart_that_is_explained_is_the_one_that_is_shown() -> None:
    """Its figures are those of the runs that the picture was drawn from."""
    claim = json.loads((ROOT / "docs" / "claims.json").read_text(encoding="utf-8"))["claims"]["2"]
    static, continuous = from_json(claim["findings"]["data"]["comparison"]).runs
    text = (ROOT / "docs" / "read-a-slot-chart.md").read_text(encoding="utf-8")
    gap_s = static.seconds(lanes_of(static).end_ns) - continuous.seconds(lanes_of(continuous).end_ns)
    assert f"{in_time(gap_s)} of {in_time(static.duration_s)} here" in text
    assert continuous.requests[0].end_s == continuous.duration_s
    assert f"ends with the long answer, after {in_time(continuous.duration_s)}" in text
    barrier_s = long_end_s(static)
    assert f"done after {in_time(barrier_s)}, and only then the second batch begins" in text
    assert all(line.token_s[0] > barrier_s for line in static.requests[16:])
    assert f"done after {in_time(barrier_s)} above and {in_time(long_end_s(continuous))} below" in text
    steps = {run.policy: steps_of_the_long(run) for run in (static, continuous)}
    alone_s = [fmean(s.execute_ns for s in of_run if s.num_rows == 1) / 1e9 for of_run in steps.values()]
    assert f"took {in_time(alone_s[0])} in that run and {in_time(alone_s[1])} in the other" in text
    with_company = [sum(s.num_rows > 1 for s in of_run) for of_run in steps.values()]
    assert f"company in {with_company[1]} steps below and in {with_company[0]} above" in text


def long_end_s(run: Run) -> float:
    """When the long answer, which is the first request's, was over in the engine."""
    history, request_id = run.history, run.requests[0].request_id
    assert history is not None
    assert request_id is not None
    finish = history.trails[request_id].finish
    assert finish is not None
    return run.seconds(finish.now_ns)


def steps_of_the_long(run: Run) -> list[StepRecord]:
    """Those in which it had a row."""
    history, request_id = run.history, run.requests[0].request_id
    assert history is not None
    assert request_id is not None
    return [step for step in history.steps.since(0) if step.row_of(request_id) >= 0]
