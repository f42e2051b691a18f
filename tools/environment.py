"""Makes `.venv` for this clone, keeps it in step with the lock files and `csrc/`, then runs the command line in it.

Standard library only: it runs before anything is installed. `../everystop` starts it when `.venv/everystop-ready` is
missing, was made for another folder, or is older than what it was made from. Each step records the hash of what it
was made from in `.venv/everystop-state.json`, so an interrupted set-up goes on where it stopped. For `test` it also
makes `.venv/clients`, a further environment with the clients that the tests drive.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
READY = VENV / "everystop-ready"
STATE = VENV / "everystop-state.json"
CLIENTS = VENV / "clients"
CLIENTS_PYTHON = CLIENTS / "bin" / "python"
LOG = VENV / "everystop-setup.log"
IN_VENV = ("build", "runtime", "dev")
UNHASHED = {"torch": "torch==2.13.0", "triton": "triton==3.9.0"}

NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|Connection refused|"
    r"Network is unreachable|name resolution|Name or service not known|dns error|error sending request|timed out|"
    r"SSLError|\(from versions: none\)",
    re.IGNORECASE,
)


class SetupError(Exception):
    """The set-up cannot go on; the message is one sentence that says what to do."""


class CommandFailed(Exception):
    """A command ended with an error; `output` is what it printed."""

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self.output = output

    def reason(self) -> str:
        """The line that says most: the first that speaks of an error, else the last."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()] or ["no message"]
        return next((line for line in lines if re.match(r"error|\w*Error", line)), lines[-1])

    def telling_lines(self) -> list[str]:
        """The first lines that name an error, each with the two after it (a compiler shows the place there)."""
        lines = self.output.splitlines()
        starts = [index for index, line in enumerate(lines) if re.search(r"\berror\b", line, re.IGNORECASE)][:4]
        chosen = sorted({index for start in starts for index in range(start, start + 3)})
        return [lines[index] for index in chosen if index < len(lines)] or lines[-10:]


def main(arguments: list[str]) -> int:
    """Bring `.venv` up to date, then become the command line (or, for `test`, the checks)."""
    testing = arguments[:1] == ["test"]
    try:
        with exclusive():
            bring_up_to_date(testing=testing)
    except SetupError as error:
        print(f"everystop: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\neverystop: set-up interrupted; the next start goes on with it", file=sys.stderr)
        return 130
    program = [str(ROOT / "tools" / "checks.py"), *arguments[1:]] if testing else ["-m", "everystop", *arguments]
    os.execv(PYTHON, [str(PYTHON), "-P", *program])


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Hold this clone's set-up lock, so that launchers that start together do the work once.

    `run` hands it down: an installer that outlives a killed launcher holds it until it ends, too.
    """
    try:
        file = (ROOT / ".everystop.lock").open("w")
    except OSError as error:
        raise SetupError(f"cannot write in {ROOT} ({error.strerror}): make it writable, or clone elsewhere") from error
    with file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this folder is running; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def bring_up_to_date(*, testing: bool) -> None:
    """Run the steps whose inputs changed; on return `READY` is as old as the moment at which they were read."""
    started_ns = time.time_ns()
    state = read_state()
    if not CLIENTS_PYTHON.exists():  # removed by hand, to have its space back
        state.pop("clients", None)
    wanted = inputs(testing=testing)
    if usable(state) and "unfinished" not in state and state.items() >= wanted.items():
        mark_ready(started_ns)
        return
    READY.unlink(missing_ok=True)
    if not usable(state):
        say(f"setting up {VENV} (once)")
        state = make_venv(state)
    if state.get("native") != wanted["native"]:
        check_build_tools()
    install_packages(state, wanted)
    for name, pin in UNHASHED.items():
        if name in wanted and state.get(name) != pin:
            install_unhashed(state, name)
    if state.get("native") != wanted["native"]:
        build_native(state, wanted["native"])
    if "clients" in wanted and state.get("clients") != wanted["clients"]:
        install_clients(state, wanted["clients"])
    # Explicitly, because PYTHONDONTWRITEBYTECODE may be set, and would make every start compile the sources.
    subprocess.run([PYTHON, "-m", "compileall", "-q", ROOT / "src"], stdout=subprocess.DEVNULL, check=False)
    mark_ready(started_ns)
    say(f"ready in {(time.time_ns() - started_ns) / 1e9:.0f} s")


def inputs(*, testing: bool) -> dict[str, str]:
    """What `.venv` should be made from: for each part a hash of its inputs."""
    names = ["build", "runtime", *(["dev", "clients"] if testing else [])]
    wanted = {name: digest([lock_file(name)]) for name in names}
    wanted["native"] = digest(native_sources(), extra=wanted["build"])
    return wanted | (UNHASHED if testing else {})


# --- the environment itself ----------------------------------------------------------------------------------------


def usable(state: dict[str, str]) -> bool:
    """Whether `.venv` was finished for this very folder and its interpreter is still there."""
    return state.get("root") == str(ROOT) and PYTHON.exists()


def make_venv(state: dict[str, str]) -> dict[str, str]:
    """Create `.venv`, or complete one that is there; one from another folder, or whose Python is gone, is remade."""
    moved = state.get("root") not in (None, str(ROOT))
    if VENV.exists() and (moved or not PYTHON.exists()):
        say("the environment was made for another folder or Python; making it anew")
        shutil.rmtree(VENV)
        shutil.rmtree(ROOT / "build", ignore_errors=True)
    python = base_python()
    uv = shutil.which("uv")
    try:
        if uv:
            run([uv, "venv", "--quiet", "--allow-existing", "--python", python, str(VENV)])
        else:
            make_venv_with_pip(python)
    except CommandFailed as failure:
        raise SetupError(f"cannot make {VENV}: {failure.reason()}") from failure
    state = {"root": str(ROOT)}
    write_state(state)
    return state


def make_venv_with_pip(python: str) -> None:
    """Create or complete `.venv` with the standard library's venv and the pip that it brings."""
    if subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True, check=False).returncode:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SetupError(
            f"{python} has no venv module: install it (Debian: apt install python{version}-venv), or install uv"
        )
    run([python, "-m", "venv", str(VENV)])


