"""What the report makes of stored runs: best settings, ratios within a turn, objections, tables, pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers.charts import limit_ms
from benchmarks.peers.ours import Ours
from tests.benchmarks.peers.fake import FakePeer

from benchmarks.peers import __main__ as program
from benchmarks.peers import records, report

PEERS = [Ours(), FakePeer()]
FIGURES: dict[str, Any] = {
    "requests": 8,
    "errors": 0,
    "exact_usage": 8,
    "wall_s": 2.0,
    "prompt_tokens": 512,
    "output_tokens": 1024,
    "output_tok_s": 512.0,
    "total_tok_s": 768.0,
    "events_per_token": 1.0,
    "ttft_p50_ms": 30.0,
    "ttft_p95_ms": 40.0,
    "itl_p50_ms": 10.0,
    "itl_p99_ms": 20.0,
    "server_cpu_s": 3.5,
    "generator_cpu_s": 0.2,
    "load_average": 0.5,
    "others_share": 0.01,
    "peak_bytes": 1 << 30,
}


def make_record(peer: str, setting: str, rate: float, turn: int = 1, **changes: Any) -> records.Record:
    """One run of `chat`; `changes` are of the record where it has such a key, else of its figures."""
    about = {"kind": "workload", "name": "chat", "version": "1.0", "machine": {"cpu": "a cpu", "num_cpus": 2}}
    about = {key: changes.pop(key, value) for key, value in about.items()}
    figures = FIGURES | {"output_tok_s": rate} | changes
    return {**about, "peer": peer, "setting": setting, "turn": turn, "figures": figures}


def rows_of(runs: list[records.Record], name: str = "chat") -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["peer"], row["setting"]): row for row in report.summarise(runs, PEERS)["workloads"][name]}


def test_a_peer_appears_in_its_best_setting_and_we_in_each_of_ours() -> None:
    runs = [
        make_record("everystop", "int8", 900.0),
        make_record("everystop", "float32", 100.0),
        make_record("fake", "good", 300.0),
        make_record("fake", "batches", 400.0),
        make_record("fake", "short", 9_000.0, exact_usage=7),
    ]
    rows = rows_of(runs)
    assert set(rows) == {("everystop", "int8"), ("everystop", "float32"), ("fake", "batches")}
    assert rows["fake", "batches"]["num_swept"] == 2
    assert rows["everystop", "int8"]["ours_over_it"] is None
    assert rows["everystop", "float32"]["ours_over_it"]["median"] == 9.0


def test_ratios_are_taken_within_a_turn() -> None:
    runs = [
        make_record("everystop", "int8", 900.0, turn=1),
        make_record("fake", "good", 300.0, turn=1),
        make_record("everystop", "int8", 400.0, turn=2),
        make_record("fake", "good", 200.0, turn=2),
        make_record("fake", "good", 1.0, turn=3),
    ]
    ratio = rows_of(runs)["fake", "good"]["ours_over_it"]
    assert (ratio["least"], ratio["median"], ratio["most"], ratio["runs"]) == (2.0, 2.5, 3.0, 2)


def test_aims_are_met_by_the_median_ratio_or_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "TARGETS", {("chat", "fake"): 3.0, ("single", "fake"): 3.0, ("uniform", "fake"): 1.0})
    runs = [
        make_record(peer, setting, rate, name=name)
        for name, theirs in (("chat", 300.0), ("single", 301.0))
        for peer, setting, rate in (("everystop", "int8", 900.0), ("fake", "good", theirs))
    ]
    found = report.summarise(runs, PEERS)
    assert [(target["workload"], target["is_met"]) for target in found["targets"]] == [
        ("chat", True),
        ("single", False),
    ]
    assert "| single | fake | 3 | 2.99 | missed |" in report.text(found)
    busy = report.summarise([*runs, make_record("fake", "good", 1.0, turn=2, others_share=0.3)], PEERS)
    assert {target["is_met"] for target in busy["targets"]} == {None}


def test_processor_time_is_compared_beside_the_clock() -> None:
    runs = [
        make_record("everystop", "int8", 900.0, server_cpu_s=2.0),
        make_record("fake", "good", 300.0, server_cpu_s=5.0),
    ]
    assert report.tokens_per_cpu_s(runs[0]) == 512.0
    row = rows_of(runs)["fake", "good"]
    assert (row["ours_over_it"]["median"], row["ours_over_it_by_cpu"]["median"]) == (3.0, 2.5)


def test_the_best_setting_is_that_of_the_workload_if_it_was_swept_else_of_the_one_that_was() -> None:
    runs = [
        make_record("fake", "good", 300.0),
        make_record("fake", "batches", 400.0),
        make_record("fake", "good", 90.0, name="single"),
        make_record("fake", "batches", 80.0, name="single"),
        make_record("fake", "good", 70.0, name="uniform"),
    ]
    best = {name: records.best_setting(runs, "fake", name) for name in ("chat", "single", "uniform", "prefill")}
    assert best == {"chat": "batches", "single": "good", "uniform": "batches", "prefill": "batches"}
    assert records.best_setting(runs, "other", "chat") is None


def test_what_must_not_be_compared_is_objected_to() -> None:
    runs = [
        make_record("fake", "good", 1.0, errors=2, exact_usage=6, first_error="HTTP 500"),
        make_record("fake", "short", 1.0, exact_usage=7),
        make_record("fake", "batches", 1.0, events_per_token=0.5),
        make_record("fake", "batches", 2.0, turn=2, events_per_token=0.5),
        make_record("everystop", "int8", 1.0),
    ]
    found = report.summarise(runs, PEERS)["objections"]
    assert len(found) == 3
    assert "2 requests failed: HTTP 500" in found[0]
    assert "not as long as asked for" in found[1]
    assert "0.50 events a token" in found[2]


def test_a_machine_that_was_not_quiet_makes_figures_preliminary() -> None:
    quiet, busy = make_record("everystop", "int8", 1.0), make_record("everystop", "int8", 1.0, others_share=0.4)
    assert "PRELIMINARY" not in report.text(report.summarise([quiet], PEERS))
    assert "PRELIMINARY" in report.text(report.summarise([quiet, busy], PEERS))


def test_differing_answers_are_counted_turn_by_turn() -> None:
    alone, crowded = [f"{i}" for i in range(24)], [f"{i}" for i in range(32)]
    changed = ["x", "y", *crowded[2:]]
    runs = [
        make_record("fake", "good", 1.0, turn, kind="answers", name=name, answers=answers)
        for turn, other in ((1, crowded), (2, changed))
        for name, answers in (("alone", alone), ("crowded", other))
    ]
    (row,) = report.summarise(runs, PEERS)["answers"]
    assert (row["differ"]["least"], row["differ"]["most"], row["of"]) == (0, 2, 24)


def all_kinds() -> list[records.Record]:
    """Runs of every kind, a failure and the limits of a machine."""
    runs = [make_record("everystop", "int8", 900.0), make_record("fake", "good", 300.0, front_share=0.02)]
    for peer, setting, rate in (("everystop", "int8", 100.0), ("fake", "good", 50.0)):
        for at in (1, 2, 4):
            runs.append(make_record(peer, setting, rate * at, kind="clients", name=str(at)))
            runs.append(make_record(peer, setting, rate, kind="context", name=str(at * 1000), itl_p50_ms=float(at)))
    runs += [make_record("everystop", "int8", 1.0, kind="rows", name=str(at), step_ms=3.0 + at) for at in (1, 64, 256)]
    limits = {"operations_per_s": 1.7e12, "bytes_per_s": 4e10, "operations_per_row": 2.7e8, "bytes_per_step": 1.4e8}
    runs.append(make_record("everystop", "int8", 0.0, kind="limits", name="machine") | {"figures": limits})
    runs.append(make_record("fake", "broken", 0.0, kind="failure") | {"cause": "it fell\nover", "figures": {}})
    return runs


def test_a_stored_file_gives_text_json_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "PEERS", {peer.name: peer for peer in PEERS})
    for record in all_kinds():
        records.append(tmp_path / "runs.jsonl", record)
    options = ["--out", str(tmp_path / "runs.jsonl"), "--json", str(tmp_path / "r.json"), "--charts", str(tmp_path)]
    assert program.main(["report", *options]) == 0
    text = capsys.readouterr().out
    assert "| A fake | good (of 1) | 3.00 | 1.00 | 300 | 2.0 |" in text
    assert "| Everystop, int8 | 100 | 200 | 400 |" in text
    assert "FAILED fake broken: it fell" in text
    assert "fake: it only counts." in text
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["rows"]["Everystop, int8"]["256"]["median"] == 259.0
    assert found["limits"]["bytes_per_step"] == 1.4e8
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    stems = ("peers-clients", "peers-context", "peers-rows")
    assert pictures == sorted(f"{stem}{suffix}.png" for stem in stems for suffix in ("", "-dark"))


def test_objections_make_the_report_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "PEERS", {peer.name: peer for peer in PEERS})
    records.append(tmp_path / "runs.jsonl", make_record("fake", "good", 1.0, errors=1))
    assert program.main(["report", "--out", str(tmp_path / "runs.jsonl")]) == 1


def test_a_file_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["report", "--out", str(tmp_path / "none.jsonl")]) == 1
    assert "run python -m benchmarks.peers run first" in capsys.readouterr().err


def test_the_limit_is_memory_for_few_rows_and_arithmetic_for_many() -> None:
    limits = {"operations_per_s": 1e12, "bytes_per_s": 1e11, "operations_per_row": 1e9, "bytes_per_step": 2e8}
    assert limit_ms(limits, 1) == pytest.approx(2.0)
    assert limit_ms(limits, 8) == pytest.approx(8.0)
    assert limit_ms(limits | {"operations_per_s": 0.0}, 8) == pytest.approx(2.0)
