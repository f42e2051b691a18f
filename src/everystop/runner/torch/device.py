"""Where a runner computes: the few calls in which a GPU and the CPU differ, behind one interface.

Work that is submitted runs in order, later than it was submitted perhaps; so nothing that submitted work reads on the
host may change before a result that was submitted after it has been fetched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from everystop.core.durations import NS_PER_MS
from everystop.core.errors import ConfigError

Array = npt.NDArray[Any]
Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device: in all, and free for this process, what it has taken and left unused included."""

    total_bytes: int
    free_bytes: int


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Do it again, on what the same tensors hold now."""


class Fetch(Protocol):
    """Results on their way to the host."""

    def get(self) -> list[Array]:
        """Wait for them."""

    @property
    def device_ns(self) -> int:
        """From the beginning of the work that leads to them to its end, once they are here."""


class Device(Protocol):
    """One device, with one queue of work."""

    torch_device: torch.device
    name: str

    def memory(self) -> Memory:
        """What there is, now that all submitted work is done."""

    def measure_peak(self, work: Work) -> int:
        """Do the work, and return by how many bytes it exceeded, at most, what was taken before."""

    def staging(self, num_words: int) -> Tensor:
        """A host tensor int32 [num_words] from which `upload` is quick."""

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Copy from staging to the device, as part of submitted work."""

    def submit(self, work: Work, results: Callable[[], Sequence[Tensor]]) -> Fetch:
        """Queue work, and the copy of its results to the host."""

    def capture(self, work: Work) -> Graph:
        """Record work, which must have run once before, so that it can be replayed; part of submitted work."""

    def synchronize(self) -> None:
        """Wait until all submitted work is done."""


class CpuDevice:
    """The CPU: work is done when it is submitted; nothing is captured."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.name = "CPU"

    def memory(self) -> Memory:
        """Not asked of the CPU: what may be used there is known to `machine`."""
        raise NotImplementedError

    def measure_peak(self, work: Work) -> int:
        """Nor is this."""
        raise NotImplementedError

    def staging(self, num_words: int) -> Tensor:
        """An ordinary tensor."""
        return torch.empty(num_words, dtype=torch.int32)

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Copy."""
        target.copy_(source)

    def submit(self, work: Work, results: Callable[[], Sequence[Tensor]]) -> Fetch:
        """Do the work at once."""
        began_ns = time.monotonic_ns()
        work()
        arrays = [result.numpy() for result in results()]
        return _Fetched(arrays, time.monotonic_ns() - began_ns)

    def capture(self, work: Work) -> Graph:
        """There is nothing to be gained."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Nothing is on its way."""


@dataclass(frozen=True, slots=True)
class _Fetched:
    arrays: list[Array]
    device_ns: int

    def get(self) -> list[Array]:
        return self.arrays


class CudaDevice:
    """An NVIDIA GPU; all work goes to one stream of its own. Raises ConfigError where there is none."""

    def __init__(self, index: int = 0) -> None:
        _require_gpu()
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self.name = torch.cuda.get_device_name(index)
        self._stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, such as (9, 0)."""
        return torch.cuda.get_device_capability(self.torch_device)

    def memory(self) -> Memory:
        """What the driver says, and what PyTorch holds without using it."""
        self.synchronize()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        unused = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return Memory(total, free + unused)

    def measure_peak(self, work: Work) -> int:
        """By PyTorch's own counter."""
        self.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
        with torch.cuda.stream(self._stream):
            work()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self.torch_device) - before
        torch.cuda.empty_cache()
        return peak

    def staging(self, num_words: int) -> Tensor:
        """Pinned memory."""
        return torch.empty(num_words, dtype=torch.int32, pin_memory=True)

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Copy without waiting."""
        target.copy_(source, non_blocking=True)

    def submit(self, work: Work, results: Callable[[], Sequence[Tensor]]) -> Fetch:
        """Launch the work and the copies, and wait for nothing."""
        began, ended, arrived = (_event(is_timed=is_timed) for is_timed in (True, True, False))
        with torch.cuda.stream(self._stream):
            began.record()
            work()
            ended.record()
            copies = []
            for tensor in results():
                copies.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
                copies[-1].copy_(tensor, non_blocking=True)
            arrived.record()
        return _CudaFetch(copies, began, ended, arrived)

    def capture(self, work: Work) -> Graph:
        """A CUDA graph in the pool that all graphs share."""
        graph = torch.cuda.CUDAGraph()
        self._stream.synchronize()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        return graph

    def synchronize(self) -> None:
        """Wait for the whole device."""
        torch.cuda.synchronize(self.torch_device)


def _event(*, is_timed: bool) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=is_timed)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _CudaFetch:
    copies: list[Tensor]
    began: torch.cuda.Event
    ended: torch.cuda.Event
    arrived: torch.cuda.Event

    def get(self) -> list[Array]:
        self.arrived.synchronize()
        return [copy.numpy() for copy in self.copies]

    @property
    def device_ns(self) -> int:
        elapsed_ms: float = self.began.elapsed_time(self.ended)
        return round(elapsed_ms * NS_PER_MS)


MIN_CAPABILITY = (8, 0)
MIN_FP8_CAPABILITY = (8, 9)


def _require_gpu() -> None:
    """Raise ConfigError where PyTorch finds no GPU that can be used, and say why."""
    if not torch.version.cuda:
        raise ConfigError(
            f"--device cuda: PyTorch {torch.__version__} was built without CUDA; install a CUDA build of PyTorch, or "
            "choose --device cpu"
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            f"--device cuda: PyTorch {torch.__version__} finds no GPU that it can use; see that nvidia-smi lists one "
            "and that the driver is new enough, or choose --device cpu"
        )
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        raise ConfigError(
            f"--device cuda: {torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}; "
            f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} (Ampere) is the least; choose --device cpu"
        )


def check_fp8(device: CudaDevice) -> None:
    """Raise ConfigError for a GPU without FP8."""
    if device.capability < MIN_FP8_CAPABILITY:
        raise ConfigError(
            f"--dtype fp8: {device.name} has compute capability {device.capability[0]}.{device.capability[1]}, and FP8 "
            f"needs {MIN_FP8_CAPABILITY[0]}.{MIN_FP8_CAPABILITY[1]} (Ada); choose --dtype bfloat16"
        )
