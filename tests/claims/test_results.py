from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everystop.claims.claim import Claim
from everystop.claims.everything import CLAIMS
from everystop.claims.findings import Condition, Findings, counted, measured
from everystop.claims.lab import Lab
from everystop.claims.page import render
from everystop.claims.results import Result, ResultsError, read_results, write_results
from everystop.observe.report.grammar import Theme
from everystop.observe.report.sheets import Sheet


def make_findings(count: int = 5, data: Mapping[str, Any] | None = None) -> Findings:
    return Findings(
        headline=f"{count} were counted.",
        how="They were counted.",
        conditions=(Condition(figure=counted("things", [count], "things"), at_least=3),),
        figures=(measured("ratio", [2.0, 2.5], "×"),),
        caption="How to read it.",
        remarks=("Nothing else matters.",),
        data=data or {},
    )


def make_claim(number: int) -> Claim:
    def measure(lab: Lab) -> Findings:
        return make_findings(number)

    def draw(data: Mapping[str, Any], theme: Theme) -> Sheet:
        return Sheet(100, 100, theme)

    return Claim(
        number=number,
        name=f"number-{number}",
        title=f"Number {number}",
        statement="There are many.",
        test="there are at least 3.",
        measure=measure,
        draw=draw,
    )


def make_result(count: int = 5, **settings: Any) -> Result:
    return Result(findings=make_findings(count), settings={"cpu": "a processor", **settings}, seconds=12.3)


def test_the_table_has_a_line_for_each_claim_measured_or_not() -> None:
    page = render([make_claim(0), make_claim(1)], {1: make_result()}, "claims")
    assert "| 0 | Number 0 | not measured | run `everystop claims --only 0` |" in page
    assert "| 1 | [Number 1](#claim-1) | ✔ held | 5 were counted. |" in page
    assert page.count("## ") == 1


def test_a_section_shows_what_decides_and_what_is_beside_it() -> None:
    page = render([make_claim(1)], {1: make_result(2)}, "claims")
    assert "✘ did not hold" in page
    assert "| things | 2 things | exact | at least 3 things | ✘ did not hold | counted" in page
    assert "| ratio | 2.24 × | 0.0316 × to 158 × | measured, 2 repeats |" in page
    assert "<picture>" not in page


def test_a_section_says_how_long_it_took_and_what_the_clients_computed() -> None:
    page = render([make_claim(1)], {1: make_result()}, "claims")
    assert "They were counted. It took 12 s.\n" in page
    page = render([make_claim(1)], {1: replace(make_result(), client_cpu_s=2.53)}, "claims")
    assert "It took 12 s; the clients computed 2.5 s, on cores that they share with the servers.\n" in page


def test_what_was_measured_before_there_were_servers_says_so() -> None:
    results = {0: make_result(), 1: make_result(served="by `everystop serve` over HTTP")}
    page = render([make_claim(i) for i in range(2)], results, "claims")
    assert "> Claim 0: a processor, served by an engine in the same process, without HTTP" in page
    assert "> Claim 1: a processor, served by `everystop serve` over HTTP" in page


def test_a_picture_is_shown_light_and_dark() -> None:
    result = replace(make_result(), findings=make_findings(data={"x": 1}))
    page = render([make_claim(3)], {3: result}, "claims")
    assert 'srcset="claims/3-number-3-dark.png"' in page
    assert 'src="claims/3-number-3.png"' in page


def test_claims_measured_on_different_machines_say_so() -> None:
    results = {0: make_result(cpu="one"), 1: make_result(cpu="other"), 2: make_result(cpu="one")}
    page = render([make_claim(i) for i in range(3)], results, "claims")
    assert "> Claims 0, 2: one" in page
    assert "> Claim 1: other" in page


def test_results_are_kept_for_the_claims_that_are_not_measured_again(tmp_path: Path) -> None:
    claims = [make_claim(0), make_claim(1)]
    write_results(tmp_path, {0: make_result(4)}, claims)
    known = read_results(tmp_path)
    assert known == {0: make_result(4)}
    write_results(tmp_path, known | {1: make_result(1)}, claims)
    assert {n: each.findings.verdict.value for n, each in read_results(tmp_path).items()} == {
        0: "held",
        1: "did not hold",
    }
    assert "Number 1](#claim-1)" in (tmp_path / "claims.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "text", ["", "[]", "[" * 200_000, '{"version": 99, "claims": {}}', '{"version": 1, "claims": {"0": {}}}']
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "claims.json").write_text(text, encoding="utf-8")
    with pytest.raises(ResultsError, match=r"claims\.json is not what"):
        read_results(tmp_path)


def test_claims_are_numbered_and_named_once() -> None:
    numbers = [claim.number for claim in CLAIMS]
    assert numbers == sorted(set(numbers))
    assert numbers[0] == 0
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.statement.endswith(".")
        assert claim.test.endswith(".")
