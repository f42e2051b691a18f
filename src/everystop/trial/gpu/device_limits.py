"""What the device can do: bytes copied and products computed a second, as measured here and now."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from everystop.runner.torch.device import Device
from everystop.runner.torch.kernels.reference import quantize_rows
from everystop.runner.torch.linear import Fp8Linear
from everystop.runner.torch.loading import DTYPES
from everystop.runner.torch.opening import choose_kernels, open_device


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is copied, how large matrices are, and how often each."""

    num_bytes: int
    size: int
    repeats: int


ON_GPU, ON_CPU = Extent(2 << 30, 8192, 20), Extent(256 << 20, 2048, 3)


def seconds_of(device: Device, work: Callable[[], object], repeats: int) -> float:
    """The time of one of `repeats` calls in a row, after one that is not counted."""
    work()
    device.synchronize()
    began_s = time.perf_counter()
    for _ in range(repeats):
        work()
    device.synchronize()
    return (time.perf_counter() - began_s) / repeats


def copy_bandwidth(device: Device, num_bytes: int, repeats: int = 20) -> float:
    """Bytes read and written a second by the copy of a large tensor."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(device, lambda: target.copy_(source), repeats)


def matrix_rate(device: Device, size: int, dtype: torch.dtype, repeats: int = 20) -> float:
    """Floating-point operations a second in the product of two square matrices."""
    a = torch.randn(size, size, device=device.torch_device).to(dtype)
    b = torch.randn(size, size, device=device.torch_device).to(dtype)
    return 2.0 * size**3 / seconds_of(device, lambda: a @ b.t(), repeats)


def fp8_rate(device: Device, size: int, repeats: int = 20) -> float:
    """The same by the runner's own kernel, which quantises one of the matrices row by row as it comes."""
    kernels = choose_kernels(device, deterministic=False)
    x = torch.randn(size, size, device=device.torch_device).to(DTYPES["fp8"])
    linear = Fp8Linear(*quantize_rows(torch.randn(size, size, device=device.torch_device)))
    return 2.0 * size**3 / seconds_of(device, lambda: linear(kernels, x), repeats)


def measure_device(name: str, dtype: str, num_threads: int, extent: Extent | None = None) -> dict[str, Any]:
    """Both for a device and a dtype of the runner, with what was measured in words: the fields of `MachineLimits`.

    Leaves no memory of the device taken. Raises ConfigError where the device is not there.
    """
    device = open_device(name, dtype, num_threads)
    extent = extent or (ON_CPU if device.torch_device.type == "cpu" else ON_GPU)
    size, repeats = extent.size, extent.repeats
    if dtype == "fp8":
        rate, by = fp8_rate(device, size, repeats), "the runner's kernel"
    else:
        rate, by = matrix_rate(device, size, DTYPES[dtype], repeats), "PyTorch"
    bandwidth = copy_bandwidth(device, extent.num_bytes, repeats)
    torch.cuda.empty_cache()  # nothing where there is no GPU
    return {
        "operations_per_s": rate,
        "bytes_per_s": bandwidth,
        "operations": f"{dtype} GFLOP/s in products of {size:,} × {size:,} matrices by {by}",
        "bytes": "GB/s read and written by a copy",
        "how": f"each the mean of {repeats} on {device.name}",
    }
