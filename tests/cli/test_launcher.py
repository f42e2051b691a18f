"""The launcher, in copies of the clone whose uv and .venv/bin/python only write down what they are asked."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FAKE_UV = """#!/bin/sh
echo "uv $*" >>"$CALLS"
case "$*" in
"pip install"*)
  [ -z "${UV_FAILS-}" ] || { echo "$UV_FAILS"; exit 1; }
  while [ -n "${WAIT_FOR-}" ] && [ ! -e "$WAIT_FOR" ]; do sleep 0.05; done
  [ -z "${INSTALL_DIES-}" ] || kill -KILL "$PPID"
  while [ -n "${OUTLIVE_UNTIL-}" ] && [ ! -e "$OUTLIVE_UNTIL" ]; do sleep 0.05; done
  ;;
venv*) for last; do :; done; mkdir -p "$last/bin"; cp "$FAKES/venv-python" "$last/bin/python" ;;
esac
"""
FAKE_PYTHON = """#!/bin/sh
case "$*" in
*sysconfig*) echo "$FAKE_INCLUDE 3.11" ;;
*"-m pip"*)
  echo "pip $*" >>"$CALLS"
  [ -z "${PIP_FAILS-}" ] || { echo "$PIP_FAILS"; exit 1; }
  ;;
*compileall*) ;;
*) echo "ran $*" ;;
esac
"""


class Clone:
    """A copy of what the launcher needs, with the programs it may find: `run` is the launcher with arguments."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder = folder
        self.programs = programs
        self.calls_file = programs / "calls"
        for name in ("everystop", "CMakeLists.txt", "pyproject.toml"):
            shutil.copy2(ROOT / name, folder / name)
        for name in ("tools", "requirements"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "csrc").mkdir()
        (folder / "csrc" / "a.cpp").write_text("int a;\n")
        (folder / "src").mkdir()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": str(self.programs / "bin"),
            "CALLS": str(self.calls_file),
            "FAKES": str(self.programs),
            "FAKE_INCLUDE": str(self.programs / "include"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def start(self, *arguments: str, program: Path | None = None, **variables: str) -> subprocess.Popen[str]:
        command = [str(program or self.folder / "everystop"), *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd="/", env=self.environment | variables, stdout=pipe, stderr=pipe, text=True, errors="replace"
        )

    def run(self, *arguments: str, program: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, program=program, **variables)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    def kinds(self) -> list[str]:
        """What was asked of uv and pip, in short: venv, clients, packages, torch, triton, native."""
        kind = {"venv": " venv ", "clients": "/clients.lock", "packages": "--require-hashes"}
        kind |= {"torch": "torch==", "triton": "triton==", "native": "--editable"}
        return [next(name for name, mark in kind.items() if mark in call) for call in self.calls()]


def make_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    folder, programs = tmp_path / "a clone", tmp_path / "programs"
    folder.mkdir()
    (programs / "bin").mkdir(parents=True)
    (programs / "include").mkdir()
    (programs / "include" / "Python.h").touch()
    for name in ("sh", "readlink", "find", "mkdir", "cp", "sleep"):
        found = shutil.which(name)
        assert found
        (programs / "bin" / name).symlink_to(found)
    (programs / "bin" / "python3").symlink_to(os.path.realpath(sys.executable))
    make_program(programs / "bin" / "uv", FAKE_UV)
    make_program(programs / "bin" / "c++", "#!/bin/sh\n")
    make_program(programs / "venv-python", FAKE_PYTHON)
    return Clone(folder, programs)


def test_first_start_sets_up_and_runs_the_command(clone: Clone) -> None:
    result = clone.run("serve", "a model", "--port", "1")
    assert (result.returncode, result.stdout) == (0, "ran -P -m everystop serve a model --port 1\n")
    assert clone.kinds() == ["venv", "packages", "native"]
    assert "build.lock" in clone.calls()[1]
    assert "runtime.lock" in clone.calls()[1]
    assert "dev.lock" not in clone.calls()[1]
    assert "--no-build-isolation --no-deps" in clone.calls()[2]
    assert all(line.startswith("everystop: ") for line in result.stderr.splitlines())


def test_second_start_does_and_prints_nothing_of_its_own(clone: Clone) -> None:
    clone.run("serve")
    before = clone.calls()
    (clone.folder / "tools" / "environment.py").chmod(0o644)
    result = clone.run("pull", "x y")
    assert (result.stdout, result.stderr) == ("ran -P -m everystop pull x y\n", "")
    assert clone.calls() == before


def test_second_start_needs_no_other_python(clone: Clone) -> None:
    clone.run("serve")
    (clone.programs / "bin" / "python3").unlink()
    assert clone.run("serve").stdout == "ran -P -m everystop serve\n"


def test_runs_through_a_symbolic_link_from_another_folder(clone: Clone, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(clone.folder / "everystop")
    for _ in range(2):
        assert clone.run("serve", program=link).stdout == "ran -P -m everystop serve\n"
    assert clone.kinds() == ["venv", "packages", "native"]


def make_newer(path: Path) -> None:
    """Date a file after everything that the launcher wrote."""
    later_ns = path.stat().st_mtime_ns + 10**12
    os.utime(path, ns=(later_ns, later_ns))


@pytest.mark.parametrize(
    ("changed", "redone"),
    [
        ("csrc/a.cpp", ["native"]),
        ("csrc/new.cpp", ["native"]),
        ("CMakeLists.txt", ["native"]),
        ("pyproject.toml", ["native"]),
        ("requirements/runtime.lock", ["packages"]),
        ("requirements/build.lock", ["packages", "native"]),
        ("requirements/dev.lock", []),
    ],
)
def test_only_what_changed_is_done_again(clone: Clone, changed: str, redone: list[str]) -> None:
    clone.run("serve")
    path = clone.folder / changed
    path.write_text((path.read_text() if path.exists() else "") + "\n# changed\n")
    make_newer(path)
    assert clone.run("serve").stdout == "ran -P -m everystop serve\n"
    assert clone.kinds()[3:] == redone


def test_removed_source_is_noticed(clone: Clone) -> None:
    (clone.folder / "csrc" / "b.cpp").touch()
    clone.run("serve")
    (clone.folder / "csrc" / "b.cpp").unlink()
    make_newer(clone.folder / "csrc")
    clone.run("serve")
    assert clone.kinds()[3:] == ["native"]


def test_touched_but_equal_source_rebuilds_nothing(clone: Clone) -> None:
    clone.run("serve")
    make_newer(clone.folder / "csrc" / "a.cpp")
    result = clone.run("serve")
    assert (result.stdout, result.stderr) == ("ran -P -m everystop serve\n", "")
    assert len(clone.calls()) == 3


def test_tests_add_the_dev_lock_torch_and_triton_with_pip_and_the_clients(clone: Clone) -> None:
    clone.run("serve")
    result = clone.run("test", "-k", "x")
    assert result.stdout == f"ran -P {clone.folder}/tools/checks.py -k x\n"
    assert clone.kinds()[3:] == ["packages", "torch", "triton", "clients"]
    assert all(call.startswith("pip ") for call in clone.calls()[4:6])
    assert "dev.lock" in clone.calls()[3]
    assert "--require-hashes" in clone.calls()[6]
    clone.run("test")
    assert len(clone.calls()) == 7


def clients_python(clone: Clone) -> Path:
    return clone.folder / ".venv" / "clients" / "bin" / "python"


def test_clients_are_installed_apart_from_the_tests_with_pip_too(clone: Clone) -> None:
    clone.run("test")
    assert f"--python {clients_python(clone)} " in clone.calls()[-1]
    assert all("clients.lock" not in call and "clients/bin" not in call for call in clone.calls()[:-1])
    lock = clone.folder / "requirements" / "clients.lock"
    lock.write_text(lock.read_text() + "\n# changed\n")
    clone.run("test", UV_FAILS="error: no")
    assert clone.kinds()[-2:] == ["clients", "clients"]
    assert f"--python {clients_python(clone)} install " in clone.calls()[-1]


def test_clients_that_were_removed_or_half_installed_are_made_anew(clone: Clone) -> None:
    clone.run("test")
    shutil.rmtree(clients_python(clone).parents[1])
    before = len(clone.calls())
    clone.run("serve")
    assert len(clone.calls()) == before
    assert clone.run("test", INSTALL_DIES="1").returncode == -signal.SIGKILL
    left_over = clients_python(clone).parents[1] / "left-over"
    left_over.touch()
    assert clone.run("test").returncode == 0
    assert clone.kinds()[before:] == ["clients", "clients"]
    assert clients_python(clone).exists()
    assert not left_over.exists()


def test_a_network_that_ends_before_the_clients_is_named(clone: Clone) -> None:
    clone.run("test")
    shutil.rmtree(clients_python(clone).parents[1])
    refused = "NewConnectionError: Failed to establish a new connection: [Errno 111] Connection refused"
    sentence = last_sentence(clone.run("test", UV_FAILS="error sending request", PIP_FAILS=refused))
    assert "no package index can be reached" in sentence
    assert clone.run("serve").stdout == "ran -P -m everystop serve\n"


def test_moved_clone_gets_a_new_environment(clone: Clone, tmp_path: Path) -> None:
    clone.run("serve")
    (clone.folder / ".venv" / "left-over").touch()
    clone.folder = clone.folder.rename(tmp_path / "moved")
    result = clone.run("serve")
    assert result.stdout == "ran -P -m everystop serve\n"
    assert clone.kinds() == ["venv", "packages", "native"] * 2
    assert not (clone.folder / ".venv" / "left-over").exists()


def test_environment_whose_python_is_gone_is_made_anew(clone: Clone) -> None:
    clone.run("serve")
    (clone.folder / ".venv" / "bin" / "python").unlink()
    assert clone.run("serve").returncode == 0
    assert clone.kinds() == ["venv", "packages", "native"] * 2


def test_killed_installation_is_done_again_from_scratch(clone: Clone) -> None:
    assert clone.run("serve", INSTALL_DIES="1").returncode == -signal.SIGKILL
    result = clone.run("serve")
    assert result.stdout == "ran -P -m everystop serve\n"
    assert clone.kinds() == ["venv", "packages", "packages", "native"]
    assert "--force-reinstall" not in clone.calls()[1]
    assert "--force-reinstall" in clone.calls()[2]


def test_failed_build_is_tried_again_without_installing_packages_again(clone: Clone) -> None:
    failed = clone.run("serve", PIP_FAILS="a.cpp:1: error: no such luck")
    assert failed.returncode == 1
    assert "no such luck" in failed.stderr
    assert "everystop-setup.log" in failed.stderr.splitlines()[-1]
    assert clone.run("serve").stdout == "ran -P -m everystop serve\n"
    assert clone.kinds() == ["venv", "packages", "native", "native"]


def test_two_launchers_at_once_set_up_once(clone: Clone, tmp_path: Path) -> None:
    go = tmp_path / "go"
    processes = [clone.start("serve", WAIT_FOR=str(go)) for _ in range(2)]
    try:
        waiting = "everystop: another set-up of this folder is running; waiting for it\n"
        first_lines: list[str] = []
        while waiting not in first_lines:
            ready, _, _ = select.select([process.stderr for process in processes], [], [], 30)
            assert ready, "no launcher said that it waits"
            first_lines += [stream.readline() for stream in ready]
    finally:
        go.touch()
    results = [process.communicate(timeout=60) for process in processes]
    assert [out for out, _ in results] == ["ran -P -m everystop serve\n"] * 2
    assert clone.kinds() == ["venv", "packages", "native"]


def test_installer_that_outlives_its_killed_launcher_is_waited_for(clone: Clone, tmp_path: Path) -> None:
    go = tmp_path / "go"
    killed = clone.start("serve", INSTALL_DIES="1", OUTLIVE_UNTIL=str(go))
    assert killed.wait(60) == -signal.SIGKILL
    second = clone.start("serve")
    try:
        assert second.stderr
        assert second.stderr.readline() == "everystop: another set-up of this folder is running; waiting for it\n"
        assert clone.kinds() == ["venv", "packages"]
    finally:
        go.touch()
    assert second.communicate(timeout=60)[0] == "ran -P -m everystop serve\n"
    assert clone.kinds() == ["venv", "packages", "packages", "native"]
    killed.communicate(timeout=60)


def last_sentence(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]


def test_missing_compiler_is_named_before_anything_is_downloaded(clone: Clone) -> None:
    (clone.programs / "bin" / "c++").unlink()
    sentence = last_sentence(clone.run("serve"))
    assert "no C++ compiler" in sentence
    assert "apt install g++" in sentence
    assert clone.kinds() == ["venv"]


def test_compiler_named_by_cxx_must_exist(clone: Clone) -> None:
    assert "CXX names nothing-here" in last_sentence(clone.run("serve", CXX="nothing-here -O1"))


def test_compiler_that_is_too_old_is_named(clone: Clone) -> None:
    make_program(clone.programs / "bin" / "c++", "#!/bin/sh\necho 'unrecognized option -std=c++17' >&2\nexit 1\n")
    sentence = last_sentence(clone.run("serve"))
    assert "unrecognized option" in sentence
    assert "install gcc" in sentence


def test_missing_python_header_is_named(clone: Clone) -> None:
    (clone.programs / "include" / "Python.h").unlink()
    sentence = last_sentence(clone.run("serve"))
    assert "Python.h" in sentence
    assert "apt install python3.11-dev" in sentence


def test_pip_is_tried_where_uv_fails_and_a_missing_network_is_named(clone: Clone) -> None:
    refused = "NewConnectionError: Failed to establish a new connection: [Errno 111] Connection refused"
    result = clone.run("serve", UV_FAILS="error sending request", PIP_FAILS=refused)
    sentence = last_sentence(result)
    assert "no package index can be reached" in sentence
    assert "uv could not (error sending request); trying pip" in result.stderr
    assert [call.split()[0] for call in clone.calls()] == ["uv", "uv", "pip"]


def test_old_python_is_named(clone: Clone) -> None:
    (clone.programs / "bin" / "python3").unlink()
    make_program(clone.programs / "bin" / "python3", "#!/bin/sh\nexit 1\n")
    assert "no Python 3.11 or newer" in last_sentence(clone.run("serve"))


def test_newer_python_beside_an_old_one_is_found(clone: Clone) -> None:
    (clone.programs / "bin" / "python3").rename(clone.programs / "bin" / "python3.11")
    make_program(clone.programs / "bin" / "python3", "#!/bin/sh\nexit 1\n")
    assert clone.run("serve").stdout == "ran -P -m everystop serve\n"


def test_damaged_record_means_starting_over(clone: Clone) -> None:
    clone.run("serve")
    (clone.folder / ".venv" / "everystop-ready").unlink()
    (clone.folder / ".venv" / "everystop-state.json").write_text("{")
    assert clone.run("serve").stdout == "ran -P -m everystop serve\n"
    assert clone.kinds() == ["venv", "packages", "native"] * 2
    assert json.loads((clone.folder / ".venv" / "everystop-state.json").read_text())["root"] == str(clone.folder)


@pytest.mark.slow
def test_real_pip_without_network_ends_with_one_sentence(clone: Clone) -> None:
    (clone.programs / "bin" / "uv").unlink()
    result = clone.run("serve", PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_RETRIES="0", PIP_CONFIG_FILE="/dev/null")
    assert "no package index can be reached" in last_sentence(result)


@pytest.mark.slow
def test_fresh_clone_installs_builds_and_starts(tmp_path: Path) -> None:
    folder = tmp_path / "fresh clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    command = [str(folder / "everystop"), "--version"]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    second = subprocess.run(command, capture_output=True, text=True, check=True)
    assert first.stdout == second.stdout
    assert first.stdout.startswith("everystop 0.")
    assert "building the native module" in first.stderr
    assert second.stderr == ""
    native = [str(folder / ".venv/bin/python"), "-c", "import everystop._native as n; print(n.__file__)"]
    assert str(folder) in subprocess.run(native, capture_output=True, text=True, check=True, cwd="/").stdout
