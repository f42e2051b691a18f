"""A model without weights whose next token is a digest of every visible cell of its paged cache.

It has two layers, as the smallest transformer that shows what a stale read does: a cell of layer 1 holds (token,
position); a cell of layer 2 holds a digest of all layer-1 cells that its position may see; the next token is a digest
of all layer-2 cells that the last position may see. All rows of a layer write before any row of it attends. So a wrong,
stale, foreign or missing cell at any time changes the output, in this step or in every later one that sees its
consequence.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct

from everystop.core.plan import Admitted, PromptLogits, StepPlan, StepResult, TokenLogprobs
from everystop.core.request import FinishReason, SamplingParams
from everystop.core.rows import Row

VOCABULARY = 64
EOS = 7
STEP_NS = 1_000_000
STOP_MODULUS, STOP_REMAINDER = 16, 3

_CELL = Struct("<ii")
_CELL_BYTES = _CELL.size
_POISON = b"\xff" * _CELL_BYTES


def ends_stop_string(token: int) -> bool:
    """The stand-in for stop strings: one token in sixteen completes one, for requests that have any."""
    return token % STOP_MODULUS == STOP_REMAINDER


def sample(
    state: bytes, params: SamplingParams, choice_index: int, output_position: int, stop_ids: Collection[int]
) -> int:
    """The next token after a context with digest `state`; keyed by seed, choice, position unless greedy."""
    key = (params.seed, choice_index, output_position) if params.temperature > 0 else ()
    digest = blake2b(state + repr((key, params.logit_bias)).encode(), digest_size=8).digest()
    token = int.from_bytes(digest, "little") % VOCABULARY
    while output_position < params.min_tokens and token in stop_ids:
        token = (token + 1) % VOCABULARY
    return token


def score(state: bytes, token: int) -> TokenLogprobs:
    """Stands in for the log-probability of a prompt's token after a context with digest `state`."""
    digest = blake2b(state + token.to_bytes(4, "little"), digest_size=4).digest()
    return TokenLogprobs(-int.from_bytes(digest, "little") / 2**28, 1, ())


@dataclass(slots=True)
class Solo:
    """What a request yields when it is alone: its tokens, why it ends, and what its prompt scores."""

    token_ids: list[int]
    reason: FinishReason
    scores: list[TokenLogprobs]


def solo(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    limit_tokens: int,
    choice_index: int = 0,
    eos_token_ids: Sequence[int] = (),
) -> Solo:
    """The oracle: generate with neither cache, batch nor scheduler, one cell after the other."""
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    max_tokens = params.max_tokens if params.max_tokens is not None else limit_tokens - len(prompt)
    layer1, layer2 = blake2b(digest_size=8), blake2b(digest_size=8)
    output: list[int] = []
    scores: list[TokenLogprobs] = []
    pending = list(prompt)
    position = 0
    while True:
        for token in pending:
            if 0 < position < len(prompt) and params.prompt_logprobs is not None and choice_index == 0:
                scores.append(score(layer2.digest(), token))
            layer1.update(_CELL.pack(token, position))
            layer2.update(layer1.digest())
            position += 1
        if max_tokens == 0:
            return Solo([], FinishReason.LENGTH, scores)
        token = sample(layer2.digest(), params, choice_index, len(output), stop_ids)
        output.append(token)
        stopped = token in stop_ids and len(output) > params.min_tokens
        if stopped or (params.stop and ends_stop_string(token)):
            return Solo(output, FinishReason.STOP, scores)
        if len(output) >= max_tokens:
            return Solo(output, FinishReason.LENGTH, scores)
        pending = [token]


@dataclass(slots=True)
class _State:
    """What the runner keeps of one request."""

    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    choice_index: int
    stop_ids: tuple[int, ...]
    block_table: list[int]


