"""The file of a record: private, and in nobody's way."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from everystop.core.plan import StepPlan
from everystop.core.policy import PolicySettings
from everystop.observe.record_file import MAX_OLD_RECORDS, check_record, create_private, open_record
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


@pytest.mark.parametrize("name", ["none/run.gz", ".", "file/run.gz", "x" * 300, "link"])
def test_what_cannot_be_opened_is_known_before(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"run")
    (tmp_path / "link").symlink_to(tmp_path / "none" / "run.gz")
    with pytest.raises(OSError) as known:
        check_record(tmp_path / name)
    with pytest.raises(OSError) as opened:
        open_record(tmp_path / name)
    assert known.value.strerror == opened.value.strerror


def test_looking_whether_a_record_can_be_written_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.gz"
    check_record(path)
    assert not path.exists()
    written = write_record(path, has_requests=True)
    check_record(path)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("run.gz", written)]
    check_record(Path(os.devnull))


@pytest.mark.parametrize("written", [None, b"", b"run"])
def test_a_folder_or_a_file_of_others_is_refused(
    written: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new file, and one that moves aside, need the folder; one that is written over does not."""
    path = tmp_path / "run.gz"
    if written is not None:
        path.write_bytes(written)
    closed = path if written == b"" else tmp_path
    monkeypatch.setattr(os, "access", lambda one, mode: Path(one) != closed)
    with pytest.raises(OSError, match="Permission denied"):
        check_record(path)
