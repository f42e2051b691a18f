"""`claims` and `compare` by PyTorch on the CPU, the way that a GPU takes: a tiny model, from files to the report."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.model.builders import tiny_model, write_folder
from tests.model.vocabularies import write_tokenizer

from everystop.cli import main
from everystop.sim.workloads import LAST_ID, Dice, Job, Workload

NUM_IDS = LAST_ID + 1
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two small layers with a word for each token id that workloads may ask for."""
    path = tmp_path_factory.mktemp("tiny")
    write_folder(path, tiny_model("llama", vocab_size=NUM_IDS, max_position_embeddings=2048, eos_token_id=None))
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"w{i}" for i in range(len(letters), NUM_IDS))]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return write_tokenizer(path, inner)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    from everystop.trial.gpu import device_limits

    monkeypatch.setattr(device_limits, "ON_CPU", device_limits.Extent(1 << 20, 64, 2))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))  # of the servers
    for name in [name for name in os.environ if name.startswith("EVERYSTOP_") and name != "EVERYSTOP_HOME"]:
        monkeypatch.delenv(name)


def test_a_claim_is_measured_where_pytorch_computes(folder: Path, tmp_path: Path) -> None:
    words = ["claims", str(folder), "--device", "torch", "--threads", "1", "--only", "1", "--repeats", "1"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    claim: dict[str, Any] = json.loads((tmp_path / "claims.json").read_text())["claims"]["1"]
    assert claim["settings"]["kernels"] == "CPU, PyTorch kernels"
    assert claim["settings"]["dtype"] == "float32"
    assert claim["settings"]["outputs"].startswith("as long in all runs")
    assert "float32 GFLOP/s in products of 64 × 64 matrices by PyTorch" in claim["findings"]["how"]
    page = (tmp_path / "claims.md").read_text()
    assert "dtype float32" in page
    assert "980 of 1,000 steps" in page
    assert (tmp_path / "claims" / "1-straggler.png").exists()


def test_policies_are_compared_where_pytorch_computes(folder: Path, tmp_path: Path) -> None:
    dice = Dice("few", 7)
    jobs = tuple(Job(prompt=dice.prompt(12), max_tokens=20 if i % 4 else 60) for i in range(12))
    requests = tmp_path / "w.jsonl"
    requests.write_text("\n".join(Workload("few", len(jobs), jobs).lines()))
    words = ["compare", str(folder), "--device", "torch", "--deterministic", "--threads", "1", "--repeats", "1"]
    words += ["--workload", str(requests), "--max-num-seqs", "4", "--kv-cache-memory", "64MiB"]
    assert main([*words, "--out", str(tmp_path / "report")]) == 0
    report: dict[str, Any] = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["outputs"]["num_equal"] == len(jobs)
    settings = report["comparison"]["settings"]
    assert settings["kernels"] == "CPU, PyTorch, row by row kernels"
    assert settings["flags"]["device"] == "torch"
