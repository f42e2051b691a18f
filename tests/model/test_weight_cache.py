from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.model.builders import tiny_model, write_folder, write_gguf

import everystop.model.weights as weights_module
from everystop.model.checkpoint import inspect_model
from everystop.model.home import Home
from everystop.model.weights import LoadedModel, load_model


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", tiny_model("llama"))


def load(path: Path, home: Home | None, dtype: str = "int8") -> LoadedModel:
    return load_model(inspect_model(path), dtype=dtype, home=home)


def weight_files(home: Home) -> list[Path]:
    return sorted((home.root / "weights").iterdir())


def assert_equal(ours: LoadedModel, theirs: LoadedModel) -> None:
    assert list(ours.weights) == list(theirs.weights)
    for name, array in ours.weights.items():
        assert array.dtype == theirs.weights[name].dtype
        np.testing.assert_array_equal(array, theirs.weights[name], err_msg=name)


def test_second_load_maps_what_the_first_built(model_path: Path, home: Home) -> None:
    bare, first, second = load(model_path, None), load(model_path, home), load(model_path, home)
    assert (bare.from_cache, first.from_cache, second.from_cache) == (False, False, True)
    assert_equal(first, bare)
    assert_equal(second, bare)
    assert len(weight_files(home)) == 1
    assert second.notes == ()


def test_dtype_layout_version_and_file_each_have_their_own_entry(
    model_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model_path, home)
    assert not load(model_path, home, "float32").from_cache
    monkeypatch.setattr(weights_module, "WEIGHTS_VERSION", -1)
    assert not load(model_path, home).from_cache
    monkeypatch.undo()
    monkeypatch.setattr(weights_module.NativePacker, "layout", lambda self, dtype: "another kernel's")
    assert not load(model_path, home).from_cache
    monkeypatch.undo()
    write_gguf(model_path, tiny_model("llama", rms_norm_eps=1e-5))
    assert not load(model_path, home).from_cache
    assert len(weight_files(home)) == 5


def test_same_bytes_under_another_name_are_one_entry(model_path: Path, home: Home) -> None:
    load(model_path, home)
    copy = model_path.with_name("copy.gguf")
    copy.write_bytes(model_path.read_bytes())
    assert load(copy, home).from_cache


def test_folder_entry_depends_on_each_shard_and_the_config(tmp_path: Path, home: Home) -> None:
    folder = write_folder(tmp_path / "m", tiny_model("qwen3"), num_shards=2)
    load(folder, home)
    assert load(folder, home).from_cache
    shard = folder / "model-00002-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert not load(folder, home).from_cache
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")
    assert not load(folder, home).from_cache


@pytest.mark.parametrize("damage", ["truncate", "flip data", "flip index", "flip prefix", "empty", "foreign"])
def test_damaged_entry_is_found_named_and_built_again(model_path: Path, home: Home, damage: str) -> None:
    wanted = load(model_path, home)
    (entry,) = weight_files(home)
    data = bytearray(entry.read_bytes())
    if damage == "truncate":
        data = data[:-100]
    elif damage == "empty":
        data = bytearray()
    elif damage == "foreign":
        data = bytearray(b"x" * len(data))
    else:
        data[{"flip data": 4096, "flip index": len(data) - 5, "flip prefix": 9}[damage]] ^= 1
    status = entry.stat()
    entry.with_name("new").write_bytes(data)
    os.replace(entry.with_name("new"), entry)
    os.utime(entry, ns=(status.st_atime_ns, status.st_mtime_ns))
    again = load(model_path, home)
    assert not again.from_cache
    assert any(str(entry) in note and "built again" in note for note in again.notes)
    assert_equal(again, wanted)
    assert load(model_path, home).from_cache


DYING = """
import os, sys
from pathlib import Path
from everystop.model.checkpoint import inspect_model
from everystop.model.home import Home
from everystop.model.weights import NativePacker, load_model

class DyingPacker(NativePacker):
    num_left = 5

    def pack(self, dtype, weights):
        self.num_left -= 1
        return super().pack(dtype, weights) if self.num_left else os.kill(os.getpid(), 9)

load_model(inspect_model(Path(sys.argv[1])), dtype="int8", home=Home(Path(sys.argv[2])), packer=DyingPacker(1))
"""


