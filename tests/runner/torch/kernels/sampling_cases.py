"""Rows of logits with settings, as a batch of tensors and as the native runner takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from everystop import _native
from everystop.runner.torch.batch import FAILED, MASKED, LogitEdits, SamplingBatch

NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": 0,
    "choice_index": 0,
    "min_tokens": 0,
    "num_logprobs": -1,
    "bad_word_ids": [],
    "stop_token_ids": [],
    "logit_bias": [],
    "allowed_token_ids": None,
}


@dataclass
class Row:
    """One row: logits, the request's tokens before it, how many of them are its prompt, and its settings."""

    logits: np.ndarray
    history: list[int] = field(default_factory=list)
    num_prompt: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    def native(self, *, naive: bool = False) -> int:
        """The token that the native runner samples; FAILED also where none is left, which kernels do not tell apart."""
        history = np.array(self.history, dtype=np.int32)
        logits = self.logits.astype(np.float32)
        token = int(_native.sample(logits, NEUTRAL | self.settings, history, self.num_prompt, naive=naive)[0])
        return FAILED if token == MASKED else token


def batch_of(rows: Sequence[Row], device: torch.device) -> tuple[torch.Tensor, SamplingBatch]:
    """Logits [R, V] and the batch; rows sit on seats in the opposite order."""
    num_rows, num_ids = len(rows), len(rows[0].logits)
    settings = [NEUTRAL | row.settings for row in rows]
    counts = torch.zeros(num_rows, num_ids + 3, dtype=torch.int32)
    in_prompt = torch.zeros(num_rows, num_ids + 3, dtype=torch.bool)
    allowed = torch.full((num_rows, -(-num_ids // 32)), -1, dtype=torch.int32)
    edits: list[tuple[int, int, float]] = []
    for i, (row, each) in enumerate(zip(rows, settings, strict=True)):
        seat = num_rows - 1 - i
        for position, token in enumerate(row.history):
            if position < row.num_prompt:
                in_prompt[seat, token] = True
            else:
                counts[seat, token] += 1
        edits += [(i, token, value) for token, value in each["logit_bias"]]
        if len(row.history) - row.num_prompt < each["min_tokens"]:
            edits += [(i, token, -np.inf) for token in each["stop_token_ids"]]
        if each["allowed_token_ids"] is not None:
            allowed[i] = _bits(each["allowed_token_ids"], num_ids)

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([each[name] for each in settings], dtype=dtype, device=device)

    seeds = torch.tensor([each["seed"] - (each["seed"] >= 2**63) * 2**64 for each in settings], device=device)
    batch = SamplingBatch(
        temperatures=column("temperature", torch.float32),
        top_ks=column("top_k", torch.int32),
        top_ps=column("top_p", torch.float64),
        min_ps=column("min_p", torch.float64),
        repetition_penalties=column("repetition_penalty", torch.float32),
        presence_penalties=column("presence_penalty", torch.float32),
        frequency_penalties=column("frequency_penalty", torch.float32),
        seeds=seeds,
        choices=column("choice_index", torch.int32),
        positions=torch.tensor([len(row.history) - row.num_prompt for row in rows], device=device),
        seats=torch.arange(num_rows - 1, -1, -1, device=device),
        output_counts=counts.to(device),
        is_in_prompt=in_prompt.to(device),
        allowed=allowed.to(device),
        edits=_edits(edits, device),
        is_greedy=all(each["temperature"] < 1e-5 for each in settings),
        has_cuts=any(each["top_k"] or each["top_p"] < 1 or each["min_p"] for each in settings),
    )
    logits = torch.tensor(np.stack([row.logits for row in rows]), dtype=torch.float32, device=device)
    return logits, batch


def _bits(ids: Sequence[int], num_ids: int) -> torch.Tensor:
    """Bit i % 32 of word i / 32 for each id: int32 [ceil(V / 32)]."""
    flags = np.zeros(-(-num_ids // 32) * 32, dtype=bool)
    flags[np.asarray(ids, dtype=np.int64)] = True
    return torch.from_numpy(np.packbits(flags, bitorder="little").view(np.int32).copy())


def _edits(edits: list[tuple[int, int, float]], device: torch.device) -> LogitEdits | None:
    if not edits:
        return None
    rows, ids, values = zip(*edits, strict=True)
    return LogitEdits(
        torch.tensor(rows, device=device),
        torch.tensor(ids, device=device),
        torch.tensor(values, dtype=torch.float32, device=device),
    )
