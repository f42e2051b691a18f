"""`everystop key` as a user runs it."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from everystop.cli import main
from everystop.keys import NamedKey, hash_key, read_key_file


def test_a_new_key_comes_with_the_line_that_lets_it_in(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keys = set()
    for _ in range(2):
        assert main(["key", "--tenant", "gold"]) == 0
        shown = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
        key, line = shown["key"].strip(), shown["line"]
        assert len(key) > 40
        assert key not in line
        (tmp_path / "keys.txt").write_text(line)
        assert read_key_file(str(tmp_path / "keys.txt")) == (NamedKey("gold", hash_key(key)),)
        keys.add(key)
    assert len(keys) == 2


def test_the_hash_of_a_key_that_comes_by_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("sk-mine\n"))
    assert main(["key", "--hash"]) == 0
    (tmp_path / "keys.txt").write_text(capsys.readouterr().out)
    assert read_key_file(str(tmp_path / "keys.txt")) == (NamedKey("", hash_key("sk-mine")),)


@pytest.mark.parametrize("name", ["a:b", " a", "#a", "a\nb", "a\u2028b"])
def test_a_name_that_no_file_could_hold_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "--tenant", name]) == 2
    assert "the tenant's name is" in capsys.readouterr().err


def test_no_key_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["key", "--hash"]) == 2
    assert "a key is empty" in capsys.readouterr().err