def test_what_a_killed_process_left_is_no_entry_and_is_removed(model_path: Path, home: Home) -> None:
    command = [sys.executable, "-c", DYING, str(model_path), str(home.root)]
    assert subprocess.run(command, env=os.environ | {"PYTHONPATH": "src"}, check=False).returncode == -9
    (left,) = weight_files(home)
    assert left.suffix == ".tmp"
    loaded = load(model_path, home)
    assert not loaded.from_cache
    assert_equal(loaded, load(model_path, None))
    (entry,) = weight_files(home)
    assert entry.suffix == ".weights"


def test_home_that_cannot_be_written_costs_a_sentence_only(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the place of a folder")
    for root in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/everystop")):
        loaded = load(model_path, Home(root))
        assert not loaded.from_cache
        (note,) = loaded.notes
        assert "EVERYSTOP_HOME" in note
        assert str(root) in note
        assert_equal(loaded, load(model_path, None))


def test_full_disk_costs_a_sentence_only(model_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, num_calls = os.write, 0

    def write(fd: int, data: bytes) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 9:
            raise OSError(28, "No space left on device")
        return real_write(fd, data)

    monkeypatch.setattr(os, "write", write)
    loaded = load(model_path, home)
    (note,) = loaded.notes
    assert "No space left on device" in note
    assert weight_files(home) == []
    assert_equal(loaded, load(model_path, None))


RACE = """
import sys
import time
from pathlib import Path
from everystop.model.checkpoint import inspect_model
from everystop.model.home import Home
from everystop.model.weights import load_model
checkpoint = inspect_model(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
loaded = load_model(checkpoint, dtype="int8", home=Home(Path(sys.argv[2])))
print(loaded.from_cache, sum(int(a.view("u1").sum()) for a in loaded.weights.values()), loaded.notes)
"""


def test_processes_that_start_at_once_build_once(model_path: Path, home: Home) -> None:
    command = [sys.executable, "-c", RACE, str(model_path), str(home.root)]
    environment = os.environ | {"PYTHONPATH": "src"}
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(4)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    results = [racer.communicate("go\n", timeout=60)[0].split(maxsplit=2) for racer in racers]
    assert sorted(result[0] for result in results) == ["False", "True", "True", "True"]
    assert len({result[1] for result in results}) == 1
    assert {result[2] for result in results} == {"()\n"}
    assert len(weight_files(home)) == 1


@pytest.mark.model
def test_embedded_model_is_mapped_on_the_second_load(smollm2_path: Path, home: Home) -> None:
    first, second = load(smollm2_path, home), load(smollm2_path, home)
    assert (first.from_cache, second.from_cache) == (False, True)
    assert second.weights["embed_tokens"].shape == (49_152, 576)
    assert_equal(second, first)


BUILDING = """
import itertools, sys, time
from pathlib import Path
from everystop.model.checkpoint import inspect_model
from everystop.model.home import Home
from everystop.model.weights import NativePacker, load_model

num_packed = itertools.count()

class SlowPacker(NativePacker):
    def pack(self, dtype, weights):
        if next(num_packed) == int(sys.argv[3]):
            print("held", flush=True)
            time.sleep(600)
        time.sleep(0.01)
        return super().pack(dtype, weights)

checkpoint = inspect_model(Path(sys.argv[1]))
print("ready", flush=True)
load_model(checkpoint, dtype="int8", home=Home(Path(sys.argv[2])), packer=SlowPacker(1))
print("done", flush=True)
"""


def test_a_process_killed_at_any_moment_leaves_no_wrong_entry(model_path: Path, tmp_path: Path) -> None:
    """Killed before, while and after it writes: the next start has the right weights, and nothing else is kept.

    Some wait to be killed in the midst of it, at a matrix of their own; the others are killed wherever they are.
    """
    wanted, dice = load(model_path, None), random.Random(7)
    for i, held_at in enumerate((0, 1, 4, -1, -1, -1)):
        home = Home(tmp_path / f"home{i}")
        command = [sys.executable, "-c", BUILDING, str(model_path), str(home.root), str(held_at)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": "src"}
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            if held_at >= 0:
                assert process.stdout.readline() == "held\n"
            else:
                time.sleep(dice.uniform(0, 0.15))
            process.kill()
            assert held_at < 0 or process.stdout.read() == "", "it was done before it could be killed"
        again = load(model_path, home)
        assert again.notes == ()
        assert_equal(again, wanted)
        [entry] = weight_files(home)
        assert entry.suffix == ".weights"
        assert load(model_path, home).from_cache
