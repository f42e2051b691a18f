"""What the device can do: bytes copied and products computed a second, as measured here and now."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from everystop.runner.torch.device import Device


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
