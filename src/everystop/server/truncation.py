"""Which tokens of a prompt are kept where a client lets it be cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everystop.core.errors import RequestError

AS_MANY_AS_FIT = -1


@dataclass(frozen=True, slots=True)
class Truncation:
    """At most `num_tokens` are kept, -1 for as many as fit, of the prompt's end or of its beginning."""

    num_tokens: int
    keeps_end: bool = True

    def cut(self, prompt: tuple[int, ...], num_fitting: int, start: Sequence[int] = ()) -> tuple[int, ...]:
        """What is kept of a prompt of which at most `num_fitting` tokens fit.

        A `start` that it begins with, such as a begin-of-text token, stays there, and counts. Example: of (1, 7, 8, 9)
        with the start (1,) and 3 tokens, (1, 8, 9) is kept.
        """
        num_kept = num_fitting if self.num_tokens == AS_MANY_AS_FIT else self.num_tokens
        if len(prompt) <= num_kept:
            return prompt
        if not self.keeps_end:
            return prompt[:num_kept]
        num_start = len(start) if prompt[: len(start)] == tuple(start) and len(start) < num_kept else 0
        return prompt[:num_start] + prompt[len(prompt) - num_kept + num_start :]


def read_truncation(values: Mapping[str, Any]) -> Truncation | None:
    """Of a body's fields; None where nothing may be cut. Raises RequestError."""
    num_tokens: int | None = values.get("truncate_prompt_tokens")
    keeps_end = values.get("truncation_side", "left") == "left"
    if num_tokens is not None:
        return Truncation(num_tokens, keeps_end)
    if not keeps_end:
        raise RequestError(
            'truncation_side = "right" needs truncate_prompt_tokens', param="truncation_side", code="conflicting_fields"
        )
    return None
