"""What clients saw and what a record says are joined, or it is said why they are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.server.parrot import parrot

from everystop.core.errors import RecordError
from everystop.core.policy import PolicySettings
from everystop.observe.recorder import Recorder
from everystop.sim.record import Record
from everystop.sim.replay import histories_of_record, history_of_record
from everystop.sim.workloads import Job, Workload
from everystop.trial.http_client import Target
from everystop.trial.recorded import Played, joined, play

ANSWERS = Workload("answers", 3, tuple(Job(prompt=tuple(b"abcdefg"[: 3 + i]), max_tokens=2 + i) for i in range(4)))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Played]]:
    """A warm-up and two runs on one server, and the record of all."""
    path = tmp_path_factory.mktemp("recorded") / "record.gz"
    recorder = Recorder(path, "continuous", PolicySettings())
    with parrot(recorder=recorder) as server:
        target = Target(url=f"http://127.0.0.1:{server.port}")
        names = ("warm-up", "first", "second")
        played = [play(ANSWERS, target, name, "continuous", 0, lambda *_: None) for name in names]
    return path, played


def test_runs_are_told_apart(recorded: tuple[Path, list[Played]]) -> None:
    path, (_, *played) = recorded
    runs = joined(played, path, 16)
    assert [[line.error for line in run.requests] for run in runs] == [[None] * 4] * 2
    ids = [{line.request_id for line in run.requests} for run in runs]
    assert ids[0].isdisjoint(ids[1])
    for run, own in zip(runs, ids, strict=True):
        assert run.history is not None
        assert run.max_num_seqs == 16
        assert set(run.history.trails) == own
        steps = run.history.steps.since(run.history.steps.start)
        assert {request_id for step in steps for request_id in step.request_ids} == own
        assert sum(sum(step.num_outputs) for step in steps) == sum(job.max_tokens for job in ANSWERS.jobs)


def test_the_stretches_of_a_record_are_together_the_whole(recorded: tuple[Path, list[Played]]) -> None:
    path, _ = recorded
    whole = history_of_record(path)
    parts = histories_of_record(Record.read(path), [0, 4, 8])
    steps = [step.step_id for part in parts for step in part.steps.since(part.steps.start)]
    assert steps == [step.step_id for step in whole.steps.since(whole.steps.start)]
    acts = [act for part in parts for act in part.acts.since(part.acts.start)]
    assert acts == list(whole.acts.since(whole.acts.start))


def test_a_request_that_the_record_has_not_is_named(recorded: tuple[Path, list[Played]]) -> None:
    path, (_, played, _) = recorded
    with pytest.raises(RecordError, match="has no request third-0, which was sent"):
        joined([replace(played, name="third")], path, 16)


def test_a_length_that_the_record_has_not_is_named(recorded: tuple[Path, list[Played]]) -> None:
    path, (_, played, last) = recorded
    lines = played.run.requests
    odd = replace(played, run=replace(played.run, requests=(replace(lines[0], num_output_tokens=9), *lines[1:])))
    with pytest.raises(RecordError, match=r"have \(3, 2\) tokens, and its client that they have \(3, 9\)"):
        joined([odd, last], path, 16)


def test_requests_that_nobody_sent_are_named(recorded: tuple[Path, list[Played]]) -> None:
    path, (_, played, last) = recorded
    with pytest.raises(RecordError, match="has 8 requests of a run of 4"):
        joined([played], path, 16)
    fewer = replace(played, run=replace(played.run, requests=played.run.requests[:3]))
    with pytest.raises(RecordError, match="has 4 requests of a run of 3"):
        joined([fewer, last], path, 16)


def test_clients_and_engine_share_a_clock(recorded: tuple[Path, list[Played]]) -> None:
    path, (_, *played) = recorded
    for run in joined(played, path, 16):
        assert run.history is not None
        for line in run.requests:
            assert line.request_id is not None
            trail = run.history.trails[line.request_id]
            assert trail.arrival is not None
            assert trail.finish is not None
            assert 0 <= line.sent_s <= run.seconds(trail.arrival.now_ns)
            assert run.seconds(trail.finish.now_ns) <= line.end_s
