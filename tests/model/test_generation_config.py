from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.model.builders import tiny_model, write_folder
from tests.model.vocabularies import byte_level_keys, write_vocabulary

from everystop.core.errors import ModelFileDamaged
from everystop.model.checkpoint import inspect_model
from everystop.model.generation_config import load_generation_defaults


def folder_with(tmp_path: Path, config: Any) -> Path:
    folder = write_folder(tmp_path / "m", tiny_model("llama"))
    if config is not None:
        (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


def test_recommended_values_are_taken_and_their_source_is_named(tmp_path: Path) -> None:
    config = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "max_new_tokens": 512,
        "do_sample": True,
    }
    folder = folder_with(tmp_path, config)
    defaults = load_generation_defaults(inspect_model(folder))
    assert defaults.values() == {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "max_tokens": 512,
    }
    assert defaults.source == str(folder / "generation_config.json")
    assert load_generation_defaults(inspect_model(folder), "none").values() == {}


@pytest.mark.parametrize("config", [None, {}, {"eos_token_id": 2, "temperature": None}])
def test_nothing_recommended_is_nothing(tmp_path: Path, config: Any) -> None:
    defaults = load_generation_defaults(inspect_model(folder_with(tmp_path, config)))
    assert (defaults.values(), defaults.source) == ({}, "")


@pytest.mark.parametrize(
    "config",
    [{"temperature": -1}, {"top_p": 1.5}, {"top_k": 2.5}, {"min_p": "0.1"}, {"repetition_penalty": 0}, {"top_k": True}],
)
def test_values_out_of_range_are_named(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = folder_with(tmp_path, config)
    with pytest.raises(
        ModelFileDamaged, match=rf"generation_config\.json: {next(iter(config))} .*--generation-config none"
    ):
        load_generation_defaults(inspect_model(folder))
    assert load_generation_defaults(inspect_model(folder), "none").values() == {}


def test_gguf_keys_are_taken(tmp_path: Path) -> None:
    keys = byte_level_keys() | {"general.sampling.temp": 0.5, "general.sampling.top_k": 40}
    checkpoint = inspect_model(write_vocabulary(tmp_path / "m.gguf", keys))
    assert load_generation_defaults(checkpoint).values() == {"temperature": 0.5, "top_k": 40}
