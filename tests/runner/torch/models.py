"""Tiny models for the PyTorch runner, on the CPU or on a device that stands in for a GPU."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.model.builders import write_folder
from tests.runner.models import random_transformer

from everystop.model.checkpoint import inspect_model
from everystop.runner.torch.device import CpuDevice, Device
from everystop.runner.torch.kernel_set import KernelSet
from everystop.runner.torch.loading import TorchModel, load_model
from everystop.runner.torch.plain_sets import PlainKernels, RowByRowKernels


def torch_model(
    model: transformers.PreTrainedModel,
    *,
    dtype: str = "float32",
    kernels: KernelSet | None = None,
    device: Device | None = None,
    stored: torch.dtype | None = None,
) -> TorchModel:
    """The weights of a transformer, through a folder in which they are `stored` in a dtype."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = inspect_model(write_folder(Path(folder), model, dtype=stored))
        return load_model(checkpoint, dtype=dtype, device=device or CpuDevice(), kernels=kernels or RowByRowKernels())


@cache
def row_by_row_model(architecture: str = "llama", **overrides: Any) -> TorchModel:
    """A tiny random model in float32 whose rows do not depend on each other."""
    return torch_model(random_transformer(architecture, **overrides))


@cache
def plain_model(architecture: str = "llama") -> TorchModel:
    """The same, quick."""
    return torch_model(random_transformer(architecture), kernels=PlainKernels())
