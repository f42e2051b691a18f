"""The comparison of fair shares: its arrivals, its verdicts, and the whole command in virtual time."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from benchmarks.fairness import (
    FAIR,
    FIRST_COME,
    Study,
    floods,
    main,
    quiet_beside_flood,
    read_weights,
    ttft_ms,
    verdicts,
)
from benchmarks.trial import Tenancy, read_options
from benchmarks.virtual import VirtualStage

from everystop.sim.cost import CostModel
from everystop.sim.workloads import Kind
from everystop.tenants import read_tenants
from everystop.trial.http_client import ClientRecord
from everystop.trial.http_load import LoadRun

WEIGHTS = {"a": 1.0, "b": 3.0}


def make_study(**changes: Any) -> Study:
    """16 requests of 160 weighted tokens a second; short prompts are quickly made."""
    settings: dict[str, Any] = {
        "stage": VirtualStage(CostModel(step_ns=5e6)),
        "kind": Kind(prompt=(2, 6), output=(58, 98)),
        "options": (),
        "seconds": 60.0,
        "least_tokens": 50_000,
        "capacity": 16 * 160.0,
    }
    return Study(**settings | changes)


def make_rows(**changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Two rounds that keep every promise, but for `changes` by scenario and policy, as `flood_fair`."""
    shared: dict[str, Any] = {"seconds": 90.0, "weighted_tok_s": 2500.0, "refused": 0, "first_error": None}
    flood: dict[str, Any] = {"scenario": "1:3", "served": {"a": 55_000, "b": 165_000}, "ratio": 3.0}
    rows: dict[str, dict[str, Any]] = {
        "flood_fair": flood | {"policy": FAIR, "widest_gap": 400.0, "bound": 20_000.0},
        "flood_continuous": flood | {"policy": FIRST_COME, "ratio": 0.75},
        "quiet_fair": {"scenario": "quiet", "policy": FAIR, "ttft_p95_ms": {"quiet": 50.0}},
        "quiet_continuous": {"scenario": "quiet", "policy": FIRST_COME, "ttft_p95_ms": {"quiet": 30_000.0}},
        "quiet_limited": {"scenario": "quiet", "policy": "limited", "ttft_p95_ms": {"quiet": 40.0}},
        "quiet_alone": {"scenario": "quiet", "policy": "alone", "ttft_p95_ms": {"quiet": 30.0}},
    }
    return [shared | row | changes.get(name, {}) for _ in range(2) for name, row in rows.items()]


def failures(rows: list[dict[str, Any]]) -> list[str]:
    return [title for title, _, good in verdicts(rows, [WEIGHTS], make_study()) if not good]


def test_promises_that_are_kept_hold() -> None:
    assert failures(make_rows()) == []


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("flood_fair", {"ratio": 2.69}, "floods 1:3: service b / a"),
        ("flood_fair", {"ratio": 3.31}, "floods 1:3: service b / a"),
        ("flood_fair", {"served": {"a": 49_999, "b": 160_000}}, "floods 1:3: at least 50,000"),
        ("flood_fair", {"seconds": 59.0}, "floods 1:3: at least 50,000"),
        ("flood_fair", {"widest_gap": 20_001.0}, "floods 1:3: gap"),
        ("flood_fair", {"weighted_tok_s": 2374.0}, "floods 1:3: throughput"),
        ("flood_continuous", {"refused": 1, "first_error": "HTTP 429"}, "floods 1:3: no request refused"),
        ("quiet_fair", {"weighted_tok_s": 2374.0}, "quiet: throughput"),
        ("quiet_fair", {"refused": 1}, "quiet: no request refused"),
        ("quiet_continuous", {"ttft_p95_ms": {"quiet": 249.0}}, "quiet: TTFT p95 at least 5"),
        ("quiet_alone", {"ttft_p95_ms": {"quiet": 24.0}}, "quiet: TTFT p95 at most twice"),
        ("quiet_limited", {"ttft_p95_ms": {"quiet": 60.1}}, "quiet, limited: TTFT p95 at most twice"),
        ("quiet_limited", {"weighted_tok_s": 2374.0}, "quiet, limited: throughput"),
        ("quiet_limited", {"refused": 1}, "quiet, limited: no request refused"),
    ],
)
def test_each_promise_fails_alone(name: str, change: dict[str, Any], expected: str) -> None:
    (failed,) = failures(make_rows(**{name: change}))
    assert failed.startswith(expected)


