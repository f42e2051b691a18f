"""The PyTorch runner: carries step plans to the decoder on a device and its tokens back; knows no scheduling.

A step is launched without waiting for it: the next one can be planned and launched before its tokens are known to the
host, since they are written where the next step finds them. What happens on the device is in `_work` and what it
calls; the host's account of who is on board is in `steps`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from everystop.core.plan import NO_TOKEN_LEFT, Admitted, StepPlan, StepResult
from everystop.core.rows import Row, Rows
from everystop.model.spec import DecoderSpec, Float32Array
from everystop.runner.codes import NOT_FINITE, NOT_TAKEN
from everystop.runner.torch.batch import FAILED, MASKED, AttentionBatch
from everystop.runner.torch.decoder import Decoder, Tokens
from everystop.runner.torch.device import Fetch
from everystop.runner.torch.graphs import DecodeGraphs, Shape, context_bounds, graph_sizes
from everystop.runner.torch.loading import TorchModel
from everystop.runner.torch.sampling import SampledRows, read_scores, score
from everystop.runner.torch.steps import GREEDY, Deck, Rider, Room, Step
from everystop.runner.torch.tables import Tables
from everystop.runner.torch.uploads import Staged, Uploads

Array = npt.NDArray[Any]
_PROBE_ID = -1  # never a scheduler's id


def bytes_per_block(spec: DecoderSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block of the KV cache over all layers.

    Example, Llama 3.1 8B in bfloat16, 32 tokens: 32 layers · 2 · 32 tokens · 8 heads · 128 · 2 bytes = 4 MiB.
    """
    return spec.num_layers * 2 * block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize


