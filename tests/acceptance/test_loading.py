"""Acceptance cases of loading: the same model from any file, and nothing loaded from a damaged one."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.model.builders import PlainPacker, tiny_model, write_folder, write_gguf
from tests.model.reference_tokenizer import byte_level_ids, gpt2_pieces, sentencepiece_ids, single_digit_pieces
from tests.model.vocabularies import (
    CORPUS,
    byte_level_keys,
    sentencepiece_keys,
    trained_byte_level,
    trained_sentencepiece,
    write_vocabulary,
)
from tests.runner.invariance import GREEDY, Prompt, Setting, serve
from tests.runner.models import make_runner, random_transformer, transformer_from_gguf

from everystop.cli import main
from everystop.core.errors import ModelError, UnsupportedModel
from everystop.model import from_safetensors, weights
from everystop.model.checkpoint import inspect_model
from everystop.model.from_gguf import GgufCheckpoint
from everystop.model.safetensors import SafetensorsFile
from everystop.model.tokenizer_files import load_tokenizer
from everystop.model.weights import LoadedModel, load_model

F16, Q8_0 = gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0


# --------------------------------------------------------------------- 54: two formats, one model


def check_ac_54(model: transformers.PreTrainedModel, folder: Path, prompt: tuple[int, ...]) -> None:
    """`model` has weights that float16 can hold; the folder, a file in F16 and one in Q8_0 hold the same model."""
    stored = write_folder(folder / "stored", model, dtype=torch.float16)
    files = {kind: write_gguf(folder / f"{kind.name}.gguf", model, quantization=kind) for kind in (F16, Q8_0)}
    wanted = queries_and_keys(stored)
    for kind, path in files.items():
        for ours, theirs in zip(queries_and_keys(path), wanted, strict=True):
            assert cosine(ours, theirs) > 0.999, f"q or k from {kind.name} points elsewhere"
    texts = {}
    for path in (stored, files[F16]):
        loaded = load(path)
        texts[path] = serve(loaded, Setting(), [Prompt(prompt, GREEDY)]).tokens
        logits = make_runner(loaded).logits(prompt)
        if path is stored:
            reference = logits
        np.testing.assert_array_equal(logits, reference)
    assert texts[stored] == texts[files[F16]]


def load(path: Path, packer: Any = None) -> LoadedModel:
    """A model in float32, nothing cached."""
    return load_model(inspect_model(path), dtype="float32", num_threads=2, packer=packer)


def queries_and_keys(path: Path) -> list[np.ndarray]:
    """The rows of q and k of each layer as they are computed with, unpacked."""
    loaded = load_model(inspect_model(path), dtype="float32", packer=PlainPacker())
    spec, found = loaded.spec, []
    num_q, num_k = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    for layer in range(spec.num_layers):
        packed = loaded.weights[f"layers.{layer}.qkv"]
        rows = packed.view(np.float32).reshape(-1, spec.hidden_size)
        found += [rows[:num_q], rows[num_q : num_q + num_k]]
    return found


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Of the angle between two matrices."""
    return float((one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other))


