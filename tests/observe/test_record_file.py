"""The file of a record: private, and in nobody's way."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from everystop.core.plan import StepPlan
from everystop.core.policy import PolicySettings
from everystop.observe.record_file import MAX_OLD_RECORDS, create_private
from everystop.observe.recorder import Recorder


def write_record(path: Path, *, has_requests: bool = False) -> bytes:
    recorder = Recorder(path, "continuous", PolicySettings())
    recorder.started({})
    recorder.scheduled(StepPlan(step_id=0), 1)
    if has_requests:
        recorder.aborted(0, 2)
    recorder.close()
    return path.read_bytes()


def test_only_its_owner_can_read_a_record(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_record(tmp_path / "run.gz")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run.gz").stat().st_mode) == 0o600


def test_a_restart_keeps_the_record_of_the_run_that_crashed(tmp_path: Path) -> None:
    path = tmp_path / "run.gz"
    written = []
    for i in range(MAX_OLD_RECORDS + 3):
        write_record(path)
        path.write_bytes(b"run %d" % i)
        written.append(path.read_bytes())
    kept = [path, *(tmp_path / f"run.gz.{number}" for number in range(1, MAX_OLD_RECORDS + 1))]
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    assert [each.read_bytes() for each in kept] == written[::-1][: len(kept)]


def test_starts_that_served_nobody_push_out_no_record(tmp_path: Path) -> None:
    path = tmp_path / "run.gz"
    of_a_run = write_record(path, has_requests=True)
    for _ in range(MAX_OLD_RECORDS + 2):
        write_record(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.gz", "run.gz.1"]
    assert (tmp_path / "run.gz.1").read_bytes() == of_a_run


def test_a_record_that_was_cut_off_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.gz"
    cut_off = write_record(path)[:-12]
    path.write_bytes(cut_off)
    write_record(path)
    assert (tmp_path / "run.gz.1").read_bytes() == cut_off


def test_a_gap_among_the_old_records_is_filled_before_any_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "run.gz"
    for name, text in (("run.gz", "new"), ("run.gz.1", "old"), ("run.gz.3", "older")):
        (tmp_path / name).write_text(text)
    write_record(path)
    assert [(tmp_path / f"run.gz.{i}").read_text() for i in (1, 2, 3)] == ["new", "old", "older"]


def test_a_link_goes_on_pointing_at_the_newest(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    path, target = tmp_path / "run.gz", tmp_path / "volume" / "run.gz"
    path.symlink_to(target)
    target.write_text("old")
    newest = write_record(path)
    assert path.is_symlink()
    assert target.read_bytes() == newest
    assert (tmp_path / "volume" / "run.gz.1").read_text() == "old"


def test_an_empty_file_is_filled_and_keeps_its_rights(tmp_path: Path) -> None:
    path = tmp_path / "run.gz"
    path.touch(0o640)
    path.chmod(0o640)
    write_record(path)
    assert [each.name for each in tmp_path.iterdir()] == ["run.gz"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_what_cannot_be_moved_aside_is_an_error_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.gz"
    path.write_text("old")

    def busy(self: Path, target: Path) -> Path:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(Path, "replace", busy)
    with pytest.raises(OSError, match="busy"):
        Recorder(path, "continuous", PolicySettings())
    assert path.read_text() == "old"


def test_a_private_file_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "workload.jsonl"
    create_private(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("x")
    create_private(path)
    assert path.read_text() == "x"
