from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest

import everystop.model.home as home_module
from everystop.model.home import Home


def test_place_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert Home.from_environment({"EVERYSTOP_HOME": "/a/b", "XDG_CACHE_HOME": "/x"}).root == Path("/a/b")
    assert Home.from_environment({"EVERYSTOP_HOME": "~/b"}).root == Path("/home/someone/b")
    assert Home.from_environment({"XDG_CACHE_HOME": "/x"}).root == Path("/x/everystop")
    assert Home.from_environment({"XDG_CACHE_HOME": "relative"}).root == Path("/home/someone/.cache/everystop")
    assert Home.from_environment({}).root == Path("/home/someone/.cache/everystop")


def alter(path: Path, data: bytes) -> None:
    """Write the file anew and put its mtime back; the clock of a file system may tick seldom."""
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        path.write_bytes(data)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_hash_is_remembered_until_the_file_changes(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    read: list[Path] = []
    real = home_module.file_sha256

    def counting(file: Path) -> str:
        read.append(file)
        return real(file)

    monkeypatch.setattr(home_module, "file_sha256", counting)
    assert home.sha256(path) == home.sha256(path) == hashlib.sha256(b"one").hexdigest()
    assert len(read) == 1
    alter(path, b"two")
    assert home.sha256(path) == hashlib.sha256(b"two").hexdigest()
    assert len(read) == 2


def test_hash_of_a_stamp_that_is_damaged_is_taken_again(home: Home, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    wanted = home.sha256(path)
    (stamp,) = (home.root / "stamps").iterdir()
    for damage in (b"", b"{", b"[]", b'{"sha256": 3}'):
        stamp.write_bytes(damage)
        assert home.sha256(path) == wanted


def test_record_holds_for_one_boot_and_one_state(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    assert not home.is_unchanged(path, "verified")
    home.record(path, "verified")
    assert home.is_unchanged(path, "verified")
    assert not home.is_unchanged(path, "other")
    with monkeypatch.context() as patch:
        patch.setattr(home_module, "_boot_id", lambda: "another")
        assert not home.is_unchanged(path, "verified")
    alter(path, b"one")
    assert not home.is_unchanged(path, "verified")


def test_lock_lets_one_in_at_a_time(home: Home) -> None:
    inside, most = 0, 0
    guard = threading.Lock()

    def enter() -> None:
        nonlocal inside, most
        for _ in range(20):
            with home.lock("a/b name"):
                with guard:
                    inside += 1
                    most = max(most, inside)
                with guard:
                    inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert [path.name for path in (home.root / "locks").iterdir()] == ["a_b_name"]


def test_home_that_cannot_be_written_still_hashes(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    assert Home(tmp_path / "file").sha256(tmp_path / "file") == hashlib.sha256(b"here").hexdigest()
