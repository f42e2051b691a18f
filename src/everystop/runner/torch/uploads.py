"""Carries a step's numbers to the device in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from everystop.runner.torch.device import Device

Array = npt.NDArray[Any]

_LEAST_WORDS = 1 << 14
_TORCH_TYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32, "float64": torch.float64}


class Uploads:
    """Two staging buffers in turn, for one step may be prepared while the one before has not been carried out; the
    device's own buffer is one, since its work is done in order.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._staging = [device.staging(_LEAST_WORDS) for _ in range(2)]
        self._turn = 0
        self._buffer: Tensor | None = None

    def stage(self, arrays: Mapping[str, Array]) -> Staged:
        """Copy the arrays to staging; they get onto the device when the result is asked to `land`.

        What was staged two calls before must have landed, and its work be done.
        """
        entries, num_words = [], 0
        for name, array in sorted(arrays.items(), key=lambda item: -item[1].itemsize):
            entries.append((name, array, num_words))
            num_words += array.nbytes // 4
        self._turn ^= 1
        if self._staging[self._turn].numel() < num_words:
            self._staging[self._turn] = self._device.staging(2 * num_words)
        source = self._staging[self._turn][:num_words]
        words = source.numpy()
        for _, array, first in entries:
            words[first : first + array.nbytes // 4] = np.ascontiguousarray(array).reshape(-1).view(np.int32)
        layout = {name: (first, array.shape, array.dtype.name) for name, array, first in entries}
        return Staged(self, source, layout)

    def land(self, source: Tensor) -> Tensor:
        """Copy to the device's buffer, as part of submitted work."""
        if self._buffer is None or self._buffer.numel() < source.numel():
            num_words = max(_LEAST_WORDS, 2 * source.numel())
            self._buffer = torch.empty(num_words, dtype=torch.int32, device=self._device.torch_device)
        landed = self._buffer[: source.numel()]
        self._device.upload(source, landed)
        return landed


class Staged:
    """Arrays that wait on the host: 64-bit numbers first, so that each lies where its kind must."""

    def __init__(self, uploads: Uploads, source: Tensor, layout: dict[str, tuple[int, tuple[int, ...], str]]) -> None:
        self._uploads = uploads
        self._source = source
        self._layout = layout

    def land(self) -> dict[str, Tensor]:
        """The arrays on the device, by name, until the next ones land; part of submitted work."""
        words = self._uploads.land(self._source)
        return {name: _view(words, *entry) for name, entry in self._layout.items()}


def _view(words: Tensor, first: int, shape: tuple[int, ...], kind: str) -> Tensor:
    size = int(np.prod(shape)) * np.dtype(kind).itemsize // 4
    return words[first : first + size].view(_TORCH_TYPES[kind]).reshape(shape)
