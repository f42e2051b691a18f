"""Turns: who runs when, what is written down, what an interruption or a failure leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.peers.loads import WORKLOADS, make_tasks
from benchmarks.peers.peer import PeerError
from tests.benchmarks.peers.fake import FakePeer

from benchmarks.peers import __main__ as program
from benchmarks.peers import records


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakePeer]:
    """Two fakes in the place of the real ones."""
    made = {name: FakePeer(name) for name in ("a", "b")}
    monkeypatch.setattr(program, "PEERS", made)
    return made


def run(tmp_path: Path, *options: str) -> list[records.Record]:
    """`run` with a few requests of `single`; all that is in the file afterwards."""
    few = ["--dir", str(tmp_path), "--out", str(tmp_path / "runs.jsonl"), "--limit", "2"]
    assert program.main(["run", *few, *options]) == 0
    return records.read(tmp_path / "runs.jsonl")


def test_entrants_take_turns_and_turns_go_on_counting(tmp_path: Path, peers: dict[str, FakePeer]) -> None:
    chosen = ["--workload", "single", "--setting", "a:good", "--setting", "b:good"]
    run(tmp_path, *chosen, "--repeats", "2")
    found = run(tmp_path, *chosen)
    assert [(record["turn"], record["peer"]) for record in found] == [
        (1, "a"),
        (1, "b"),
        (2, "a"),
        (2, "b"),
        (3, "a"),
        (3, "b"),
    ]
    figures = found[0]["figures"]
    assert (figures["requests"], figures["errors"], figures["exact_usage"]) == (2, 0, 2)
    assert figures["output_tokens"] == 256
    assert 0 < figures["front_share"] < 1
    assert figures["server_cpu_s"] >= 0
    assert all(records.is_good(record) for record in found)


def test_without_a_sweep_a_peer_of_many_settings_is_refused(
    tmp_path: Path, peers: dict[str, FakePeer], capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["run", "--dir", str(tmp_path), "--out", str(tmp_path / "runs.jsonl")]) == 1
    assert "a has not been swept" in capsys.readouterr().err
    assert program.main(["run", "--dir", str(tmp_path), "--setting", "a:none"]) == 1
    assert "no setting 'none'" in capsys.readouterr().err


def test_a_sweep_takes_every_setting_and_the_best_of_it_runs_next(tmp_path: Path, peers: dict[str, FakePeer]) -> None:
    found = run(tmp_path, "--sweep", "--workload", "single", "--peer", "a")
    assert [record["setting"] for record in found] == ["good", "batches", "short", "broken"]
    assert [record["kind"] for record in found] == [*["workload"] * 3, "failure"]
    assert "no such thing as a working fake" in found[-1]["cause"]
    assert [records.is_good(record) for record in found[:3]] == [True, True, False]
    best = max(found[:2], key=lambda record: record["figures"]["output_tok_s"])["setting"]
    assert run(tmp_path, "--workload", "single", "--peer", "a")[-1]["setting"] == best


def test_a_peer_that_is_not_installed_is_left_out_with_the_cause(
    tmp_path: Path, peers: dict[str, FakePeer], capsys: pytest.CaptureFixture[str]
) -> None:
    peers["a"].reason = "it was never built"
    found = run(tmp_path, "--workload", "single", "--setting", "b:good")
    assert [record["peer"] for record in found] == ["b"]
    assert "a is left out: it was never built" in capsys.readouterr().err


def test_answers_are_asked_alone_and_crowded_on_a_fresh_server_each(tmp_path: Path, peers: dict[str, FakePeer]) -> None:
    found = run(tmp_path, "--kind", "answers", "--setting", "a:good", "--peer", "a")
    assert [record["name"] for record in found] == ["alone", "crowded"]
    alone, crowded = (record["figures"]["answers"] for record in found)
    assert alone == crowded[:24]
    assert len(crowded) == 32
    assert found[0]["command"] != found[1]["command"]  # another port: another server


def test_each_turn_has_prompts_of_its_own_and_the_same_for_everybody() -> None:
    first, again, second = (make_tasks("workload", turn) for turn in (1, 1, 2))
    assert [task.name for task in first] == list(WORKLOADS)
    assert first == again
    for a, b in zip(first, second, strict=True):
        assert not {job.prompt for job in a.workload.jobs} & {job.prompt for job in b.workload.jobs}


def test_tasks_of_a_sweep_have_their_number_as_name() -> None:
    clients = make_tasks("clients", 1, counts=[1, 8])
    assert [(task.name, task.workload.num_clients, len(task.workload.jobs)) for task in clients] == [
        ("1", 1, 4),
        ("8", 8, 16),
    ]
    context = make_tasks("context", 1, counts=[100, 4000])
    assert {task.crowd.max_context for task in context} == {4064}
    assert [len(job.prompt) for task in context for job in task.workload.jobs] == [100, 100, 4000, 4000]
    assert [len(task.workload.jobs) for task in make_tasks("rows", 1, counts=[256])] == [256]


def test_a_cut_off_last_line_is_forgotten_and_any_other_damage_told(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    good = {"kind": "workload", "name": "chat", "peer": "a", "setting": "s", "turn": 1, "figures": {}}
    records.append(path, good)
    with path.open("a") as file:
        file.write('{"kind": "work')
    assert records.read(path) == [good]
    path.write_text('{"kind"\n{}\n')
    with pytest.raises(PeerError, match="line 1: is no JSON"):
        records.read(path)
    path.write_text("{}\n")
    with pytest.raises(PeerError, match="line 1: is no record"):
        records.read(path)
