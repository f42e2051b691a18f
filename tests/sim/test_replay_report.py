"""A record beside its replay under another policy, as figures and as text."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tests.sim.test_replay import record_workload

from everystop.sim.replay import ReplayReport, Timeline, replay
from everystop.sim.replay_report import describe_replay, replay_figures

MS = 10**6


def timeline(ttft_ms: list[float], *, tenants: str = "0") -> Timeline:
    """Requests that arrive every second and end with their first token."""
    made = Timeline()
    for i, ttft in enumerate(ttft_ms):
        made.arrival_ns[i] = i * 1000 * MS
        made.first_token_ns[i] = made.finish_ns[i] = made.arrival_ns[i] + round(ttft * MS)
        made.num_tokens[i] = 1
        made.tenant[i] = tenants[i % len(tenants)]
    return made


def figures_of(before: Timeline, after: Timeline, recorded: Timeline | None = None) -> dict[str, Any]:
    report = ReplayReport("fair", 9, 3, None, False, recorded or before, after, before, "continuous")
    return replay_figures(report)


def test_policies_are_compared_in_the_same_simulation(tmp_path: Path) -> None:
    """Every step of this record took 1 ms, so its own policy simulates to about what was recorded."""
    record_workload(tmp_path / "run.gz")
    figures = replay_figures(replay(tmp_path / "run.gz", policy="static"))
    for name in ("ttft_ms", "e2e_ms"):
        assert figures["baseline"][name]["mean"] == pytest.approx(figures["recorded"][name]["mean"], rel=0.05)
    assert figures["replayed"]["ttft_ms"]["mean"] > figures["baseline"]["ttft_ms"]["mean"]
    assert (figures["recorded_policy"], figures["policy"]) == ("continuous", "static")
    counted = figures["requests"]
    assert counted["num_later"] > counted["num_sooner"]
    assert figures["recorded"]["num_preemptions"] > 0


def test_requests_that_gain_and_lose_are_counted() -> None:
    """Within 5 % counts as the same."""
    figures = figures_of(timeline([100, 100, 100, 200]), timeline([104, 50, 180, 900]))
    assert figures["requests"] == {
        "num_sooner": 1,
        "num_later": 2,
        "num_same": 1,
        "most_gained": {"request": 1, "before_ms": 100, "after_ms": 50},
        "most_lost": {"request": 3, "before_ms": 200, "after_ms": 900},
    }
    text = describe_replay(figures)
    assert "under fair the first token comes sooner for 1, later for 2, within 5% of the same time for 1 of 4" in text
    assert "request 3 loses most: 200.0 ms before, 900.0 ms after" in text


def test_nobody_gains_where_everybody_loses() -> None:
    requests = figures_of(timeline([100, 100]), timeline([200, 300]))["requests"]
    assert "most_gained" not in requests
    assert requests["most_lost"]["request"] == 1


def test_change_is_between_the_two_simulations() -> None:
    text = describe_replay(figures_of(timeline([100]), timeline([150]), recorded=timeline([80])))
    rows = {tuple(line.split()[:2]): line.split()[2:] for line in text.splitlines() if line}
    assert rows["TTFT", "p95"] == ["80.0", "100.0", "150.0", "+50.0%"]
    assert "continuous is off by TTFT p50 +25.0%" in text
    tripled = describe_replay(figures_of(timeline([100]), timeline([300])))
    assert "× 3.0" in tripled


def test_tenants_have_lines_of_their_own() -> None:
    figures = figures_of(timeline([100, 10, 100, 10], tenants="01"), timeline([50, 20, 50, 20], tenants="01"))
    assert figures["baseline"]["tenant_ttft_ms"]["1"]["p95"] == 10
    lines = [line.split() for line in describe_replay(figures).splitlines()]
    assert ["tenant", "0", "100.0", "100.0", "50.0", "-50.0%"] in lines
    assert ["tenant", "1", "10.0", "10.0", "20.0", "×", "2.0"] in lines
    assert "tenant 0" not in describe_replay(figures_of(timeline([1]), timeline([1])))


@pytest.mark.parametrize("policy", [None, "static"])
def test_record_that_differs_is_not_simulated(policy: str | None, tmp_path: Path) -> None:
    record_workload(tmp_path / "run.gz")
    lines = gzip.decompress((tmp_path / "run.gz").read_bytes()).decode().splitlines()
    at = [i for i, line in enumerate(lines) if line.startswith('["schedule"')][3]
    lines[at] = json.dumps([*json.loads(lines[at])[:-1], "0" * 16])
    (tmp_path / "altered.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    figures = replay_figures(replay(tmp_path / "altered.gz", policy=policy))
    assert figures["baseline"] is None
    assert "no other policy is simulated" in describe_replay(figures)


def test_replay_under_the_recorded_policy_shows_one_column(tmp_path: Path) -> None:
    record_workload(tmp_path / "run.gz")
    text = describe_replay(replay_figures(replay(tmp_path / "run.gz")))
    assert text.splitlines()[2].split() == ["ms", "recorded"]
    assert "%" not in text
