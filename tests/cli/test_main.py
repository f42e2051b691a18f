"""What the command line prints and returns, without any model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import everystop
from everystop import cli
from everystop.config import Config
from everystop.core.errors import ConfigError, ModelError


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Callable[..., Any]) -> None:
    """Put a module in the place of one that a command imports when it runs."""
    module = ModuleType(name)
    for function_name, function in functions.items():
        setattr(module, function_name, function)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("EVERYSTOP_CONFIG", "EVERYSTOP_PORT", "EVERYSTOP_MODEL", "EVERYSTOP_THREADS"):
        monkeypatch.delenv(variable, raising=False)


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"everystop {everystop.__version__}\n"


@pytest.mark.parametrize(
    "words", [[], ["bench"], ["serve", "--prot", "1"], ["serve", "--port", "x"], ["serve", "--por", "1"]]
)
def test_wrong_call_ends_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert "usage: everystop" in capsys.readouterr().err


def test_unknown_command_is_answered_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bus"])
    error = capsys.readouterr().err
    assert all(command in error for command in ("'bus'", "'serve'", "'pull'", "'batch'"))


def test_serve_gets_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Config] = []

    def serve(config: Config) -> int:
        served.append(config)
        return 3

    fake_module(monkeypatch, "everystop.server.app", serve=serve)
    assert cli.main(["serve", "m.gguf", "--port", "9"]) == 3
    assert served == [Config(model="m.gguf", port=9)]


def test_pull_prints_where_the_model_lies(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake_module(monkeypatch, "everystop.model.pull", pull=lambda name, home: f"{home.root}/{name}.gguf")
    monkeypatch.setenv("EVERYSTOP_HOME", "/cache")
    assert cli.main(["pull"]) == 0
    assert capsys.readouterr().out == "/cache/smollm2.gguf\n"


@pytest.mark.parametrize(("error", "status"), [(ModelError("m.gguf: cut off"), 1), (ConfigError("no such thing"), 2)])
def test_named_error_is_one_sentence(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Config) -> int:
        raise error

    fake_module(monkeypatch, "everystop.server.app", serve=fail)
    assert cli.main(["serve"]) == status
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"everystop: {error}\n")


def test_settings_that_contradict_end_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--max-num-seqs", "9", "--max-num-batched-tokens", "8"]) == 2
    assert "--max-num-batched-tokens 8" in capsys.readouterr().err


def test_used_up_memory_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def serve(config: Config) -> int:
        raise MemoryError("std::bad_alloc")

    fake_module(monkeypatch, "everystop.server.app", serve=serve)
    assert cli.main(["serve"]) == 1
    assert "lower --kv-cache-memory" in capsys.readouterr().err


def test_used_up_memory_names_options_that_a_simulation_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_trace(*_: object) -> None:
        raise MemoryError

    fake_module(monkeypatch, "everystop.sim.run", run_trace=run_trace)
    assert cli.main(["simulate", "--trace", "t.csv", "--cost", "h100:llama-3.1-8b"]) == 1
    assert "lower --num-blocks or --replicas" in capsys.readouterr().err


def test_used_up_memory_names_no_option_that_a_reader_of_records_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def history_of_record(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("everystop.sim.replay.history_of_record", history_of_record)
    assert cli.main(["explain", "r1", "--record", "run.gz"]) == 1
    said = capsys.readouterr().err
    assert "take a shorter record" in said
    assert "--" not in said


def test_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: Config) -> int:
        raise KeyboardInterrupt

    fake_module(monkeypatch, "everystop.server.app", serve=interrupt)
    assert cli.main(["serve"]) == 130


def test_help_loads_nothing_but_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        "from everystop.cli import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--max-num-seqs N" in result.stdout
    assert result.stderr == "['everystop']\n"


def test_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "everystop", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == f"everystop {everystop.__version__}\n"


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    code = (
        "import sys; from everystop import cli\n"
        "cli.explain.run = lambda arguments: print('x' * 100_000) or 0\n"
        "sys.exit(cli.main(['explain', '1']))"
    )
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, b"")


SPEAKING = """
import sys
from everystop import cli
cli.explain.run = lambda arguments: {}
sys.exit(cli.main(['explain', '1']))
"""


def run_speaking(action: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command that does `action`, a Python expression, in a process of its own."""
    command = [sys.executable, "-c", SPEAKING.format(action)]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=60, **options)


@pytest.mark.parametrize("action", ["print('x') or 0", "print('x' * 100_000) or 0", "print('x', flush=True) or 0"])
def test_output_on_a_full_disk_is_one_sentence(action: str) -> None:
    with open("/dev/full", "w") as full:
        ended = run_speaking(action, stdout=full)
    assert (ended.returncode, ended.stderr) == (1, "everystop: standard output: No space left on device\n")


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["serve", "--help"], ["cache", "ls"], ["doctor"]])
def test_no_command_ends_in_a_traceback_on_a_full_disk(words: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "EVERYSTOP_HOME": str(tmp_path)}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "everystop", *words]
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False, timeout=60
        )
    assert ended.returncode in (0, 1, 120)
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr


def test_a_simulation_on_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("req_time_s,client,prompt_tokens,output_tokens\n0,ann,10,5\n")
    command = [sys.executable, "-m", "everystop", "simulate", "--trace", str(trace), "--cost", "h100:llama-3.1-8b"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr == "everystop: standard output: No space left on device\n"


@pytest.mark.parametrize("closed", ["0", "1", "2", "01", "12", "012"])
def test_closed_streams_are_replaced_so_that_no_file_takes_their_place(closed: str, tmp_path: Path) -> None:
    told = tmp_path / "told"
    action = (
        "[print('x'), print('y', file=sys.stderr), sys.stdin.read(), "
        f"open({str(told)!r}, 'w').write(str(open('/dev/null').fileno()))] and 0"
    )
    shell = " ".join(f"{number}{'<' if number == '0' else '>'}&-" for number in closed)
    command = ["sh", "-c", f'exec "$0" "$@" {shell}', sys.executable, "-c", SPEAKING.format(action)]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert int(told.read_text()) > 2
    assert b"Traceback" not in ended.stderr


def test_a_file_that_the_system_refuses_is_one_sentence_with_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Config) -> int:
        raise FileNotFoundError(2, "No such file or directory", "/no/such/file")

    fake_module(monkeypatch, "everystop.server.app", serve=fail)
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err == "everystop: /no/such/file: No such file or directory\n"
