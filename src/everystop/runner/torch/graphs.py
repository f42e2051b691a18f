"""Captured decode steps: which sizes there are, which one a step takes, and when each is captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from everystop.runner.torch.device import Device, Graph

MAX_ROWS = 256
LEAST_BOUND = 4096
"""Tokens of context up to which one capture does; further ones are four times as long each."""


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Rows of the captured steps: 1, 2, 4, 8, 16, 24 … 256, as far as a step may need them.

    Example, max_num_seqs 20: 1, 2, 4, 8, 16, 24.
    """
    sizes = (1, 2, 4, *range(8, MAX_ROWS + 1, 8))
    most = min(max_num_seqs, MAX_ROWS)
    last = next(i for i, size in enumerate(sizes) if size >= most)
    return sizes[: last + 1]


def context_bounds(max_context: int) -> tuple[int, ...]:
    """Contexts for which steps are captured: a kernel's grid follows the bound, and most of a long one stands idle.

    Example, max_context 40,000: 4,096, 16,384 and 40,000.
    """
    bounds = []
    bound = LEAST_BOUND
    while bound < max_context:
        bounds.append(bound)
        bound *= 4
    return (*bounds, max_context)


@dataclass(frozen=True, slots=True)
class Shape:
    """A captured step: so many rows, none of them with a longer context than `bound`."""

    num_rows: int
    bound: int


class DecodeGraphs:
    """Captures of `run`, which computes a decode step of a shape on static tensors, all in one pool of memory.

    `run` is called once before it is captured, for what is done only the first time must not be captured.
    """

    def __init__(
        self, device: Device, run: Callable[[Shape], None], sizes: Sequence[int], bounds: Sequence[int]
    ) -> None:
        self._device = device
        self._run = run
        self._sizes = tuple(sizes)
        self._bounds = tuple(bounds)
        self._graphs: dict[Shape, Graph] = {}

    @property
    def num_captured(self) -> int:
        """Shapes that have been captured."""
        return len(self._graphs)

    @property
    def shapes(self) -> list[Shape]:
        """All shapes, largest first: the memory of one does for each after it."""
        return [Shape(size, bound) for bound in reversed(self._bounds) for size in reversed(self._sizes)]

    def shape_for(self, num_rows: int, max_context: int) -> Shape | None:
        """The smallest shape that a step fits; None where there is none."""
        size = next((size for size in self._sizes if size >= num_rows), None)
        bound = next((bound for bound in self._bounds if bound >= max_context), None)
        return None if size is None or bound is None else Shape(size, bound)

    def capture(self, shape: Shape) -> None:
        """Capture a shape that has not been; part of submitted work."""
        if shape not in self._graphs:
            self._run(shape)
            self._graphs[shape] = self._device.capture(lambda: self._run(shape))

    def replay(self, shape: Shape) -> None:
        """Compute a step of the shape on what the static tensors hold; captures it first where that is still to be
        done. Part of submitted work.
        """
        self.capture(shape)
        self._graphs[shape].replay()
