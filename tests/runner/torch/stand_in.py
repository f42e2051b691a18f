"""A device on the CPU that behaves as a GPU does where a runner could go wrong: work is done late, captured work is
frozen, and its tensors stay where they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from everystop.runner.torch.batch import AttentionBatch
from everystop.runner.torch.device import Array, Graph, Memory, Work
from everystop.runner.torch.plain_kernels import attend, gather, visible
from everystop.runner.torch.plain_sets import PlainKernels

FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique")
"""Operations that wait for the device, which a capture does not allow."""


class Recorder(TorchDispatchMode):
    """Notes each operation with the very tensors that it takes and gives."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        if name in FORBIDDEN:
            raise RuntimeError(f"{name} waits for the device, and a step is being captured")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class RecordedGraph:
    """Does what was recorded again, into the tensors of then; numbers of the host are those of then, too."""

    def __init__(self, recorder: Recorder) -> None:
        self._calls = recorder.calls
        self.num_replays = 0

    def replay(self) -> None:
        """Once more."""
        self.num_replays += 1
        for func, args, kwargs, then in self._calls:
            now = func(*args, **kwargs)
            for old, new in zip(_tensors(then), _tensors(now), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [each for each in result if isinstance(each, Tensor)] if isinstance(result, tuple | list) else []


class StandIn:
    """See `Device`. Submitted work waits until a result that comes after it is asked for; `log` says what happened.

    `peaks` are what `measure_peak` is to find, in turn, after it has done the work.
    """

    def __init__(self, *, total_bytes: int = 1 << 30, free_bytes: int = 1 << 30, peaks: Sequence[int] = ()) -> None:
        self.torch_device = torch.device("cpu")
        self.name = "stand-in"
        self.log: list[str] = []
        self.graphs: list[RecordedGraph] = []
        self.max_waiting = 0
        self._memory = Memory(total_bytes, free_bytes)
        self._peaks = deque(peaks)
        self._queue: deque[Callable[[], None]] = deque()

    def memory(self) -> Memory:
        """What was said."""
        return self._memory

    def measure_peak(self, work: Work) -> int:
        """The next of `peaks`."""
        work()
        return self._peaks.popleft()

    def staging(self, num_words: int) -> Tensor:
        """An ordinary tensor."""
        return torch.full((num_words,), -1, dtype=torch.int32)

    def upload(self, source: Tensor, target: Tensor) -> None:
        """What is there now, which may be later than it was put there."""
        target.copy_(source)

    def submit(self, work: Work, results: Callable[[], Sequence[Tensor]]) -> LateFetch:
        """Put off."""
        fetch = LateFetch(self)

        def act() -> None:
            work()
            fetch.arrays = [result.clone().numpy() for result in results()]

        self.log.append("submit")
        self._queue.append(act)
        self.max_waiting = max(self.max_waiting, len(self._queue))
        return fetch

    def capture(self, work: Work) -> Graph:
        """Record, in which nothing is computed that lasts."""
        self.log.append("capture")
        with Recorder() as recorder:
            work()
        for tensor in {id(t): t for call in recorder.calls for t in _tensors(call[3])}.values():
            if tensor.is_floating_point() and not tensor._is_view():
                tensor.fill_(np.nan)  # a captured step has computed nothing
        self.graphs.append(RecordedGraph(recorder))
        return self.graphs[-1]

    def catch_up(self, fetch: LateFetch) -> None:
        """Do what was submitted, up to what gives that result."""
        while fetch.arrays is None:
            self._queue.popleft()()

    def synchronize(self) -> None:
        """Do all that was submitted."""
        while self._queue:
            self._queue.popleft()()


class LateFetch:
    """Results of work that is done when they are asked for."""

    device_ns = 1_000

    def __init__(self, device: StandIn) -> None:
        self._device = device
        self.arrays: list[Array] | None = None

    def get(self) -> list[Array]:
        """Do the work, and what was submitted before it."""
        self._device.catch_up(self)
        self._device.log.append("get")
        assert self.arrays is not None
        return self.arrays


class BoundedKernels(PlainKernels):
    """Plain kernels that can be captured for steps of one row a sequence: shapes follow the bounds alone."""

    name = "bounded PyTorch"

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """As the plain one for single rows, whose context the batch bounds."""
        if batch.max_query_len > 1:
            return super().paged_attention(query, key_cache, value_cache, batch, scale, window, soft_cap, out)
        keys, values = (gather(cache, batch.block_tables, batch.max_context_len) for cache in (key_cache, value_cache))
        seen = visible(batch.context_lens[:, None], keys.shape[1], window)
        attended = attend(query[:, None], keys, values, seen, scale, soft_cap)[:, 0]
        return attended if out is None else out.copy_(attended)
