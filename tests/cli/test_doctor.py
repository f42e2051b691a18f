"""What the doctor finds, says and returns."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everystop import checkup, cli
from everystop.checkup import CHECKS, examine
from everystop.checkup.finding import Finding, Status
from everystop.config import Config
from everystop.model.pull import EMBEDDED


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("EVERYSTOP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("EVERYSTOP_HOME", str(tmp_path / "home"))


def findings(**settings: Any) -> dict[str, Finding]:
    where = {} if "uds" in settings else {"port": 0}
    return {finding.name: finding for finding in examine(Config(**where, **settings))}


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, dict[str, str]]]:
    status = cli.main(["doctor", "--json", *words])
    return status, {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}


def test_each_thing_is_one_line_with_a_word_that_says_how_well_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["doctor", "--port", "0"])
    lines = capsys.readouterr().out.splitlines()
    assert [line[6:].split("  ")[0].strip() for line in lines] == ["options", *CHECKS]
    assert {line.split()[0] for line in lines} <= {"ok", "warn", "fail"}


def test_findings_are_named_as_their_checks_and_problems_have_an_advice_or_an_explanation() -> None:
    found = findings()
    assert list(found) == list(CHECKS)
    assert all(one.advice for one in found.values() if one.status is Status.WARN)
    assert found["model"].status is Status.WARN, "nothing has been pulled into this home"
    assert "everystop pull smollm2" in found["model"].advice


def test_a_taken_port_fails_and_so_does_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        status, found = told(capsys, "--port", str(other.getsockname()[1]))
    assert (status, found["address"]["status"]) == (1, "fail")
    assert "is taken" in found["address"]["text"]


def test_options_that_cannot_be_honoured_are_a_finding(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("max-num-seq = 5\n")
    status, found = told(capsys, "--config", str(file))
    assert (status, found["options"]["status"]) == (1, "fail")
    assert "is it max-num-seqs?" in found["options"]["text"]


def test_a_model_that_is_none_fails(tmp_path: Path) -> None:
    assert findings(model=str(tmp_path / "none.gguf"))["model"].status is Status.FAIL
    damaged = tmp_path / "m.gguf"
    damaged.write_bytes(b"GGUF")
    assert findings(model=str(damaged))["model"].status is Status.FAIL


def test_an_embedded_model_that_is_damaged_can_be_fetched_again(tmp_path: Path) -> None:
    path = tmp_path / "home" / "models" / EMBEDDED["smollm2"].file_name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    found = findings()
    assert found["model"].status is Status.WARN
    assert f"{path} is damaged: it has 4 bytes instead of" in found["model"].text
    assert found["KV cache"].text == "not looked at: it depends on the model"


def test_a_refusal_is_its_sentence_alone() -> None:
    """Not that a check went wrong."""
    found = findings(device="cpu", dtype="fp8")
    assert found["kernels"].status is Status.FAIL
    assert found["kernels"].text.startswith("--dtype fp8 cannot be had with --device cpu")
    assert found["KV cache"].status is Status.WARN


def test_a_home_that_cannot_be_written_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EVERYSTOP_HOME", str(tmp_path / "file"))
    assert findings()["cache"].status is Status.FAIL


def test_an_instruction_set_that_cannot_be_had_fails(tmp_path: Path) -> None:
    """In a process of its own: the kernels choose once."""
    command = [sys.executable, "-m", "everystop", "doctor", "--json", "--port", "0"]
    environment = {**os.environ, "EVERYSTOP_ISA": "no-such-isa"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    [kernels] = [one for one in json.loads(ended.stdout)["findings"] if one["name"] == "kernels"]
    assert kernels["status"] == "fail"
    assert "no-such-isa" in kernels["text"]


def test_crash_files_are_a_reason_to_look(tmp_path: Path) -> None:
    assert findings()["crash files"].status is Status.OK
    folder = tmp_path / "home" / "crashes"
    folder.mkdir(parents=True)
    (folder / "crash-20261130T000000Z-1.jsonl").write_text("{}")
    found = findings()["crash files"]
    assert (found.status, found.text.split()[0]) == (Status.WARN, "1")


def test_little_room_and_few_files_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 5 << 20})())
    monkeypatch.setattr(checkup, "available_memory_bytes", lambda: 100 << 20)
    monkeypatch.setattr(checkup.resource, "getrlimit", lambda number: (256, 1024))
    monkeypatch.setattr(checkup, "cpu_quota", lambda: 0.5)
    found = findings()
    assert {found[name].status for name in ("cache", "memory", "open files", "cores")} == {Status.WARN}


def test_a_check_that_fails_by_itself_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Config) -> Finding:
        raise RuntimeError("no /proc here")

    monkeypatch.setitem(checkup.CHECKS, "memory", fail)
    found = findings()["memory"]
    assert found.status is Status.FAIL
    assert "no /proc here" in found.text


def test_what_a_dead_server_left_is_told_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(path))
    inode = path.stat().st_ino
    found = findings(uds=str(path))["address"]
    assert found.status is Status.OK
    assert "dead server" in found.text
    assert path.stat().st_ino == inode


def test_the_path_of_a_socket_is_looked_at_and_nothing_made(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert findings(uds=str(path))["address"].status is Status.OK
    assert not path.exists()
    for bad in ("no/such/folder/s", "x" * 200):
        assert findings(uds=str(tmp_path / bad))["address"].status is Status.FAIL