@dataclass(slots=True)
class _Outcome:
    """What a step's work leaves on the device for the host."""

    tokens: Tensor | None = None  # int64 [R], of the rows that sample
    logprobs: list[Tensor] = field(default_factory=list)
    scores: list[list[Tensor]] = field(default_factory=list)  # of each piece of the prompts' tokens
    logits: list[Tensor] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        """In the order in which the host reads them."""
        own = [] if self.tokens is None else [self.tokens]
        return [*own, *self.logprobs, *(tensor for piece in self.scores for tensor in piece), *self.logits]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A step with all that the host has to say about it."""

    step: Step
    sampled: SampledRows
    staged: Staged
    max_context: int
    shape: Shape | None
    scored_riders: list[Rider]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """What a runner is made for. `max_model_len` is the longest sequence in tokens (default: what the cache holds);
    `num_valid_tokens` are the ids that may be sampled (default: all rows of the embedding). `graphs` says when decode
    steps are captured: "start", "lazy" or "off".
    """

    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int | None = None
    num_valid_tokens: int | None = None
    graphs: str = "off"


class TorchRunner:
    """Executes step plans on a device; see `ModelRunner` and `LaunchingRunner`. One thread at a time may call it.

    A plan beyond the limits, or one that names unknown requests or blocks, raises ValueError.
    """

    def __init__(self, model: TorchModel, limits: RunnerLimits) -> None:
        spec, device, size = model.spec, model.device, limits.block_size
        if size % 16 or 256 % size:
            raise ValueError(f"block_size must be 16, 32, 64, 128 or 256; it is {size}")
        self.num_valid_tokens = limits.num_valid_tokens or spec.vocab_size
        self.room = Room(
            num_blocks=limits.num_blocks,
            block_size=size,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            max_tokens=(limits.max_model_len or limits.num_blocks * size) + 1,
            vocab_size=spec.vocab_size,
            num_valid_tokens=self.num_valid_tokens,
        )
        self._device = device
        self._deck = Deck(self.room)
        self._decoder = Decoder(spec, model.weights, model.kernels, self.room.max_tokens)
        self._tables = Tables(self.room, device.torch_device)
        self._uploads = Uploads(device)
        self._kv = allocate_kv(spec, limits.num_blocks + 1, size, model.torch_dtype, device.torch_device)
        self._graphs = self._make_graphs(limits.graphs)

    # ------------------------------------------------------------------------------- steps

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and wait for its tokens."""
        return self.launch(plan).wait()

    def launch(self, plan: StepPlan) -> _Launched:
        """Submit one step; at most one other may be on its way that has not been waited for."""
        began_ns = time.monotonic_ns()
        prepared, outcome = self._prepare(plan), _Outcome()
        fetch = self._device.submit(lambda: self._work(prepared, outcome), outcome.tensors)
        return _Launched(plan, prepared, outcome, fetch, began_ns)

    def close(self) -> None:
        """Release cache and graphs; nothing can be executed afterwards."""
        self._device.synchronize()
        self._graphs = None
        self._kv = torch.empty(0)

    def _prepare(self, plan: StepPlan) -> _Prepared:
        step = self._deck.take(plan)
        sampled = SampledRows.of(step, self._tables)
        max_context = int((step.starts + step.nums_tokens).max()) if step.riders else 0
        shape = None
        if self._graphs is not None and step.is_decode:
            shape = self._graphs.shape_for(len(step.riders), max_context)
        arrays = self._tables.writes_of(step) | sampled.arrays
        if len(step.copies):
            arrays["copies"] = step.copies
        if step.riders:
            arrays |= _rows_of(step) if shape is None else _padded_rows_of(step, shape, self.room)
        return _Prepared(
            step,
            sampled,
            self._uploads.stage(arrays),
            max_context,
            shape,
            [step.riders[row] for row, _, _ in step.scored],
        )

    def _work(self, prepared: _Prepared, outcome: _Outcome) -> None:
        """All that a step does on the device."""
        step, sampled = prepared.step, prepared.sampled
        landed = prepared.staged.land()
        self._tables.write(landed, step)
        if "copies" in landed:
            copy_blocks(self._kv, landed["copies"], step.copies)
        if not step.riders:
            return
        logits = self._forward(prepared, landed, outcome)
        if logits is None:
            return
        wanted = logits[landed["logprobs.rows"]] if sampled.wants_logprobs else None  # a copy: sampling may write over
        tokens = sampled.sample(self._decoder.kernels, logits, landed, self._tables)
        sampled.note(tokens, landed, self._tables)
        outcome.tokens = tokens
        if wanted is not None:
            outcome.logprobs = score(wanted, tokens[landed["logprobs.rows"]], sampled.num_top)

    def _forward(self, prepared: _Prepared, landed: Mapping[str, Tensor], outcome: _Outcome) -> Tensor | None:
        """Logits [R, num_valid_tokens] of the rows that sample; scores what is to be scored of prompts."""
        step = prepared.step
        if prepared.shape is not None and self._graphs is not None:
            self._inputs[:, : prepared.shape.num_rows].copy_(landed["graph.inputs"])
            self._graphs.replay(prepared.shape)
            return self._logits[: len(step.riders)]
        hidden = self._hidden(prepared, landed)
        self._score_prompts(prepared, hidden, outcome)
        if not prepared.sampled.rows:
            return None
        return self._logits_of(hidden[landed["sampled.tokens"]])

    def _hidden(self, prepared: _Prepared, landed: Mapping[str, Tensor]) -> Tensor:
        """The decoder's output for all tokens of a step [T, D]."""
        seats = landed["rows.seats"]
        token_seats = torch.repeat_interleave(seats, landed["rows.nums"], output_size=prepared.step.num_tokens)
        positions = landed["tokens.positions"]
        num_blocks = -(-prepared.max_context // self.room.block_size)
        attention = AttentionBatch(
            block_tables=self._tables.block_tables[seats, :num_blocks],
            query_starts=landed["rows.query_starts"],
            context_lens=landed["rows.ends"],
            max_query_len=int(prepared.step.nums_tokens.max()),
            max_context_len=prepared.max_context,
        )
        return self._decoder.forward(self._tokens(token_seats, positions, attention), self._kv)

    def _tokens(self, seats: Tensor, positions: Tensor, attention: AttentionBatch) -> Tokens:
        """The tokens of seats at positions, both int64 [T], found in the tables."""
        size = self.room.block_size
        ids = self._tables.token_ids[seats, positions].long()
        blocks = self._tables.block_tables[seats, positions // size].long()
        return Tokens(ids, positions, blocks * size + positions % size, attention)

    def _logits_of(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)[:, : self.num_valid_tokens]

    def _score_prompts(self, prepared: _Prepared, hidden: Tensor, outcome: _Outcome) -> None:
        """As many rows of logits at a time as can be sampled at once."""
        starts = np.concatenate([[0], prepared.step.nums_tokens.cumsum()])
        for (row, offset, count), rider in zip(prepared.step.scored, prepared.scored_riders, strict=True):
            num_top = rider.settings.params.prompt_logprobs or 0
            first, position = int(starts[row]) + offset, int(prepared.step.starts[row]) + offset
            for done in range(0, count, self.room.max_num_seqs):
                n = min(self.room.max_num_seqs, count - done)
                logits = self._logits_of(hidden[first + done : first + done + n])
                following = self._tables.token_ids[rider.seat, position + done + 1 : position + done + n + 1]
                outcome.scores.append(score(logits, following.long(), num_top))

    # ------------------------------------------------------------------------------ graphs

    def _make_graphs(self, when: str) -> DecodeGraphs | None:
        """The static tensors of captured steps, and their graphs; those of "start" are captured now."""
        if when == "off":
            return None
        room, device = self.room, self._device.torch_device
        sizes = graph_sizes(room.max_num_seqs)
        self._inputs = torch.zeros(2, sizes[-1], dtype=torch.int64, device=device)  # seats and positions
        self._inputs[0] = room.spare_seat
        self._logits = torch.empty(sizes[-1], room.num_valid_tokens, dtype=torch.float32, device=device)
        self._query_starts = torch.arange(sizes[-1] + 1, dtype=torch.int32, device=device)
        graphs = DecodeGraphs(self._device, self._decode, sizes, context_bounds(room.max_tokens - 1))
        if when == "start":
            for shape in graphs.shapes:
                self._device.submit(lambda shape=shape: graphs.capture(shape), list)  # type: ignore[misc]
            self._device.synchronize()
        return graphs

    @property
    def has_graphs(self) -> bool:
        """Decode steps are captured."""
        return self._graphs is not None

    @property
    def num_graphs(self) -> int:
        """Steps that have been captured."""
        return 0 if self._graphs is None else self._graphs.num_captured

    @property
    def static_bytes(self) -> int:
        """Bytes of what captured steps read and write."""
        return 0 if self._graphs is None else self._inputs.nbytes + self._logits.nbytes + self._query_starts.nbytes

    def decode_largest(self) -> None:
        """Compute the largest step that is captured, on nobody's tokens."""
        assert self._graphs is not None
        shape = self._graphs.shapes[0]
        self._device.submit(lambda: self._decode(shape), list).get()

    def _decode(self, shape: Shape) -> None:
        """One token of each of `num_rows` seats; reads `_inputs`, writes `_logits`, and knows nothing of this step."""
        seats, positions = self._inputs[0, : shape.num_rows], self._inputs[1, : shape.num_rows]
        num_blocks = -(-shape.bound // self.room.block_size)
        attention = AttentionBatch(
            block_tables=self._tables.block_tables[:, :num_blocks][seats],
            query_starts=self._query_starts[: shape.num_rows + 1],
            context_lens=(positions + 1).int(),
            max_query_len=1,
            max_context_len=shape.bound,
        )
        hidden = self._decoder.forward(self._tokens(seats, positions, attention), self._kv)
        self._logits[: shape.num_rows].copy_(self._logits_of(hidden))

    # -------------------------------------------------------------------- apart from plans

    def logits(self, token_ids: Sequence[int]) -> Float32Array:
        """Logits [T, num_valid_tokens] after each of T tokens.

        Uses the cache's blocks from 0 on: only while no request is on board.
        """
        return np.concatenate(list(self._logits_by_chunk(token_ids)))

    def _logits_by_chunk(self, token_ids: Sequence[int]) -> Iterator[Float32Array]:
        assert not self._deck.riders, "the cache belongs to the requests on board"
        num_tokens, size = len(token_ids), self.room.block_size
        num_needed = -(-num_tokens // size)
        if num_needed > self.room.num_blocks:
            raise ValueError(
                f"{num_tokens:,} tokens need {num_needed:,} blocks; the cache has {self.room.num_blocks:,}"
            )
        table = tuple(range(num_needed))
        probe = Admitted(_PROBE_ID, tuple(token_ids), num_tokens, GREEDY, 0, (), table, 0, "")
        self.execute(StepPlan(-1, admitted=[probe]))
        try:
            step = self.room.max_num_batched_tokens
            for start in range(0, num_tokens, step):
                num = min(step, num_tokens - start)
                yield self._all_logits(StepPlan(-1, rows=Rows([Row(_PROBE_ID, start, num, 0, num)])))
        finally:
            self.execute(StepPlan(-1, released=[_PROBE_ID]))

    def _all_logits(self, plan: StepPlan) -> Float32Array:
        prepared, outcome = self._prepare(plan), _Outcome()

        def work() -> None:
            hidden = self._hidden(prepared, prepared.staged.land())
            size = self.room.max_num_seqs
            outcome.logits = [self._logits_of(hidden[i : i + size]) for i in range(0, hidden.shape[0], size)]

        return np.concatenate(self._device.submit(work, outcome.tensors).get())


def allocate_kv(
    spec: DecoderSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A cache [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], keys at index 0, all zero."""
    shape = (spec.num_layers, 2, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device)


def copy_blocks(kv: Tensor, copies: Tensor, known: Array) -> None:
    """Copy blocks of the cache, (source, destination) int32 [C, 2] in their order; `known` is the same on the host."""
    pairs = copies.long()
    if np.intersect1d(known[:, 0], known[:, 1]).size == 0:
        kv.index_copy_(2, pairs[:, 1].contiguous(), kv.index_select(2, pairs[:, 0].contiguous()))
        return
    for i in range(len(known)):  # what one writes another reads
        kv.index_copy_(2, pairs[i : i + 1, 1], kv.index_select(2, pairs[i : i + 1, 0]))


def _rows_of(step: Step) -> dict[str, Array]:
    """The rows of a step that is not captured, and where in it each sampling row ends."""
    starts, nums = step.starts.astype(np.int64), step.nums_tokens.astype(np.int64)
    query_starts = np.concatenate([[0], nums.cumsum()])
    within = np.arange(query_starts[-1]) - np.repeat(query_starts[:-1], nums)
    arrays = {
        "rows.seats": np.array([rider.seat for rider in step.riders], dtype=np.int64),
        "rows.nums": nums,
        "rows.query_starts": query_starts.astype(np.int32),
        "rows.ends": (starts + nums).astype(np.int32),
        "tokens.positions": np.repeat(starts, nums) + within,
    }
    if step.samples.any():
        arrays["sampled.tokens"] = query_starts[1:][step.samples] - 1
    return arrays


def _padded_rows_of(step: Step, shape: Shape, room: Room) -> dict[str, Array]:
    """The seats and positions of a captured step, filled up with the spare seat."""
    inputs = np.zeros((2, shape.num_rows), dtype=np.int64)
    inputs[0] = room.spare_seat
    inputs[0, : len(step.riders)] = [rider.seat for rider in step.riders]
    inputs[1, : len(step.riders)] = step.starts
    return {"graph.inputs": inputs}


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step on its way."""

    plan: StepPlan
    prepared: _Prepared
    outcome: _Outcome
    fetch: Fetch
    began_ns: int

    def wait(self) -> StepResult:
        """Its tokens, once they are here."""
        arrays = iter(self.fetch.get())
        step, sampled = self.prepared.step, self.prepared.sampled
        tokens = next(arrays).tolist() if self.outcome.tokens is not None else []
        logprobs = self._read_logprobs(arrays, tokens)
        scores = self._read_scores(arrays)
        self._note_failures(tokens)
        sampled_at = dict(zip(sampled.rows, tokens, strict=True))
        rows = [self._row(r, rider, sampled_at.get(r)) for r, rider in enumerate(step.riders)]
        failed = {rider.request_id for rider, out in zip(step.riders, rows, strict=True) if isinstance(out, str)}
        result = StepResult(rows=rows)
        result.logprobs = {i: [entry] for i, entry in logprobs.items() if i not in failed}
        result.prompt_logprobs = {i: entries for i, entries in scores.items() if i not in failed}
        result.execute_ns = min(self.fetch.device_ns, time.monotonic_ns() - self.began_ns) or 1
        return result

    def _row(self, r: int, rider: Rider, token: int | None) -> tuple[int, ...] | str:
        if not rider.is_taken:
            return NOT_TAKEN
        is_padded = r >= len(self.prepared.step.riders) - self.prepared.step.num_padded
        if (rider.has_failed and not is_padded) or token == FAILED:
            return NOT_FINITE
        if token == MASKED:
            return NO_TOKEN_LEFT
        return () if token is None else (token,)

    def _note_failures(self, tokens: list[int]) -> None:
        step = self.prepared.step
        for r, token in zip(self.prepared.sampled.rows, tokens, strict=True):
            if token == FAILED and r < len(step.riders) - step.num_padded:
                step.riders[r].has_failed = True

    def _read_logprobs(self, arrays: Iterator[Array], tokens: list[int]) -> dict[int, Any]:
        if not self.outcome.logprobs:
            return {}
        wants = self.prepared.sampled.wants_logprobs
        riders = [self.prepared.sampled.riders[i] for i in wants]
        nums = [rider.settings.params.logprobs or 0 for rider in riders]
        values, ranks, best, tops = (next(arrays) for _ in range(4))
        entries = read_scores(values, ranks, best, tops, nums)
        found = zip(riders, wants, entries, strict=True)
        return {rider.request_id: entry for rider, i, entry in found if tokens[i] >= 0}

    def _read_scores(self, arrays: Iterator[Array]) -> dict[int, list[Any]]:
        """The scores of each prompt, whose pieces lie one after the other."""
        scores: dict[int, list[Any]] = {}
        for (_, _, count), rider in zip(self.prepared.step.scored, self.prepared.scored_riders, strict=True):
            entries = scores.setdefault(rider.request_id, [])
            while len(entries) < count:
                logprobs, ranks, best, tops = (next(arrays) for _ in range(4))
                entries += read_scores(logprobs, ranks, best, tops, [best.shape[1]] * len(ranks))
            if any(entry.rank == 0 for entry in entries):
                rider.has_failed = True
        return scores