def half_precise(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """The model with each weight rounded to float16, so that no format loses anything more."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())
    return model


SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_ac_54_safetensors_and_gguf_are_one_model(tmp_path: Path, architecture: str, is_tied: bool) -> None:
    """Grouped heads; the Llama converter reorders q and k, that of Qwen does not; tied embeddings or none."""
    model = half_precise(random_transformer(architecture, **SIZES, tie_word_embeddings=is_tied))
    check_ac_54(model, tmp_path, tuple(range(3, 40)))


@pytest.mark.model
@pytest.mark.slow
def test_ac_54_on_the_embedded_model(smollm2_path: Path, tmp_path: Path) -> None:
    check_ac_54(half_precise(transformer_from_gguf(smollm2_path)), tmp_path, tuple(range(1000, 1040)))


def test_mutant_ac_54_rows_stay_in_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "halves_from_pairs", lambda values, num_heads: values)
    with pytest.raises(AssertionError, match="q or k from F16 points elsewhere"):
        check_ac_54(half_precise(random_transformer("llama", **SIZES)), tmp_path, tuple(range(3, 40)))


def test_mutant_ac_54_qwen_is_reordered_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = GgufCheckpoint.__init__

    def reorder_all(checkpoint: GgufCheckpoint, path: Path) -> None:
        create(checkpoint, path)
        checkpoint.interleaved_rotary = True

    monkeypatch.setattr(GgufCheckpoint, "__init__", reorder_all)
    with pytest.raises(AssertionError, match="q or k from F16 points elsewhere"):
        check_ac_54(half_precise(random_transformer("qwen3", **SIZES)), tmp_path, tuple(range(3, 40)))


# --------------------------------------------------------------------- 55: how text is cut


def test_ac_55_ids_equal_the_reference_and_unknown_kinds_are_refused(tmp_path: Path) -> None:
    tokens, merges = trained_byte_level()
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}

    def tokenizer_of(keys: dict[str, Any]) -> Any:
        return load_tokenizer(inspect_model(write_vocabulary(tmp_path / "m.gguf", keys)))

    cuts: dict[str, Callable[[str], Any]] = {"smollm": single_digit_pieces, "gpt-2": gpt2_pieces}
    for pre, cut in cuts.items():
        ours = tokenizer_of(byte_level_keys(pre))
        for text in CORPUS:
            assert ours.encode(text) == byte_level_ids(cut(text), vocabulary, merges), (pre, text)
    pieces, scores, _ = trained_sentencepiece()
    ranks = {piece: token_id for token_id, piece in enumerate(pieces)}
    ours = tokenizer_of(sentencepiece_keys())
    for text in CORPUS:
        assert ours.encode(text, add_special=False) == sentencepiece_ids(text, ranks, scores), text
    for pre in ("mpt", "default", "", None):
        with pytest.raises(UnsupportedModel, match=repr(pre) if pre else "pre-tokenizer"):
            tokenizer_of(byte_level_keys(pre))


# --------------------------------------------------------------------- 56: damaged files

SHARD, OTHER_SHARD = "model-00002-of-00003.safetensors", "model-00001-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def damaged_models(folder: Path) -> dict[str, tuple[Path, str]]:
    """Models that must not be loaded: what is wrong, where it lies, and which file is to be named."""
    model = tiny_model("llama")

    def shards(name: str) -> Path:
        return write_folder(folder / name, model, num_shards=3)

    missing, short, stale, emptied = (shards(name) for name in ("missing", "short", "stale", "emptied"))
    (missing / SHARD).unlink()
    cut_off(short / SHARD, 10)
    index = json.loads((stale / INDEX).read_text())
    weight_map = index["weight_map"]
    moved = next(name for name, shard in weight_map.items() if shard == SHARD)
    (stale / INDEX).write_text(json.dumps({**index, "weight_map": {**weight_map, moved: OTHER_SHARD}}))
    tensors = load_file(emptied / SHARD)
    save_file({name: tensor for name, tensor in tensors.items() if name != moved}, emptied / SHARD)
    file = write_gguf(folder / "short.gguf", model)
    cut_off(file, 10)
    return {
        "a shard is missing": (missing, SHARD),
        "a shard is cut off": (short, SHARD),
        "the index names the wrong shard": (stale, OTHER_SHARD),
        "a shard lacks what the index says": (emptied, SHARD),
        "a GGUF file is cut off": (file, "short.gguf"),
    }


def cut_off(path: Path, num_bytes: int) -> None:
    """Take the last bytes away."""
    path.write_bytes(path.read_bytes()[:-num_bytes])


def check_ac_56(folder: Path) -> None:
    for what, (path, name) in damaged_models(folder).items():
        error: ModelError | None = None
        try:
            load(path, PlainPacker())
        except ModelError as raised:
            error = raised
        assert error is not None, f"{what}, and it was loaded"
        assert name in str(error), f"{what}, and the error does not name {name}: {error}"


def test_ac_56_damaged_files_are_named_and_end_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_ac_56(tmp_path / "loaded")
    monkeypatch.setenv("EVERYSTOP_HOME", str(tmp_path / "home"))
    for what, (path, name) in damaged_models(tmp_path / "served").items():
        assert main(["serve", str(path), "--port", "0"]) != 0, what
        assert name in capsys.readouterr().err, what


def test_mutant_ac_56_whatever_lies_there_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is not believed, and a shard that is not there is not missed."""

    def locate(folder: Path) -> dict[str, SafetensorsFile]:
        files = [SafetensorsFile(path) for path in sorted(folder.glob("*.safetensors"))]
        return {name: file for file in files for name in file.tensors}

    monkeypatch.setattr(from_safetensors, "_locate_tensors", locate)
    with pytest.raises(AssertionError, match=r"a shard is missing, and the error does not name"):
        check_ac_56(tmp_path)


def test_mutant_ac_56_zeros_behind_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut-off file reads as if it went on."""

    def open_padded(file: SafetensorsFile) -> mmap.mmap:
        data = file.path.read_bytes() + bytes(1 << 20)
        padded = mmap.mmap(-1, len(data))
        padded.write(data)
        return padded

    monkeypatch.setattr(SafetensorsFile, "_open", open_padded)
    with pytest.raises(AssertionError, match="a shard is cut off, and it was loaded"):
        check_ac_56(tmp_path)
