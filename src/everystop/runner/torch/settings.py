"""What of a request's sampling parameters the device is told, checked; the rest of them stays with the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from everystop.core.plan import Admitted
from everystop.core.request import SamplingParams
from everystop.runner.torch.batch import GREEDY_TEMPERATURE

Array = npt.NDArray[Any]
MAX_INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class Settings:
    """How a request is sampled; ids in it exist. `allowed` is a bit mask int32 [ceil(num_ids / 32)]."""

    params: SamplingParams
    choice_index: int
    stop_ids: tuple[int, ...]
    allowed: Array | None

    @classmethod
    def of(cls, admitted: Admitted, num_ids: int) -> Settings:
        """Those of a request that boards; raises ValueError for ids outside 0 to `num_ids` - 1.

        Stop ids that can never be sampled are left out.
        """
        params, name = admitted.params, f"request {admitted.request_id}"
        _require_ids((i for i, _ in params.logit_bias), num_ids, f"{name} has a logit bias for token")
        if not all(math.isfinite(bias) for _, bias in params.logit_bias):
            raise ValueError(f"{name} has a logit bias that is no number")
        for word in params.bad_word_ids:
            _require_ids(word, num_ids, f"{name} has a bad word with token")
        allowed = None
        if params.allowed_token_ids is not None:
            _require_ids(params.allowed_token_ids, num_ids, f"{name} allows token")
            allowed = bit_mask(params.allowed_token_ids, num_ids)
        stop_ids = tuple(i for i in admitted.stop_token_ids if i < num_ids)
        _require_ids(stop_ids, num_ids, f"{name} has stop id")
        return cls(params, admitted.choice_index, stop_ids, allowed)

    @property
    def is_greedy(self) -> bool:
        """The best token is taken, and nothing drawn."""
        return self.params.temperature < GREEDY_TEMPERATURE

    @property
    def has_cuts(self) -> bool:
        """Some tokens are cut off before the draw."""
        params = self.params
        return not self.is_greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)

    @property
    def has_penalties(self) -> bool:
        """What was said before changes the logits."""
        params = self.params
        return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0

    def floats(self) -> list[float]:
        """The row of the device's table of float64 numbers; see `FLOATS`."""
        return [float(getattr(self.params, name)) for name in FLOATS]

    def integers(self, num_prompt_tokens: int) -> list[int]:
        """The row of the device's table of int64 numbers: top_k, seed, choice index, prompt tokens."""
        seed = (self.params.seed or 0) % 2**64
        signed = seed - 2**64 if seed >= MAX_INT64 else seed
        return [self.params.top_k, signed, self.choice_index, num_prompt_tokens]


FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
INTEGERS = ("top_k", "seed", "choice_index", "num_prompt_tokens")


def bit_mask(ids: Sequence[int], num_ids: int) -> Array:
    """Bit i % 32 of word i / 32 is set for each id i: int32 [ceil(num_ids / 32)]."""
    bits = np.zeros(-(-num_ids // 32) * 32, dtype=np.uint8)
    bits[np.array(ids, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _require_ids(ids: Any, num_ids: int, what: str) -> None:
    for i in ids:
        if not 0 <= i < num_ids:
            raise ValueError(f"{what} {i}; there are {num_ids}")
