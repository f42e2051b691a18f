"""What the cache holds, and how it is emptied while others use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.model.builders import tiny_model, write_gguf

import everystop.model.cache as cache_module
import everystop.model.pull as pull_module
from everystop import cli
from everystop.model.checkpoint import inspect_model
from everystop.model.home import Home
from everystop.model.pull import EmbeddedModel
from everystop.model.weights import load_model


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home with an embedded model called tiny, its weights, a tokenizer, a crash file and what a dead pull left."""
    home = Home(tmp_path / "home")
    monkeypatch.setenv("EVERYSTOP_HOME", str(home.root))
    path = write_gguf(home.folder("models") / "tiny.gguf", tiny_model("llama"))
    digest = home.sha256(path)
    model = EmbeddedModel(
        package="tiny", version="1", wheel_bytes=1, wheel_sha256="", member="tiny/tiny.gguf", num_bytes=1, sha256=digest
    )
    for module in (pull_module, cache_module):
        monkeypatch.setattr(module, "EMBEDDED", {"tiny": model})
    load_model(inspect_model(path), dtype="int8", home=home)
    (home.folder("tokenizers") / f"{digest[:32]}-0.1.0-1.json").write_text("{}")
    (home.folder("crashes") / "crash-20261130T000000Z-1.jsonl").write_text("{}")
    left = home.root / ".pull-tiny-x1" / "wheels"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"x" * 1000)
    return home


def entries(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    assert cli.main(["cache", "ls", "--json"]) == 0
    listed: list[dict[str, object]] = json.loads(capsys.readouterr().out)["entries"]
    return listed


def kinds(capsys: pytest.CaptureFixture[str]) -> list[object]:
    return [entry["kind"] for entry in entries(capsys)]


def test_everything_is_listed_with_what_it_is(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    listed = entries(capsys)
    assert [entry["kind"] for entry in listed] == ["model", "weights", "tokenizer", "crash file", "leftover"]
    model, weights, *_, left = listed
    assert (model["name"], model["detail"]) == ("tiny.gguf", "serve it as tiny")
    assert str(weights["detail"]).startswith("tiny, int8, ")
    assert left["bytes"] == 1000
    assert cli.main(["cache", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(listed) + 1
    assert lines[-1].endswith(f"in {home.root}")


def test_an_empty_or_missing_home_has_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVERYSTOP_HOME", str(tmp_path / "none"))
    assert entries(capsys) == []
    assert cli.main(["cache", "rm", "--all"]) == 0
    assert not (tmp_path / "none").exists()


def test_a_name_or_its_beginning_removes_one(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    name = next((home.root / "weights").iterdir()).name
    assert cli.main(["cache", "rm", name[:8], "tiny.gguf"]) == 0
    capsys.readouterr()
    assert kinds(capsys) == ["tokenizer", "crash file", "leftover"]


def test_an_embedded_models_name_removes_what_was_made_of_it(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "rm", "tiny"]) == 0
    capsys.readouterr()
    assert kinds(capsys) == ["crash file", "leftover"]


def test_all_removes_all_that_is_listed(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    cost = home.root / "cost.json"
    cost.write_text("{}")
    assert cli.main(["cache", "rm", "--all"]) == 0
    capsys.readouterr()
    assert kinds(capsys) == []
    assert cost.exists(), "measured step times are no cache"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["../home/models/tiny.gguf"], "is a path"),
        (["models/tiny.gguf"], "is a path"),
        ([".."], "is a path"),
        ([""], "is a path"),
        (["none"], "no 'none'"),
        (["tin"], "one name begins with 'tin'; give at least 4 letters of it"),
        ([], "--all"),
        (["tiny", "--all"], "--all"),
    ],
)
def test_what_is_no_name_is_refused_and_nothing_is_removed(
    home: Home, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert cli.main(["cache", "rm", *words]) == 2
    assert message in capsys.readouterr().err
    assert len(entries(capsys)) == 5


def test_letters_that_begin_several_names_are_refused(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    for i in (2, 3):
        (home.root / "crashes" / f"crash-20261130T000000Z-{i}.jsonl").write_text("{}")
    assert cli.main(["cache", "rm", "crash"]) == 2
    assert "3 entries" in capsys.readouterr().err


def test_what_is_being_written_is_left_alone(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    weights = next((home.root / "weights").iterdir()).name
    with home.lock(weights), home.lock("pull-tiny"):
        assert cli.main(["cache", "rm", "--all"]) == 1
        assert "being written" in capsys.readouterr().err
        assert kinds(capsys) == ["model", "weights", "leftover"]
    assert cli.main(["cache", "rm", "--all"]) == 0


def test_weights_that_a_server_has_mapped_stay_with_it(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    model = inspect_model(home.root / "models" / "tiny.gguf")
    loaded = load_model(model, dtype="int8", home=home)
    before = {name: array.copy() for name, array in loaded.weights.items()}
    assert loaded.from_cache
    assert cli.main(["cache", "rm", "--all"]) == 0
    assert all((loaded.weights[name] == array).all() for name, array in before.items())


def test_damaged_weights_are_listed_as_such_and_can_be_removed(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    path = next((home.root / "weights").iterdir())
    for data in (b"", b"x" * 100):
        path.write_bytes(data)
        assert [entry["detail"] for entry in entries(capsys) if entry["kind"] == "weights"] == ["damaged"]
    assert cli.main(["cache", "rm", path.name]) == 0
