"""Measures a runner's step times at start-up, so that the first steps can be planned by time; knows no model."""

from __future__ import annotations

from dataclasses import dataclass

from everystop.core.plan import Admitted, StepPlan
from everystop.core.request import SamplingParams
from everystop.core.rows import Row
from everystop.core.step_time import UNKNOWN_STEP_TIMES, StepFeatures, StepTimeModel
from everystop.core.step_time_fit import StepTimeFit
from everystop.runner import ModelRunner

MAX_ROWS = 16
MAX_TOKENS = 128
NUM_ROUNDS = 3
_FIRST_ID = -1  # never a scheduler's id
_PROMPT_TOKEN = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What probes may use of a runner on which nothing runs: `num_blocks` of `block_size` tokens, and its limits."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


def measure_step_times(runner: ModelRunner, room: Room) -> StepTimeModel:
    """A model from a few steps of decodes and prefill chunks, each in its quickest of three rounds.

    The KV cache must be empty, and nothing of it may be matchable. It takes about as long as 20 steps. Contexts are
    short, so the cost of long ones is left to be learned.
    """
    num_rows = min(MAX_ROWS, room.num_blocks, room.max_num_seqs, room.max_num_batched_tokens)
    num_tokens = min(MAX_TOKENS, room.num_blocks * room.block_size - 1, room.max_num_batched_tokens)
    probes = _decode_probes(num_rows) + _prefill_probes(num_tokens, room.block_size)
    quickest: dict[StepFeatures, int] = {}
    for _ in range(NUM_ROUNDS):
        for plan in probes:
            features = StepFeatures.of(plan)
            execute_ns = runner.execute(plan).execute_ns
            quickest[features] = min(execute_ns, quickest.get(features, execute_ns))
            runner.execute(StepPlan(-1, released=[admitted.request_id for admitted in plan.admitted]))
    fit = StepTimeFit(UNKNOWN_STEP_TIMES)
    for features, execute_ns in quickest.items():
        fit.observe(features, execute_ns)
    return fit.solved()


def _decode_probes(num_rows: int) -> list[StepPlan]:
    """One row, and many; each a request of one token with one block."""
    return [_plan([(i, 1, (i,)) for i in range(n)]) for n in sorted({1, num_rows})]


def _prefill_probes(num_tokens: int, block_size: int) -> list[StepPlan]:
    """A chunk of a quarter, and the whole of it."""
    sizes = sorted({max(2, num_tokens // 4), max(2, num_tokens)})
    return [_plan([(0, n, tuple(range(-(-(n + 1) // block_size))))]) for n in sizes if n <= num_tokens]


def _plan(probes: list[tuple[int, int, tuple[int, ...]]]) -> StepPlan:
    """A step that admits requests of (slot, number of prompt tokens, block table) and computes their prompts."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    plan = StepPlan(step_id=-1)
    for slot, n, table in probes:
        request_id = _FIRST_ID - slot
        plan.admitted.append(Admitted(request_id, (_PROMPT_TOKEN,) * n, n, params, 0, (), table, slot, ""))
        plan.rows.append(Row(request_id, 0, n, 0, n - 1))
    return plan
