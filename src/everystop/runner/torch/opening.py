"""Opens a device for the runner: which one, with which kernels, and a model on it; everything that loads PyTorch starts
here.
"""

from __future__ import annotations

import torch

from everystop.core.errors import ConfigError
from everystop.model.checkpoint import Checkpoint
from everystop.runner.torch.device import CpuDevice, CudaDevice, Device, check_fp8
from everystop.runner.torch.kernel_set import KernelSet
from everystop.runner.torch.loading import TorchModel, load_model
from everystop.runner.torch.plain_sets import PlainKernels, RowByRowKernels


def open_model(
    checkpoint: Checkpoint, *, device: str, dtype: str, deterministic: bool, num_threads: int, digest: str = ""
) -> TorchModel:
    """A model on a GPU (`device` "cuda") or, by PyTorch, on the CPU ("torch"). Raises ConfigError and ModelError."""
    opened = open_device(device, dtype, num_threads)
    return load_model(
        checkpoint,
        dtype=dtype,
        device=opened,
        kernels=choose_kernels(opened, deterministic=deterministic),
        num_threads=num_threads,
        digest=digest,
    )


def open_device(device: str, dtype: str, num_threads: int) -> Device:
    """The device, ready; raises ConfigError where it is not there, or cannot compute in `dtype`."""
    if device != "cuda":
        torch.set_num_threads(num_threads)
        return CpuDevice()
    gpu = CudaDevice()
    if dtype == "fp8":
        check_fp8(gpu)
    return gpu


def choose_kernels(device: Device, *, deterministic: bool) -> KernelSet:
    """Triton on a GPU, plain PyTorch on the CPU. Raises ConfigError where Triton is missing."""
    if device.torch_device.type == "cpu":
        return RowByRowKernels() if deterministic else PlainKernels()
    try:
        from everystop.runner.torch.triton_set import DeterministicTritonKernels, TritonKernels
    except ImportError as error:
        raise ConfigError(
            f"--device cuda needs Triton, which cannot be loaded ({error}); install everystop[cuda], or Triton 3.6 or "
            "newer"
        ) from error
    return DeterministicTritonKernels() if deterministic else TritonKernels()
