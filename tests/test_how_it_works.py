"""The page that explains the mechanism says what the code does, what the formulas give, and what was measured."""

from __future__ import annotations

import re

import pytest
from tests.claims.labs import figures_of, make_lab
from tools.figures import DOCS, QUOTE, filled, with_claims

from everystop.claims.lab import Trial
from everystop.claims.results import read_results
from everystop.claims.steps import decode_steps, steps_of, useful_share
from everystop.claims.straggler import LENGTHS, one_batch
from everystop.observe import formulas
from everystop.sim.workloads import Dice, Job, Workload

PAGE = DOCS / "how-it-works.md"
SLOTS = 16


def test_code_that_is_quoted_is_the_code() -> None:
    quotes = re.findall(r"<!--code (\S+)-->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(quotes) == 2
    for path, code in quotes:
        lines = [line.strip() for line in (DOCS.parent / path).read_text(encoding="utf-8").splitlines()]
        wanted = [line.strip() for line in code.splitlines()]
        assert any(lines[i : i + len(wanted)] == wanted for i in range(len(lines))), code


def test_figures_that_are_quoted_are_those_that_were_found() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(QUOTE.findall(text)) >= 20
    assert with_claims(text) == text, "run python -m tools.figures"


def test_a_quote_is_filled_and_an_unknown_figure_is_an_error() -> None:
    def found(number: int, name: str, is_interval: bool) -> str:
        return {(1, "a: b", False): "5 s", (1, "a: b", True): "4 to 6 s"}[number, name, is_interval]

    page = "It took <!--claim 1: a: b-->?<!--/--> (<!--claim 1: interval a: b--><!--/-->)."
    assert filled(page, found) == (
        "It took <!--claim 1: a: b-->5 s<!--/--> (<!--claim 1: interval a: b-->4 to 6 s<!--/-->)."
    )
    with pytest.raises(KeyError):
        filled("<!--claim 1: gone--><!--/-->", found)


def test_the_worked_example_is_what_formulas_and_scheduler_give() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert (sum(LENGTHS), max(LENGTHS)) == (1300, 1000)
    assert f"{100 * formulas.static_occupancy(LENGTHS, SLOTS):.1f} %" == "8.1 %"
    assert "16 × 1,000     = 16,000" in text
    assert "U           = Σ lengths / (B × max length)          = 8.1 %" in text
    [run] = make_lab().runs({"": Trial(one_batch(), "static")})[""]
    assert len(decode_steps(run, 1)) == formulas.static_steps(LENGTHS, SLOTS) - 20 == 980
    assert useful_share(run) == pytest.approx(formulas.static_occupancy(LENGTHS, SLOTS), rel=2e-3)


def test_the_measured_run_is_what_the_formulas_give() -> None:
    found = figures_of(read_results(DOCS)[1].findings)
    assert found["all steps"].value == pytest.approx(formulas.static_steps(LENGTHS, SLOTS), abs=2)
    assert found["steps of a single row"].value == pytest.approx(formulas.static_steps(LENGTHS, SLOTS) - 20, abs=2)
    useful = found["slot-steps that bring a token"].value
    assert useful == pytest.approx(formulas.static_occupancy(LENGTHS, SLOTS), abs=1e-3)


def test_steps_static_over_steps_continuous_is_what_the_scheduler_takes() -> None:
    lengths = [1000, *[20] * 15] * 4
    static, continuous = formulas.static_steps(lengths, SLOTS), formulas.continuous_steps(lengths, SLOTS)
    text = PAGE.read_text(encoding="utf-8")
    assert f"= 4 × 1,000 = {static:,}" in text
    assert f"= {continuous:,}\n" in text
    assert f"ratio             = steps static / steps continuous                  = {static / continuous:.1f}" in text
    assert f"5,200 / 16 = {sum(lengths) / SLOTS:g}" in text
    dice = Dice("four batches", 7)
    jobs = tuple(Job(prompt=dice.prompt(12), max_tokens=length) for length in lengths)
    workload = Workload("four-batches", len(jobs), jobs)
    runs = make_lab().runs({policy: Trial(workload, policy) for policy in ("static", "continuous")})
    taken = {policy: len(steps_of(each[0])) for policy, each in runs.items()}
    assert taken["static"] == pytest.approx(static, abs=4)
    assert taken["continuous"] == pytest.approx(continuous, abs=8)