def base_python() -> str:
    """The versioned path of this interpreter, outside any virtual environment: `.venv` then notices its removal."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


# --- packages ------------------------------------------------------------------------------------------------------


def lock_file(name: str) -> Path:
    """The lock file of one set of packages: build, runtime, dev or clients."""
    return ROOT / "requirements" / f"{name}.lock"


def install_packages(state: dict[str, str], wanted: dict[str, str]) -> None:
    """Install the sets whose lock changed, and once more, from scratch, those whose installation was interrupted."""
    unfinished = [name for name in state.get("unfinished", "").split(",") if lock_file(name).exists()]
    stale = [name for name in IN_VENV if name in wanted and state.get(name) != wanted[name]]
    names = list(dict.fromkeys(unfinished + stale))
    if not names:
        return
    say(f"installing {' and '.join(f'{name}.lock' for name in names)}")
    write_state(state | {"unfinished": ",".join(names)})
    install_locked(PYTHON, names, "--compile", *(["--force-reinstall"] if unfinished else []))
    state |= {name: digest([lock_file(name)]) for name in names}
    state.pop("unfinished", None)
    write_state(state)


def install_clients(state: dict[str, str], source: str) -> None:
    """Make `.venv/clients` from its lock, always from nothing, so that an interruption leaves nothing to repair.

    Not compiled: of the thousands of modules the tests import some, and these are compiled as they are imported.
    """
    say("installing clients.lock, the clients that the tests drive, in an environment of their own")
    state.pop("clients", None)
    write_state(state)
    try:
        run([base_python(), "-m", "venv", "--clear", "--without-pip", str(CLIENTS)])
    except CommandFailed as failure:
        raise SetupError(f"cannot make {CLIENTS}: {failure.reason()}") from failure
    install_locked(CLIENTS_PYTHON, ["clients"], "--no-compile")
    state["clients"] = source
    write_state(state)


def install_locked(python: Path, names: list[str], *options: str) -> None:
    """Install sets of packages for that interpreter: with uv where it is and can, else with pip."""
    requirements = [word for name in names for word in ("--requirement", str(lock_file(name)))]
    options = ("--require-hashes", *options, *requirements)
    if not install_with_uv(python, options):
        pip("install", *options, python=python)


def install_with_uv(python: Path, options: Iterable[str]) -> bool:
    """Install with uv where it is; False where it is not, or could not."""
    uv = shutil.which("uv")
    if not uv:
        return False
    command = [uv, "pip", "install", "--quiet", "--python", str(python), *options]
    try:
        run(command, uv_environment())
    except CommandFailed as failure:
        # uv does not read pip's configuration files (a mirror, a certificate), so pip may still succeed.
        say(f"uv could not ({failure.reason()}); trying pip")
        make_venv_with_pip(base_python())
        return False
    return True


def uv_environment() -> dict[str, str]:
    """The environment, with pip's variables in uv's words and, as for pip, the system's certificates trusted."""
    environment = {"UV_SYSTEM_CERTS": "1", "UV_NATIVE_TLS": "1"}
    names = {"PIP_INDEX_URL": "UV_DEFAULT_INDEX", "PIP_EXTRA_INDEX_URL": "UV_INDEX", "PIP_CERT": "SSL_CERT_FILE"}
    environment |= {uv_name: os.environ[name] for name, uv_name in names.items() if os.environ.get(name)}
    return environment | os.environ


