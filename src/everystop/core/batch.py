"""Who is on board: running requests, their slots and blocks, slots that are held, and plans on their way."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain

from everystop.core.kv_cache import KVCache
from everystop.core.plan import NewBlocks, StepPlan
from everystop.core.request import Request, RequestState


@dataclass(slots=True)
class Riders:
    """The request behind each row of a plan, and its epoch then; -1 marks a padded row, whose result is dropped."""

    requests: list[Request]
    epochs: list[int]

    def append(self, request: Request, epoch: int) -> None:
        """Who is behind the next row."""
        self.requests.append(request)
        self.epochs.append(epoch)


@dataclass(slots=True)
class Outstanding:
    """A plan on its way: who is behind each row, and block tables to release when it is back, each with whose it was.

    A step planned by time has a target and a predicted duration, others 0 and 0. Of the plan's tokens,
    `num_recomputed_tokens` had been there before a preemption.
    """

    plan: StepPlan
    scheduled_ns: int
    riders: Riders
    deferred: list[tuple[int, list[int]]]
    target_ns: int = 0
    predicted_ns: int = 0
    num_recomputed_tokens: int = 0


class Batch:
    """Slots and block tables of the requests on board; decides nothing, keeps everything consistent.

    A slot is free, or taken by a running request, or held by a finished one until its batch has ended. Blocks that a
    plan on its way names return to the pool when that plan is back. A slot `is_vacated` from the time somebody has lost
    it to a guest until one has boarded.
    """

    def __init__(self, max_num_seqs: int, kv: KVCache) -> None:
        self.kv = kv
        self.running: dict[int, Request] = {}
        self.held: dict[int, Request] = {}
        self.outstanding: deque[Outstanding] = deque()
        self.free_slots = list(range(max_num_seqs))  # a heap: the lowest free slot is taken first
        self.is_vacated = False
        self.num_departures = 0
        self._released: list[int] = []

    @property
    def num_padded(self) -> int:
        """Finished requests that are still computed."""
        return sum(1 for request in self.held.values() if request.block_table)

    @property
    def num_promised_blocks(self) -> int:
        """Blocks that come back with plans on their way."""
        return sum(len(table) for out in self.outstanding for _, table in out.deferred)

    @property
    def tables(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """(request id, block table) of those that have one: the running, then the padded."""
        on_board = (*self.running.values(), *self.held.values())
        return tuple((request.request_id, tuple(request.block_table)) for request in on_board if request.block_table)

    def board(self, request: Request) -> None:
        """Take the lowest free slot for a request that has its blocks."""
        request.slot = heappop(self.free_slots)
        request.state = RequestState.RUNNING
        self.running[request.request_id] = request
        self.is_vacated = False

    def grow(self, request: Request, plan: StepPlan) -> bool:
        """Blocks for one token more, which the plan tells of; False, and nothing done, if there are too few."""
        index = len(request.block_table)
        new = self.kv.grow(request, request.num_scheduled_through + 1)
        if new is None:
            return False
        if new:
            plan.new_blocks.append(NewBlocks(request.request_id, index, tuple(new)))
        return True

    def leave(self, request: Request) -> int:
        """Free slot and blocks of a running request; returns how many blocks return only with a plan on its way."""
        del self.running[request.request_id]
        self.num_departures += 1
        heappush(self.free_slots, request.slot)
        request.slot = -1
        return self._give_back(request)

    def end(self, request: Request) -> None:
        """A running request has ended, and gives slot and blocks back."""
        self.leave(request)
        self._released.append(request.request_id)

    def hold(self, request: Request, *, padded: bool) -> None:
        """A finished request keeps its slot, and, if it is padded, its blocks."""
        del self.running[request.request_id]
        self.num_departures += 1
        self.held[request.slot] = request
        request.num_in_flight = 0  # a row on its way is dropped when it is back
        if not padded:
            self._give_back(request)
            self._released.append(request.request_id)

    def drop_padding(self) -> bool:
        """Held requests lose their blocks, not their slots, before any living one loses or lacks its own; False if none
        had some.
        """
        padded = [request for request in self.held.values() if request.block_table]
        for request in padded:
            self._give_back(request)
            self._released.append(request.request_id)
        return bool(padded)

    def free_held(self) -> None:
        """All held slots are free again."""
        self.drop_padding()
        for slot in self.held:
            heappush(self.free_slots, slot)
        self.held.clear()

    @property
    def has_released(self) -> bool:
        """The runner has not been told of all that ended."""
        return bool(self._released)

    def take_released(self) -> list[int]:
        """Ids of those who have ended on board and have no blocks any more, for the next plan to tell of."""
        released, self._released = self._released, []
        return released

    def _give_back(self, request: Request) -> int:
        table, request.block_table = request.block_table, []
        for outstanding in reversed(self.outstanding):
            if request.last_served_step == outstanding.plan.step_id:
                self._withdraw_in_flight(request, table)
                outstanding.deferred.append((request.request_id, table))
                return len(table)
        self.kv.release(table)
        return 0

    def _withdraw_in_flight(self, request: Request, table: list[int]) -> None:
        """Blocks that a plan on its way fills for a request that leaves now may never be right: unmatchable."""
        rows = chain.from_iterable(
            zip(out.plan.rows.request_ids, out.plan.rows.starts, strict=True) for out in self.outstanding
        )
        first = min(start for request_id, start in rows if request_id == request.request_id) // self.kv.block_size
        for block in table[first : request.num_published_blocks]:
            self.kv.pool.withdraw(block)

    def withdraw(self, request: Request, landed: Outstanding) -> None:
        """A row of the request in the plan that is back has failed: its blocks become unmatchable, those that it has
        given back meanwhile too. Earlier chunks may be as wrong as this row, unseen without logits.
        """
        if request.block_table:  # else it has ended, or been preempted, since
            self.kv.withdraw(request, 0)
        given_back = [each for outstanding in (landed, *self.outstanding) for each in outstanding.deferred]
        for request_id, table in given_back:
            if request_id == request.request_id:
                for block in table:
                    self.kv.pool.withdraw(block)

    def release_deferred(self, landed: Outstanding) -> None:
        """Blocks that waited for a plan return to the pool."""
        for _, table in landed.deferred:
            self.kv.release(table)