class HashModelRunner:
    """Executes plans over a fake paged cache; keeps its own state per request and believes nothing but the plans.

    A block is poisoned when a plan hands it to a request that has not computed what it holds. `before_execute` is
    called with each plan first. `fail` names requests whose next row fails with a code, as one with NaN logits would.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, before_execute: Callable[[StepPlan], None] | None = None
    ) -> None:
        self.block_size = block_size
        self.fail: dict[int, str] = {}
        self.num_steps = 0
        self.num_computed_tokens = 0
        self._before_execute = before_execute
        self._block_bytes = block_size * _CELL_BYTES
        self._poison = _POISON * block_size
        self._layer1 = [bytearray(self._poison) for _ in range(num_blocks)]
        self._layer2 = [bytearray(self._poison) for _ in range(num_blocks)]
        self._states: dict[int, _State] = {}

    @property
    def known_requests(self) -> set[int]:
        """Requests that the runner keeps state for."""
        return set(self._states)

    def execute(self, plan: StepPlan) -> StepResult:
        """Bookkeeping in the order that `StepPlan` states, then layer by layer: all rows write, then all attend."""
        if self._before_execute is not None:
            self._before_execute(plan)
        self.num_steps += 1
        self._apply(plan)
        for row in plan.rows:
            self._write_layer1(row)
        for row in plan.rows:
            self._write_layer2(row)
        num_real = len(plan.rows) - plan.num_padded_rows
        rows = [self._next(row, is_padded=i >= num_real) for i, row in enumerate(plan.rows)]
        failed = {row.request_id for row, out in zip(plan.rows, rows, strict=True) if isinstance(out, str)}
        scores = {each.request_id: self._scores(each) for each in plan.prompt_logits if each.request_id not in failed}
        return StepResult(rows=rows, execute_ns=STEP_NS, prompt_logprobs=scores)

    def close(self) -> None:
        """Nothing to release."""

    def _apply(self, plan: StepPlan) -> None:
        for request_id in (*plan.released, *plan.preempted):
            del self._states[request_id]
        starts = {row.request_id: row.start for row in plan.rows}
        for admitted in plan.admitted:
            self._admit(admitted)
            self._poison_from(admitted.block_table, 0, starts[admitted.request_id])
        for request_id, index, block_ids in plan.new_blocks:
            table = self._states[request_id].block_table
            assert index <= len(table), "a block table has a hole"
            table[index : index + len(block_ids)] = block_ids
            if request_id in starts:
                self._poison_from(block_ids, index, starts[request_id])
        for source, destination in plan.copies:
            self._layer1[destination][:] = self._layer1[source]
            self._layer2[destination][:] = self._layer2[source]

    def _admit(self, admitted: Admitted) -> None:
        assert admitted.request_id not in self._states, "admitted twice"
        self._states[admitted.request_id] = _State(
            list(admitted.token_ids),
            admitted.num_prompt_tokens,
            admitted.params,
            admitted.choice_index,
            admitted.stop_token_ids,
            list(admitted.block_table),
        )

    def _poison_from(self, block_ids: Sequence[int], index: int, start: int) -> None:
        """Blocks at or behind that of `start` hold nothing of this request yet; those before it are shared and stay."""
        for i, block in enumerate(block_ids, index):
            if i >= start // self.block_size:
                self._layer1[block][:] = self._poison
                self._layer2[block][:] = self._poison

    def _write_layer1(self, row: Row) -> None:
        state = self._states[row.request_id]
        assert row.start + row.num_tokens <= len(state.token_ids), "a row reaches beyond the known tokens"
        self.num_computed_tokens += row.num_tokens
        for position in range(row.start, row.start + row.num_tokens):
            index, offset = divmod(position, self.block_size)
            _CELL.pack_into(
                self._layer1[state.block_table[index]], offset * _CELL_BYTES, state.token_ids[position], position
            )

    def _write_layer2(self, row: Row) -> None:
        table, block_bytes = self._states[row.request_id].block_table, self._block_bytes
        seen = self._see(self._layer1, table, row.start)
        for position in range(row.start, row.start + row.num_tokens):
            index, offset = divmod(position * _CELL_BYTES, block_bytes)
            block = table[index]
            seen.update(self._layer1[block][offset : offset + _CELL_BYTES])
            self._layer2[block][offset : offset + _CELL_BYTES] = seen.digest()

    def _see(self, layer: list[bytearray], table: list[int], num_tokens: int) -> blake2b:
        """A digest over the cells of positions 0 to num_tokens-1, through the block table."""
        index, offset = divmod(num_tokens, self.block_size)
        seen = blake2b(b"".join([layer[block] for block in table[:index]]), digest_size=8)
        if offset:
            seen.update(layer[table[index]][: offset * _CELL_BYTES])
        return seen

    def _scores(self, wanted: PromptLogits) -> list[TokenLogprobs]:
        state = self._states[wanted.request_id]
        assert state.choice_index == 0
        assert state.params.prompt_logprobs is not None
        assert wanted.start + wanted.num_tokens < state.num_prompt_tokens
        return [
            score(self._see(self._layer2, state.block_table, position + 1).digest(), state.token_ids[position + 1])
            for position in range(wanted.start, wanted.start + wanted.num_tokens)
        ]

    def _next(self, row: Row, *, is_padded: bool) -> tuple[int, ...] | str:
        if row.logits_from >= row.num_tokens:
            return ()
        state = self._states[row.request_id]
        end = row.start + row.num_tokens
        seen = self._see(self._layer2, state.block_table, end)
        output_position = end - state.num_prompt_tokens
        token = sample(seen.digest(), state.params, state.choice_index, output_position, state.stop_ids)
        if is_padded:
            if end == len(state.token_ids):
                state.token_ids.append(token)  # a finished row goes on as if it were not
            return (token,)
        assert end == len(state.token_ids), "a row samples in the middle of what is known"
        state.token_ids.append(token)  # also where it failed: at depth 1 the next plan may already name it
        return self.fail.pop(row.request_id, (token,))


class LateRunner:
    """Launches steps, and executes each as late as can be: when its result, or that of a later one, is waited for.

    So whatever plans or counts before that must not have needed the result.
    """

    def __init__(self, runner: HashModelRunner) -> None:
        self._runner = runner
        self._waiting: deque[_LateStep] = deque()

    def launch(self, plan: StepPlan) -> _LateStep:
        """Take the plan, as it is now."""
        assert len(self._waiting) <= 1, "a third step was launched before the first was waited for"
        step = _LateStep(self, copy.deepcopy(plan), plan)
        self._waiting.append(step)
        return step

    def execute(self, plan: StepPlan) -> StepResult:
        """The loop must not ask for it."""
        raise AssertionError("a runner that launches was asked to execute")

    def close(self) -> None:
        """Nothing to release."""

    def catch_up(self, step: _LateStep) -> None:
        """Execute all up to that step."""
        while step.result is None:
            first = self._waiting.popleft()
            assert first.seen == first.plan, "a plan was changed after its launch"
            first.result = self._runner.execute(first.plan)


@dataclass(slots=True)
class _LateStep:
    runner: LateRunner
    seen: StepPlan
    plan: StepPlan
    result: StepResult | None = None

    def wait(self) -> StepResult:
        """Its result."""
        self.runner.catch_up(self)
        assert self.result is not None
        return self.result