def test_both_floods_ask_for_more_than_half_and_more_than_their_share() -> None:
    study = make_study()
    seconds = study.flood_seconds(WEIGHTS)
    assert seconds == pytest.approx(1.1 * 50_000 * 4 / (16 * 160))
    asked = Counter[str]()
    for job in floods(study, WEIGHTS, seed=1).jobs:
        asked[job.tenant] += len(job.prompt) + 2 * job.max_tokens
        assert 0 <= (job.at_s or 0.0) < seconds
    share = {name: cost / seconds / study.capacity for name, cost in asked.items()}
    assert share["a"] == pytest.approx(1.3, rel=0.1)
    assert share["b"] == pytest.approx(1.3 * 0.75, rel=0.1)
    assert sum(job.at_s == 0 for job in floods(study, WEIGHTS, seed=1).jobs) == 64


def test_the_quiet_tenant_sends_the_same_alone_and_the_flood_ten_times_as_much() -> None:
    study = make_study(seconds=300.0)
    assert study.requests_per_s == 16
    both, alone = (quiet_beside_flood(study, 1, alone=alone).jobs for alone in (False, True))
    assert [job for job in both if job.tenant == "quiet"] == list(alone)
    assert len(alone) == pytest.approx(0.2 * 16 * 302, rel=0.1)
    assert len(both) - len(alone) == pytest.approx(10 * len(alone), rel=0.1)


def test_a_request_without_a_token_counts_with_the_time_it_has_waited() -> None:
    records = [
        ClientRecord(0, "q", 1, 1, sent_s=1.0, event_s=[1.5]),
        ClientRecord(1, "q", 1, 1, sent_s=4.0, is_cut=True),
        ClientRecord(2, "q", 1, 1, sent_s=6.5, is_cut=True),  # sent after the time that counts
        ClientRecord(3, "q", 1, 1, sent_s=2.0, error="HTTP 429"),
    ]
    assert ttft_ms(LoadRun("w", 0, records), "q", until_s=6.0, stop_s=8.0) == [500.0, 4000.0]


def test_the_server_is_told_of_the_tenants_as_a_file(tmp_path: Path) -> None:
    flag, path = Tenancy({"a": 1.0, "b": 2.5}, {"b": 12}).write(tmp_path)
    tenants = read_tenants(path)
    assert tenants.header == "x-tenant"
    assert {name: (t.weight, t.max_running) for name, t in tenants.by_name.items()} == {
        "a": (1.0, None),
        "b": (2.5, 12),
    }
    assert read_options(["--policy", "fair", flag, path]).tenants == path


def test_the_command_shows_in_virtual_time_what_fair_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost, out = tmp_path / "cost.json", tmp_path / "out.json"
    CostModel(step_ns=5e6, token_ns=2e5).write(cost)
    arguments = ["--simulated", "--cost", str(cost), "--repeats", "1", "--seconds", "12", "--least-tokens", "4000"]
    arguments += ["--prompt", "20", "60"]
    main([*arguments, "--out", str(out)])
    printed = capsys.readouterr().out
    written = json.loads(out.read_text())
    checks = {title: good for title, _, good in written["checks"]}
    assert len(checks) == 18
    failed = {title for title, good in checks.items() if not good}
    assert failed <= {  # it needs a slot that the flood has, and a limit on that costs throughput
        "quiet: TTFT p95 at most twice its own alone",
        "quiet, limited: TTFT p95 at most twice its own alone",
        "quiet, limited: throughput at least 95 % of continuous",
    }
    assert len(written["rows"]) == 8
    ratios = {(row["scenario"], row["policy"]): row["ratio"] for row in written["rows"] if "ratio" in row}
    assert ratios["1:1", FAIR] == pytest.approx(1, rel=0.1)
    assert ratios["1:3", FAIR] == pytest.approx(3, rel=0.1)
    assert ratios["1:1", FIRST_COME] < 0.7
    assert ratios["1:3", FIRST_COME] < 1.5
    assert printed.startswith("capacity ")
    assert "| 1:3 | fair | b |" in printed


def test_weights_are_read_and_step_times_belong_to_virtual_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_weights("1:2.5") == {"a": 1.0, "b": 2.5}
    with pytest.raises(SystemExit):
        main(["--weights", "3"])
    assert "no pair of weights" in capsys.readouterr().err
    for wrong in (["--simulated"], ["--cost", "measured"]):
        with pytest.raises(SystemExit):
            main(wrong)
        assert "--simulated needs --cost" in capsys.readouterr().err
