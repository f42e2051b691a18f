"""The host's account of who is on board, and what a plan means in numbers for the device; touches no tensor.

Every request on board has a seat, a row in the tables of the device, which hold its tokens and its blocks. A plan
becomes a `Step`: what is written into those tables first, then the tokens that are computed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from everystop.core.plan import Admitted, PromptLogits, StepPlan
from everystop.core.request import SamplingParams
from everystop.runner.torch.settings import Settings

log = logging.getLogger("everystop.runner")

Array = npt.NDArray[Any]
GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class Rider:
    """A request on board: its seat, how many tokens are known or on their way, and its block table."""

    request_id: int
    seat: int
    num_prompt_tokens: int
    num_tokens: int
    table: list[int]
    settings: Settings
    is_taken: bool
    has_failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What the device's tables and the cache hold; a token id is below `vocab_size`, a sampled one below
    `num_valid_tokens`.
    """

    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_tokens: int
    vocab_size: int
    num_valid_tokens: int

    @property
    def max_blocks(self) -> int:
        """Blocks of a request."""
        return -(-self.max_tokens // self.block_size)

    @property
    def spare_seat(self) -> int:
        """A seat that nobody has: what pads a captured step."""
        return self.max_num_seqs

    @property
    def spare_block(self) -> int:
        """A block that nobody has, likewise."""
        return self.num_blocks


@dataclass(slots=True)
class Boarding:
    """What is written for a request that boards."""

    rider: Rider
    token_ids: Array  # int32 [n]


@dataclass(slots=True)
class Step:
    """One plan in numbers. `rows` are (rider, start, num_tokens, samples); the last `num_padded` are thrown away.

    `table_writes` are (seat, index, block ids); `scored` are (row, offset, count) of prompt tokens to be scored.
    """

    boardings: list[Boarding] = field(default_factory=list)
    table_writes: list[tuple[int, int, Sequence[int]]] = field(default_factory=list)
    copies: Array = field(default_factory=lambda: np.empty((0, 2), dtype=np.int32))
    riders: list[Rider] = field(default_factory=list)
    starts: Array = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    nums_tokens: Array = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    samples: Array = field(default_factory=lambda: np.empty(0, dtype=bool))
    appends: Array = field(default_factory=lambda: np.empty(0, dtype=bool))
    num_padded: int = 0
    scored: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed."""
        return int(self.nums_tokens.sum())

    @property
    def is_decode(self) -> bool:
        """Each row is one token, and samples."""
        return bool(self.riders) and not self.scored and bool((self.nums_tokens == 1).all() and self.samples.all())


class Deck:
    """Who is on board. Raises ValueError for a plan that is impossible, as the decoder's own checks would."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.riders: dict[int, Rider] = {}
        self._free_seats = list(range(room.max_num_seqs))
        heapify(self._free_seats)

    def take(self, plan: StepPlan) -> Step:
        """Bring the account up to the plan, and put the plan into numbers."""
        step = Step()
        for request_id in chain(plan.released, plan.preempted):
            self._release(request_id)
        for admitted in plan.admitted:
            step.boardings.append(self._board(admitted))
            step.table_writes.append((step.boardings[-1].rider.seat, 0, admitted.block_table))
        for request_id, first_index, block_ids in plan.new_blocks:
            rider = self._find(request_id)
            self._set_blocks(rider, first_index, block_ids)
            step.table_writes.append((rider.seat, first_index, block_ids))
        self._take_rows(plan, step)
        self._take_scored(plan, step)
        self._check_blocks(chain.from_iterable(plan.copies))
        if plan.copies:
            step.copies = np.array(plan.copies, dtype=np.int32)
        step.appends = self._count_samples(step)
        return step

    # ---------------------------------------------------------------------------- boarding

    def _find(self, request_id: int) -> Rider:
        rider = self.riders.get(request_id)
        if rider is None:
            raise ValueError(f"request {request_id} is not on board")
        return rider

    def _release(self, request_id: int) -> None:
        rider = self.riders.pop(request_id, None)
        if rider is not None:
            heappush(self._free_seats, rider.seat)

    def _board(self, admitted: Admitted) -> Boarding:
        """Take a request on board; one whose settings or token ids cannot be taken fails by itself.

        Its positions are computed all the same, from what can be taken of it: others may have matched its blocks in
        this very step.
        """
        self._check_admitted(admitted)
        room, name = self.room, f"request {admitted.request_id}"
        ids = np.array(admitted.token_ids, dtype=np.int64)
        is_taken = True
        try:
            num_ids = room.vocab_size if admitted.params.prompt_logprobs is None else room.num_valid_tokens
            if wrong := ids[(ids < 0) | (ids >= num_ids)].tolist():
                raise ValueError(f"{name} has token {wrong[0]} of a vocabulary of {num_ids}")
            settings = Settings.of(admitted, room.num_valid_tokens)
        except ValueError:
            log.exception("request %d fails: it cannot be taken as it is", admitted.request_id)
            ids = np.where((ids >= 0) & (ids < room.vocab_size), ids, 0)
            settings, is_taken = Settings(GREEDY, 0, (), None), False
        rider = Rider(
            admitted.request_id,
            heappop(self._free_seats),
            admitted.num_prompt_tokens,
            len(ids),
            list(admitted.block_table),
            settings,
            is_taken,
        )
        self.riders[admitted.request_id] = rider
        return Boarding(rider, ids.astype(np.int32))

    def _check_admitted(self, admitted: Admitted) -> None:
        """Raise ValueError where the plan itself is impossible."""
        name, num_tokens = f"request {admitted.request_id}", len(admitted.token_ids)
        if admitted.request_id in self.riders:
            raise ValueError(f"{name} is on board already")
        if not 1 <= admitted.num_prompt_tokens <= num_tokens:
            raise ValueError(f"{name} has {admitted.num_prompt_tokens} prompt tokens of {num_tokens}")
        if num_tokens > self.room.max_tokens or len(admitted.block_table) > self.room.max_blocks:
            raise ValueError(
                f"{name} has {num_tokens} tokens and {len(admitted.block_table)} blocks; there is room for "
                f"{self.room.max_tokens} and {self.room.max_blocks}"
            )
        self._check_blocks(admitted.block_table)
        if not self._free_seats:
            raise ValueError(f"{name} finds no seat: all {self.room.max_num_seqs} are taken")

    def _check_blocks(self, blocks: Any) -> None:
        for block in blocks:
            if not 0 <= block < self.room.num_blocks:
                raise ValueError(f"block {block} is outside the pool of {self.room.num_blocks}")

    def _set_blocks(self, rider: Rider, first_index: int, block_ids: Sequence[int]) -> None:
        self._check_blocks(block_ids)
        if not 0 <= first_index <= len(rider.table):
            raise ValueError(
                f"request {rider.request_id} has {len(rider.table)} blocks; none can be set from index {first_index}"
            )
        if first_index + len(block_ids) > self.room.max_blocks:
            raise ValueError(f"request {rider.request_id} would have more than {self.room.max_blocks} blocks")
        rider.table[first_index : first_index + len(block_ids)] = block_ids

    # ------------------------------------------------------------------------------- rows

    def _take_rows(self, plan: StepPlan, step: Step) -> None:
        room, num_rows = self.room, len(plan.rows)
        if num_rows > room.max_num_seqs:
            raise ValueError(f"{num_rows} rows in a step of at most {room.max_num_seqs}")
        numbers = np.frombuffer(plan.rows.numbers, dtype=np.int64).reshape(-1, 5)
        step.riders = [self._find(request_id) for request_id in numbers[:, 0].tolist()]
        step.num_padded = plan.num_padded_rows
        starts, nums_tokens = numbers[:, 1].copy(), numbers[:, 2]
        for r in range(num_rows - plan.num_padded_rows, num_rows):
            # A finished request may have no block for its last token, where none was free.
            starts[r] = min(starts[r], len(step.riders[r].table) * room.block_size - nums_tokens[r])
        self._check_rows(step.riders, starts, nums_tokens, numbers[:, 4])
        step.starts, step.nums_tokens = starts.astype(np.int32), nums_tokens.astype(np.int32)
        step.samples = numbers[:, 4] < nums_tokens
        if step.num_tokens > room.max_num_batched_tokens:
            raise ValueError(f"a step of more than {room.max_num_batched_tokens} tokens")

    def _check_rows(self, riders: list[Rider], starts: Array, nums_tokens: Array, logits_from: Array) -> None:
        """Raise ValueError unless each row's tokens are known, or on their way, and have blocks."""
        ends = starts + nums_tokens
        is_sane = (starts >= 0) & (nums_tokens >= 1) & (logits_from >= 0)
        known = np.array([rider.num_tokens for rider in riders], dtype=np.int64)
        covered = np.array([len(rider.table) for rider in riders], dtype=np.int64) * self.room.block_size
        wrong = np.flatnonzero(~is_sane | (ends > known) | (ends > covered))
        if len(wrong) == 0:
            return
        r = int(wrong[0])
        name = f"the row of request {riders[r].request_id}"
        if not is_sane[r]:
            raise ValueError(f"{name} is malformed")
        if ends[r] > known[r]:
            raise ValueError(f"{name} ends at position {ends[r]} of {known[r]} known tokens")
        raise ValueError(f"{name} ends at position {ends[r]}, but its blocks hold {covered[r]}")

    def _take_scored(self, plan: StepPlan, step: Step) -> None:
        request_ids = plan.rows.request_ids
        last_row = -1
        for wanted in plan.prompt_logits:
            rider = self._find(wanted.request_id)
            if not rider.is_taken:
                continue
            row = request_ids.index(wanted.request_id)
            offset = wanted.start - int(step.starts[row])
            if row <= last_row:
                raise ValueError("prompts are scored in the order of their rows, once each")
            self._check_scored(rider, wanted, offset, int(step.nums_tokens[row]))
            step.scored.append((row, offset, wanted.num_tokens))
            last_row = row

    def _check_scored(self, rider: Rider, wanted: PromptLogits, offset: int, num_tokens: int) -> None:
        has_tokens = offset >= 0 and 1 <= wanted.num_tokens <= num_tokens - offset
        has_next = wanted.start + wanted.num_tokens < rider.num_prompt_tokens
        if not (has_tokens and has_next and rider.settings.params.prompt_logprobs is not None):
            raise ValueError(
                f"the row of request {rider.request_id} has no {wanted.num_tokens} prompt tokens to score from offset "
                f"{offset} on"
            )

    def _count_samples(self, step: Step) -> Array:
        """Which rows bring a token that their request has not got yet: each is on its way from now on."""
        appends = step.samples.copy()
        for r in np.flatnonzero(step.samples).tolist():
            rider = step.riders[r]
            is_new = int(step.starts[r] + step.nums_tokens[r]) == rider.num_tokens < self.room.max_tokens
            appends[r] = is_new
            rider.num_tokens += is_new
        return appends
