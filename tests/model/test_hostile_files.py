"""Model files of somebody who means harm: named errors, bounded time and memory, and no code that is run (L12)."""

from __future__ import annotations

import json
import pickle
import random
import resource
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.model.builders import PlainPacker, tiny_model, write_folder
from tests.model.test_damage import opens
from tests.model.vocabularies import (
    byte_level_keys,
    sentencepiece_inner,
    sentencepiece_keys,
    write_tokenizer,
    write_vocabulary,
)

from everystop.core.errors import ModelError, ModelFileDamaged, ModelNotFound
from everystop.model import from_safetensors
from everystop.model.checkpoint import inspect_model
from everystop.model.gguf import MAX_KEYS, MAX_VALUES, GgufFile
from everystop.model.safetensors import SafetensorsFile
from everystop.model.tokenizer_files import MAX_TOKEN_CHARS, load_tokenizer

EXTREMES = [0, 1, 7, 31, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**33, 2**62, 2**63 - 1, 2**63, 2**64 - 33, 2**64 - 1]
MIB = 1 << 20


@contextmanager
def bounded(seconds: float, num_bytes: int) -> Iterator[None]:
    """What happens inside takes little processor time, and does not raise the most memory ever used by more."""
    began_s, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - began_s < seconds
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < num_bytes


def reads(path: Path) -> bool:
    """Open it and read all its weights; False where a named error says why not."""
    try:
        checkpoint = inspect_model(path)
        for name in ("embed_tokens", "layers.0.q", "norm"):
            checkpoint.read(name, PlainPacker().dequantize)
    except ModelError as error:
        said = str(error)
    else:
        return True
    assert path.name in said or path.parent.name in said
    return False


def mutated(rng: random.Random, data: bytes, num_header: int) -> bytes:
    """A copy with one or more lies: numbers at their extremes, pieces moved, doubled or cut out, ends missing."""
    bad = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(num_header)
        match rng.randrange(5):
            case 0:
                bad[at : at + 8] = struct.pack("<Q", rng.choice(EXTREMES))
            case 1:
                bad[at : at + 4] = struct.pack("<I", rng.choice(EXTREMES) % 2**32)
            case 2:
                size = rng.randint(1, 64)
                bad[at : at + size] = bad[rng.randrange(num_header) :][:size]
            case 3:
                del bad[at : at + rng.randint(1, 32)]
            case 4:
                bad[at:at] = bad[at : at + rng.randint(1, 32)]
    return bytes(bad[: rng.randrange(len(bad))]) if rng.random() < 0.1 else bytes(bad)


@pytest.mark.parametrize(
    "keys", [byte_level_keys("llama-bpe"), sentencepiece_keys()], ids=["byte level", "sentencepiece"]
)
def test_lying_gguf_files_raise_only_named_errors(tmp_path: Path, keys: dict[str, Any]) -> None:
    path = write_vocabulary(tmp_path / "hostile.gguf", keys)
    data = path.read_bytes()
    rng = random.Random(12)
    num_good = 0
    with bounded(60, 256 * MIB):
        for round_number in range(400):
            path.write_bytes(mutated(rng, data, 700 if round_number % 2 else min(len(data), 30_000)))
            num_good += opens(path)
            reads(path)
    assert num_good < 350


def test_lying_safetensors_files_raise_only_named_errors(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", tiny_model("llama"))
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    rng = random.Random(13)
    with bounded(60, 256 * MIB):
        for _ in range(300):
            path.write_bytes(mutated(rng, data, 8 + length))
            reads(folder)


LIES: list[Any] = [
    {"dtype": "F32", "shape": [2**62] * 4, "data_offsets": [0, 4]},
    {"dtype": "F32", "shape": [10**4000] * 1000, "data_offsets": [0, 4]},
    {"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]},
    {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]},
    {"dtype": "F32", "shape": [1], "data_offsets": [2**63 - 4, 2**63]},
    {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
    {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
    {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]},
    {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
    {"dtype": 0, "shape": [1], "data_offsets": [0, 4]},
    {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]},
    {"dtype": "F32", "shape": [1]},
    [],
    None,
]


@pytest.mark.parametrize("entry", LIES, ids=range(len(LIES)))
def test_an_entry_that_lies_is_refused(tmp_path: Path, entry: Any) -> None:
    header = json.dumps({"a": entry}).encode() if not isinstance(entry, dict) else _dump(entry)
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with bounded(5, 64 * MIB), pytest.raises(ModelFileDamaged, match=r"a\.safetensors"):
        SafetensorsFile(path)


def _dump(entry: dict[str, Any]) -> bytes:
    """JSON, with numbers beyond what Python writes in decimal by itself."""
    if any(type(size) is int and size > 10**1000 for size in entry["shape"]):
        return b'{"a": {"dtype": "F32", "shape": [%b], "data_offsets": [0, 4]}}' % b",".join(
            [b"1" + b"0" * 4000] * 1000
        )
    return json.dumps({"a": entry}).encode()


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, 17 * MIB])
def test_a_header_beyond_reason_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a.safetensors"
    with open(path, "wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(20 * MIB)
    with bounded(5, 64 * MIB), pytest.raises(ModelFileDamaged, match="the header claims"):
        SafetensorsFile(path)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def gguf(num_tensors: int, num_keys: int, body: bytes) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, num_tensors, num_keys) + body