def install_unhashed(state: dict[str, str], name: str) -> None:
    """Install torch or triton, always with pip and without a hash: CPU and CUDA builds differ, and pip's index decides.

    A CUDA build of torch asks for a triton of its own; the tests want the one that is named here.
    """
    pin = UNHASHED[name]
    say(f"installing {pin} with pip")
    interrupted = state.get("unfinished") == name
    write_state(state | {"unfinished": name})
    if interrupted:
        pip("install", "--force-reinstall", "--no-deps", pin)
    pip("install", *(["--no-deps"] if name == "triton" else []), pin)
    state[name] = pin
    state.pop("unfinished", None)
    write_state(state)


def pip(*arguments: str, python: Path = PYTHON) -> None:
    """Run `.venv`'s pip for an interpreter; its configuration (index, certificates, constraints) is the user's own."""
    environment = os.environ | {"PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    environment.pop("PYTHONPATH", None)
    elsewhere = [] if python == PYTHON else ["--python", str(python)]
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *elsewhere, *arguments]
    try:
        run(command, environment)
    except CommandFailed as failure:
        if NO_NETWORK.search(failure.output):
            raise SetupError(
                "no package index can be reached: connect to the network, or name a mirror in PIP_INDEX_URL "
                f"(what pip said: {LOG})"
            ) from failure
        print(*failure.telling_lines(), sep="\n", file=sys.stderr)
        raise SetupError(f"`pip {arguments[0]} …` failed; its whole output is in {LOG}") from failure


# --- the native module ---------------------------------------------------------------------------------------------


def native_sources() -> list[Path]:
    """Every file whose change makes the native module stale, in a fixed order."""
    sources = sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    return [*sources, ROOT / "CMakeLists.txt", ROOT / "pyproject.toml"]


def build_native(state: dict[str, str], source: str) -> None:
    """Compile `csrc/` and install the package in editable form, so that edits of Python take effect at once."""
    say("building the native module")
    pip("install", "--no-build-isolation", "--no-deps", "--editable", str(ROOT))
    state["native"] = source
    write_state(state)


def check_build_tools() -> None:
    """Raise `SetupError` where the compiler or Python's headers are missing, before CMake fails at length."""
    compiler = find_compiler()
    query = "import sysconfig; print(sysconfig.get_path('include'), sysconfig.get_python_version())"
    include, version = run([str(PYTHON), "-c", query]).strip().rsplit(" ", 1)
    if not Path(include, "Python.h").exists():
        raise SetupError(
            f"Python's header files are missing ({include}/Python.h): install them "
            f"(Debian: apt install python{version}-dev; Fedora: dnf install python3-devel)"
        )
    program = "#include <cstdint>\n#include <Python.h>\nstatic_assert(__cplusplus >= 201703L);\n"
    command = [*compiler, "-std=c++17", f"-I{include}", "-fsyntax-only", "-x", "c++", "-"]
    result = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
    if result.returncode:
        complaint = (result.stderr.strip().splitlines() or ["no message"])[0]
        raise SetupError(f"{compiler[0]} cannot compile C++17 ({complaint}): install gcc 11, clang 14, or newer")


def find_compiler() -> list[str]:
    """The C++ compiler's command: `CXX` where set, else the first that CMake would find."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise SetupError(
        f"CXX names {named[0]}, which is not there: install it, or unset CXX"
        if named
        else "no C++ compiler is on the PATH: install one (Debian: apt install g++; Fedora: dnf install gcc-c++)"
    )


# --- records and output --------------------------------------------------------------------------------------------


def digest(paths: Iterable[Path], extra: str = "") -> str:
    """SHA-256 over names and contents; a missing file counts as such."""
    total = hashlib.sha256(extra.encode())
    for path in paths:
        content = path.read_bytes() if path.exists() else b"missing"
        total.update(f"{path.relative_to(ROOT)}\0{len(content)}\0".encode() + content)
    return total.hexdigest()


def read_state() -> dict[str, str]:
    """What `.venv` was made from; empty where that is unknown."""
    try:
        state = json.loads(STATE.read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def write_state(state: dict[str, str]) -> None:
    """Replace the record in one step, so that an interruption leaves the old or the new one."""
    new = STATE.with_suffix(".new")
    new.write_text(json.dumps(state, indent=1))
    new.replace(STATE)


def mark_ready(started_ns: int) -> None:
    """Let `../everystop` skip all this until something is newer than the moment at which the set-up began."""
    new = READY.with_suffix(".new")
    new.write_text(f"{ROOT}\n")
    os.utime(new, ns=(started_ns, started_ns))
    new.replace(READY)


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Run a command without input; return what it printed, kept in `LOG` too. Raises `CommandFailed`."""
    result = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        close_fds=False,  # the set-up lock
        check=False,
    )
    output = result.stdout.decode(errors="replace")
    if VENV.exists():
        with LOG.open("a") as log:
            log.write(f"$ {shlex.join(command)}\n{output}\n")
    if result.returncode:
        raise CommandFailed(output)
    return output


def say(message: str) -> None:
    """One line of progress, on standard error, so that a command's output stays its own."""
    print(f"everystop: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
