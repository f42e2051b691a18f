"""Sampling defaults that a model's authors recommend in `generation_config.json` (or in a GGUF file's keys)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from everystop.core.errors import ModelFileDamaged
from everystop.core.request import SamplingParams
from everystop.model.checkpoint import Checkpoint
from everystop.model.from_gguf import GgufCheckpoint
from everystop.model.from_safetensors import read_json_object

_GGUF_KEYS = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Values for fields that a request leaves out; None where the model's authors recommend nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    source: str = ""

    def values(self) -> dict[str, float | int]:
        """What is set, by the names of `SamplingParams`."""
        named = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "source"}
        return {name: value for name, value in named.items() if value is not None}


def load_generation_defaults(checkpoint: Checkpoint, mode: str = "auto") -> GenerationDefaults:
    """The recommended defaults; none for `mode` "none". Raises ModelFileDamaged for values out of range."""
    if mode == "none":
        return GenerationDefaults()
    if isinstance(checkpoint, GgufCheckpoint):
        found = {name: checkpoint.gguf.get(f"general.sampling.{key}") for name, key in _GGUF_KEYS.items()}
        return _checked(found, str(checkpoint.path))
    path = checkpoint.path / "generation_config.json"
    if not path.is_file():
        return GenerationDefaults()
    config = read_json_object(path)
    found = {name: config.get(name) for name in _GGUF_KEYS} | {"max_tokens": config.get("max_new_tokens")}
    return _checked(found, str(path))


def _checked(found: dict[str, Any], source: str) -> GenerationDefaults:
    present = {name: value for name, value in found.items() if value is not None}
    for name, value in present.items():
        low, high = SamplingParams.RANGES[name]
        wanted = int if isinstance(low, int) else (int, float)
        if isinstance(value, bool) or not isinstance(value, wanted) or not low <= value <= high:
            raise ModelFileDamaged(
                f"{source}: {name} is {str(value)[:40]}, out of range; correct it, or use --generation-config none"
            )
    return GenerationDefaults(**present, source=source if present else "")
