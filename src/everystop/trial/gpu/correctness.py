"""Is it right on this device: Triton against plain PyTorch, replayed against eager, one batch against another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from everystop.core.plan import Admitted, StepPlan
from everystop.core.request import SamplingParams
from everystop.core.rows import Row, Rows
from everystop.runner.torch.device import Device
from everystop.runner.torch.kernel_set import KernelSet
from everystop.runner.torch.loading import TorchModel
from everystop.runner.torch.plain_sets import PlainKernels
from everystop.runner.torch.runner import TorchRunner
from everystop.trial.gpu.models import random_model
from everystop.trial.gpu.step_times import GREEDY, make_runner

LONGEST = 700


def check(name: str, device: Device, kernels: KernelSet, invariant: KernelSet, *, graphs: str) -> dict[str, Any]:
    """`float32_error`: of logits in float32 by those kernels from plain PyTorch's, which were compared with
    transformers; `agreement`: of the best tokens in bfloat16 with those of float32; the rest must be True.
    """
    exact = random_model(name, "float32", device, kernels)
    ids = [(7 * i + i * i // 3) % (exact.spec.vocab_size - 1) + 1 for i in range(LONGEST - 100)]
    plain = _logits(replace(exact, kernels=PlainKernels()), ids)
    ours = _logits(exact, ids)
    narrow = replace(random_model(name, "bfloat16", device, kernels))
    agreement = (_logits(narrow, ids).argmax(1) == plain.argmax(1)).mean()
    return {
        "float32_error": float(np.abs(ours - plain).max()),
        "bfloat16_agreement": float(agreement),
        "replayed_as_eager": _tokens(narrow, 5, graphs) == _tokens(narrow, 5, "off"),
        "invariant": is_invariant(replace(narrow, kernels=invariant), graphs),
    }


def _logits(model: TorchModel, ids: list[int]) -> np.ndarray:
    runner = make_runner(model, num_rows=8, num_tokens=256, longest=LONGEST, graphs="off")
    logits = runner.logits(ids)
    runner.close()
    return logits


def is_invariant(model: TorchModel, graphs: str) -> bool:
    """Bits of the log-probabilities of a request alone, and among others with its prompt in pieces."""
    runs = [_tokens(model, num_rows, graphs, chunk=chunk) for num_rows, chunk in ((1, 300), (3, 40), (8, 128))]
    return runs[0][0] == runs[1][0] == runs[2][0]


def _tokens(model: TorchModel, num_rows: int, graphs: str, chunk: int = 300) -> list[list[Any]]:
    """Tokens and log-probabilities of a prompt of its own for each row, 24 steps."""
    runner = make_runner(model, num_rows=num_rows, num_tokens=num_rows * 300, longest=LONGEST, graphs=graphs)
    seen: list[list[Any]] = [[] for _ in range(num_rows)]
    blocks = -(-(LONGEST + 1) // 32)
    lengths = [300 - 17 * i for i in range(num_rows)]
    plan = StepPlan(-1)
    for i, length in enumerate(lengths):
        params = replace(GREEDY, logprobs=0) if i % 2 == 0 else SamplingParams(seed=i, logprobs=0)
        table = tuple(range(i * blocks, (i + 1) * blocks))
        ids = tuple((5 + 31 * i + 13 * j) % (model.spec.vocab_size - 1) + 1 for j in range(length))
        plan.admitted.append(Admitted(i, ids, length, params, 0, (), table, i, ""))
    runner.execute(plan)
    done = [0] * num_rows
    for step in range(24 + 300 // chunk):
        rows = []
        for i, length in enumerate(lengths):
            num = min(chunk, length - done[i]) if done[i] < length else 1
            samples = done[i] + num >= length
            rows.append(Row(i, done[i], num, 0, num - samples))
            done[i] += num
        _take(runner, StepPlan(step, rows=Rows(rows)), seen)
    runner.close()
    return [each[:20] for each in seen]


def _take(runner: TorchRunner, plan: StepPlan, seen: list[list[Any]]) -> None:
    result = runner.execute(plan)
    for row, out in zip(plan.rows, result.rows, strict=True):
        if out:
            seen[row.request_id].append((out, result.logprobs[row.request_id][0].logprob))
