"""Times of single steps: decode at so many rows, prefill of so many tokens; each against what the device could do."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from everystop.core.plan import Admitted, StepPlan
from everystop.core.request import SamplingParams
from everystop.core.rows import Row, Rows
from everystop.runner.torch.loading import TorchModel
from everystop.runner.torch.runner import RunnerLimits, TorchRunner
from everystop.trial.gpu.models import kv_bytes_per_token, step_flops

BLOCK_SIZE = 32
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """A decode step of `num_rows` rows behind `context` tokens each, launched one ahead: mean wall time, the device's
    own share of it, and the least time in which the weights and the cache can be read.
    """

    num_rows: int
    context: int
    step_ms: float
    device_ms: float
    weights_floor_ms: float
    kv_floor_ms: float

    @property
    def floor_share(self) -> float:
        """The floor as a share of the measured step."""
        return (self.weights_floor_ms + self.kv_floor_ms) / self.step_ms


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """A step of `num_tokens` prompt tokens, and its rate as a share of the matrix rate."""

    num_tokens: int
    step_ms: float
    rate_share: float


def make_runner(model: TorchModel, *, num_rows: int, num_tokens: int, longest: int, graphs: str) -> TorchRunner:
    """A runner with room for `num_rows` requests of `longest` tokens."""
    blocks = -(-(longest + 1) // BLOCK_SIZE)
    limits = RunnerLimits(
        num_blocks=num_rows * blocks,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=num_tokens,
        max_num_seqs=num_rows,
        max_model_len=longest,
        graphs=graphs,
    )
    return TorchRunner(model, limits)


def measure_decode(
    model: TorchModel, num_rows: int, context: int, bandwidth: float, *, graphs: str, num_steps: int = 40
) -> DecodeTime:
    """Steps in a row, each launched before the one before is back. What the cache holds means nothing."""
    warm_up = 5
    longest = context + num_steps + warm_up + 2
    runner = make_runner(model, num_rows=num_rows, num_tokens=num_rows, longest=longest, graphs=graphs)
    blocks = -(-(longest + 1) // BLOCK_SIZE)
    plan = StepPlan(-1)
    for i in range(num_rows):
        table = tuple(range(i * blocks, (i + 1) * blocks))
        plan.admitted.append(Admitted(i, (7,) * context, context, GREEDY, 0, (), table, i, ""))
    runner.execute(plan)

    def step(n: int) -> StepPlan:
        return StepPlan(n, rows=Rows([Row(i, context - 1 + n, 1, 0, 0) for i in range(num_rows)]))

    for n in range(warm_up):
        runner.execute(step(n))
    began_s, device_ns = time.perf_counter(), 0
    waiting = deque([runner.launch(step(warm_up))])
    for n in range(warm_up + 1, warm_up + num_steps):
        waiting.append(runner.launch(step(n)))
        device_ns += waiting.popleft().wait().execute_ns
    device_ns += waiting.popleft().wait().execute_ns
    step_ms = (time.perf_counter() - began_s) * 1e3 / num_steps
    runner.close()
    kv_bytes = num_rows * (context + warm_up + num_steps // 2) * kv_bytes_per_token(model)
    return DecodeTime(
        num_rows,
        context,
        step_ms,
        device_ns / 1e6 / num_steps,
        model.num_step_bytes / bandwidth * 1e3,
        kv_bytes / bandwidth * 1e3,
    )


def measure_prefill(
    model: TorchModel, num_prompts: int, length: int, matrix_rate: float, *, repeats: int = 5
) -> PrefillTime:
    """All prompts in one step, each with its first token; the quickest of a few."""
    num_tokens = num_prompts * length
    runner = make_runner(model, num_rows=num_prompts, num_tokens=num_tokens, longest=length, graphs="off")
    blocks = -(-(length + 1) // BLOCK_SIZE)
    plan = StepPlan(-1)
    for i in range(num_prompts):
        table = tuple(range(i * blocks, (i + 1) * blocks))
        plan.admitted.append(Admitted(i, tuple(range(1, length + 1)), length, GREEDY, 0, (), table, i, ""))
    runner.execute(plan)
    rows = Rows([Row(i, 0, length, 0, length - 1) for i in range(num_prompts)])
    seconds = min(_timed(lambda: runner.execute(StepPlan(0, rows=rows))) for _ in range(repeats + 1))
    runner.close()
    flops = step_flops(model.spec, num_tokens, num_prompts, length // 2)
    return PrefillTime(num_tokens, seconds * 1e3, flops / seconds / matrix_rate)


def _timed(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s
