"""What crash files hold, what they must not hold, and how many there are."""

from __future__ import annotations

import asyncio
import json
import threading
from array import array
from pathlib import Path
from typing import Any

import pytest

import everystop.server.crash_file as crash_module
from everystop.core.events import ArrivalEvent, FinishEvent, RefuseEvent
from everystop.core.request import FinishReason
from everystop.core.step_time import UNKNOWN_STEP_TIMES
from everystop.observe.history import History, StepRecord
from everystop.server.crash_file import EVENTS_NS, Crash, CrashFiles, Snapshot
from everystop.server.state import ServerState
from everystop.server.watchdog import Watchdog

STALL = Crash("engine_stalled", "no step has come back")
S = 1_000_000_000


def step(step_id: int, now_ns: int) -> StepRecord:
    ids = array("q", [step_id, 7])
    numbers = dict.fromkeys(StepRecord._fields, 0) | {"step_id": step_id, "now_ns": now_ns, "scheduled_ns": now_ns - 5}
    rows = {"request_ids": ids, "starts": array("q", [0, 4]), "nums": array("q", [3, 1]), "num_outputs": b"\x00\x01"}
    return StepRecord(**{**numbers, **rows, "step_times": UNKNOWN_STEP_TIMES})  # type: ignore[arg-type]


def finish(now_ns: int, reason: FinishReason, detail: str | int) -> FinishEvent:
    return FinishEvent(now_ns, 1, 7, 0, reason, detail, 3, 4, 0, 0)


def write(folder: Path, snapshot: Snapshot, max_files: int = 3) -> list[Any]:
    path = CrashFiles(folder, max_files, {"api_key": "2 set"}).write(STALL, snapshot, {"phase": "ready"})
    assert path is not None
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_stand_in_the_order_of_time_without_what_is_the_clients(tmp_path: Path) -> None:
    acts = [
        ArrivalEvent(1, 7, 7, 0, 3, 16, "ann@example.org", 0),
        RefuseEvent(2, 8, "NeverFits", "bob"),
        finish(30, FinishReason.STOP, "a stop string"),
        finish(31, FinishReason.STOP, 4242),
        finish(32, FinishReason.ERROR, "non_finite"),
    ]
    lines = write(tmp_path, Snapshot(steps=[step(1, 10), step(2, 20)], acts=acts))
    head = lines[0]
    assert (head["reason"], head["phase"], head["everystop_crash"]) == ("engine_stalled", "ready", 1)
    assert lines[1] == {"settings": {"api_key": "2 set"}}
    assert [line[0] for line in lines[5:]] == ["arrival", "refuse", "step", "step", "finish", "finish", "finish"]
    assert lines[7][-1] == [[1, 0, 3, 0], [7, 4, 1, 1]]
    assert [line[1].get("detail") for line in lines[-3:]] == [None, None, "non_finite"]
    text = json.dumps(lines)
    assert not [word for word in ("ann", "bob", "stop string", "4242") if word in text]


def test_only_the_last_five_minutes_are_taken() -> None:
    history = History()
    for i in range(10):
        history.steps.append(step(i, i * 60 * S))
    taken = Snapshot.of(history, 9 * 60 * S)
    assert [one.step_id for one in taken.steps] == [4, 5, 6, 7, 8, 9]
    assert EVENTS_NS == 300 * S


def test_a_file_has_a_bound_and_keeps_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_module, "MAX_BYTES", 2000)
    lines = write(tmp_path, Snapshot(steps=[step(i, i) for i in range(1000)]))
    steps = [line for line in lines if isinstance(line, list)]
    [left_out] = [line for line in lines if isinstance(line, dict) and "events_left_out" in line]
    assert left_out["events_left_out"] + len(steps) == 1000
    assert [one[1] for one in steps] == list(range(1000 - len(steps), 1000))
    assert sum(len(json.dumps(one)) for one in steps) < 4000


def test_only_the_newest_files_are_kept_and_only_ours_are_removed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "crash-20990101T000000Z-1.jsonl").write_text("from a clock that ran ahead")
    files = CrashFiles(tmp_path, 3, {})
    written = [files.write(STALL, Snapshot(), {}) for _ in range(5)]
    kept = {path.name for path in tmp_path.iterdir()}
    assert "notes.txt" in kept
    assert len(kept) == 1 + 3
    assert written[-1] is not None
    assert written[-1].name in kept
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("crash-*-*-*.jsonl"))


def test_none_are_written_where_none_are_wanted(tmp_path: Path) -> None:
    assert CrashFiles(tmp_path / "none", 0, {}).write(STALL, Snapshot(), {}) is None
    assert not (tmp_path / "none").exists()


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(crash_module.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        CrashFiles(tmp_path, 3, {}).write(STALL, Snapshot(), {})
    assert list(tmp_path.iterdir()) == []


def test_failure_that_comes_while_the_watchdog_looks_is_kept_though_the_server_ends(tmp_path: Path) -> None:
    is_looking, may_go_on = threading.Event(), threading.Event()

    def look_long() -> None:
        is_looking.set()
        may_go_on.wait(10.0)

    async def end_while_it_looks() -> None:
        watchdog = Watchdog(ServerState(stall_timeout_s=2.0), CrashFiles(tmp_path, 3, {}), when_live=look_long)
        watchdog.start(asyncio.get_running_loop())
        assert await asyncio.to_thread(is_looking.wait, 10.0)
        watchdog.engine_failed(RuntimeError("it broke"))
        ending = asyncio.create_task(asyncio.to_thread(watchdog.stop))
        await asyncio.sleep(0.1)
        may_go_on.set()
        await ending

    asyncio.run(end_while_it_looks())
    [path] = tmp_path.glob("crash-*.jsonl")
    assert json.loads(path.read_text().splitlines()[0])["reason"] == "engine_failed"