def test_a_file_of_keys_is_no_model(tmp_path: Path) -> None:
    keys = b"".join(text(b"%08d" % i) + struct.pack("<IB", 0, 1) for i in range(MAX_KEYS + 1))
    path = tmp_path / "keys.gguf"
    path.write_bytes(gguf(0, MAX_KEYS + 1, keys))
    with bounded(5, 64 * MIB), pytest.raises(ModelFileDamaged, match="more than any model has"):
        GgufFile(path)


def test_an_array_beyond_reason_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "array.gguf"
    path.write_bytes(gguf(0, 1, text(b"a") + struct.pack("<IIQ", 9, 0, MAX_VALUES + 1)))
    with open(path, "ab") as file:
        file.truncate(path.stat().st_size + MAX_VALUES + 64)
    with bounded(5, 64 * MIB), pytest.raises(ModelFileDamaged, match="16,777,217 values"):
        GgufFile(path).get("a")


def test_a_token_beyond_reason_costs_nothing(tmp_path: Path) -> None:
    """The pairs that make a token are looked for at each of its characters."""
    for keys, size in (
        (sentencepiece_keys(), 10 * MIB),
        (byte_level_keys(), MAX_TOKEN_CHARS + 1),
        (sentencepiece_keys(), 4096),
    ):
        tokens = [*keys["tokenizer.ggml.tokens"]]
        num = 1 if size > MAX_TOKEN_CHARS else 50
        tokens[300 : 300 + num] = [str(i) + "a" * (size - len(str(i))) for i in range(num)]
        path = write_vocabulary(tmp_path / "token.gguf", keys | {"tokenizer.ggml.tokens": tokens})
        with (
            bounded(10, 256 * MIB),
            pytest.raises(ModelFileDamaged, match=r"token\.gguf: (a token has|the tokens are)"),
        ):
            load_tokenizer(inspect_model(path))


def test_a_json_file_beyond_reason_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_safetensors, "MAX_JSON_BYTES", 1000)
    (tmp_path / "config.json").write_text("[" * 2000)
    with pytest.raises(ModelFileDamaged, match=r"config\.json: has 2,000 bytes; at most 1,000 are read"):
        inspect_model(tmp_path)


class Bomb:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, ...]]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt", "model.pkl"])
def test_pickles_are_not_read(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "folder", tiny_model("llama"))
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(ModelNotFound, match=f"{name} is a pickle, which can run code, and is not read"):
        inspect_model(folder)
    with pytest.raises(ModelNotFound, match="gguf file nor a folder"):
        inspect_model(folder / name)
    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(ModelFileDamaged):
        inspect_model(folder)
    assert not (tmp_path / "ran").exists()


def test_an_index_cannot_name_a_pickle_or_a_path(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", tiny_model("llama"))
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    for shard in (
        "pytorch_model.bin",
        "../outside.safetensors",
        str(tmp_path / "outside.safetensors"),
        "a/../../b.safetensors",
    ):
        index = {"weight_map": {"model.norm.weight": shard}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelFileDamaged, match="is no file name of a shard"):
            inspect_model(folder)


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path) -> None:
    """`auto_map` in any of its files; what it names would make a file as soon as it was imported."""
    folder = write_folder(tmp_path / "folder", tiny_model("llama", vocab_size=1000))
    write_tokenizer(folder, sentencepiece_inner(), auto_map={"AutoTokenizer": ["evil.Evil", None]})
    for name in ("evil.py", "modeling_llama.py", "tokenization_llama.py", "configuration_llama.py", "__init__.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil--evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = inspect_model(folder)
    load_tokenizer(checkpoint)
    assert reads(folder)
    assert [note for note in checkpoint.warnings if "auto_map names code" in note and "never run" in note]
    assert not (tmp_path / "ran").exists()
