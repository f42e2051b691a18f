"""Targets for first and later tokens, after Niyama (Goel et al., arXiv 2503.22562): who can still be on time goes
first, who cannot is put back without being forgotten, and steps are as long as the running decoders can bear.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from everystop.core.durations import NS_PER_MS
from everystop.core.events import WaitReason
from everystop.core.policy.accounts import Share
from everystop.core.policy.base import Policy, View
from everystop.core.policy.prompts import Prompts, prefill_ns
from everystop.core.policy.waiting import WaitingLine
from everystop.core.request import Request, RequestState

LENGTH_WEIGHT = 2
LATE_TURN = 8


class Targets(NamedTuple):
    """What holds where neither a request nor its tenant says: its first token is due `ttft_ns` after its arrival, each
    other one `itl_ns` after the one before; None is no promise.
    """

    ttft_ns: int = 1_000_000_000
    itl_ns: int | None = None

    @classmethod
    def from_ms(cls, ttft_ms: float | None, itl_ms: float | None) -> Targets:
        """From milliseconds, of which None means the default."""
        itl_ns = None if itl_ms is None else round(itl_ms * NS_PER_MS)
        return cls(itl_ns=itl_ns) if ttft_ms is None else cls(round(ttft_ms * NS_PER_MS), itl_ns)


DEFAULT_TARGETS = Targets()


class Deadline(Policy):
    """Earliest deadline first, weighed against length: by arrival + TTFT target + 2 · predicted time of its prefill.

    That prediction is one of the prompt alone, made on arrival, so a rank stands while a request waits. The first in
    line is late if its first token could not come in time even if it boarded now: then it goes behind all who are not.
    Late requests stand in the order in which they were found late, and the first of them has every eighth turn to board
    while others wait, so the k-th boards within 8 · k boardings. Once on board it ranks as if it had arrived then. A
    request that has boarded once is never put back again.

    Who waits does not board while two prompts on board fill a step, unless it goes before one of them: each further one
    would get little, and a later, more urgent one would find no room beside them. A late request's turn is exempt.

    A step may last until the first running decoder with an ITL target is due. Nobody is displaced.

    Example, 1 ms a token: a prompt of 100 tokens due at 500 ms ranks at 700 ms, before one of 10 due at 690 ms.
    """

    honours = ("shares", "targets")
    needs_step_times = True
    has_targets = True
    barrier_reason = WaitReason.TOKEN_BUDGET

    def __init__(self, targets: Targets = DEFAULT_TARGETS, shares: Mapping[str, Share] | None = None) -> None:
        self._targets = targets
        self._shares = shares or {}
        self._line = WaitingLine()
        self._late = WaitingLine()
        self._num_late = 0
        self._num_since_late = 0
        self._ranks: dict[int, int] = {}  # of all living requests
        self._deadlines_ns: dict[int, int] = {}  # of those that have never boarded
        self._itl_ns: dict[int, int] = {}  # of living requests with a target
        self._due_ns: dict[int, int] = {}  # when the next token of a running one of them should come
        self._prompts = Prompts()

    def on_add(self, request: Request, view: View) -> None:
        request_id = request.request_id
        if request_id not in self._ranks:
            self._arrive(request, view)
        self._due_ns.pop(request_id, None)
        self._prompts.discard(request)
        self._line.push(request, self._ranks[request_id])

    def _arrive(self, request: Request, view: View) -> None:
        request_id, share = request.request_id, self._shares.get(request.tenant, Share())
        ttft_ns = request.ttft_target_ns or share.ttft_ns or self._targets.ttft_ns
        itl_ns = request.itl_target_ns or share.itl_ns or self._targets.itl_ns
        deadline_ns = request.arrival_ns + ttft_ns
        self._deadlines_ns[request_id] = deadline_ns
        self._ranks[request_id] = deadline_ns + LENGTH_WEIGHT * prefill_ns(request.num_tokens, view)
        if itl_ns is not None:
            self._itl_ns[request_id] = itl_ns

    def on_admit(self, request: Request, view: View) -> None:
        request_id = request.request_id
        self._deadlines_ns.pop(request_id, None)
        if request in self._late:
            self._late.discard(request)
            self._num_since_late = 0
            self._ranks[request_id] += view.now_ns - request.arrival_ns
        else:
            self._line.discard(request)
            self._num_since_late += len(self._late) > 0
        if request.state is RequestState.RUNNING:  # not one that is parked behind a sibling
            self._prompts.board(request, self._ranks[request_id])

    def on_remove(self, request: Request, view: View) -> None:
        self._line.discard(request)
        self._late.discard(request)
        self._prompts.discard(request)
        for table in (self._ranks, self._deadlines_ns, self._itl_ns, self._due_ns):
            table.pop(request.request_id, None)

    def pick(self, view: View) -> Request | None:
        if not len(self._line) + len(self._late):
            return None
        itl_ns = min(map(self._itl_ns.__getitem__, self._due_ns), default=None)
        while (head := self._line.head()) is not None and self._is_late(head, itl_ns, view):
            self._line.discard(head)
            self._late.push(head, self._num_late)
            self._num_late += 1
        if len(self._late) and self._num_since_late >= LATE_TURN - 1:
            return self._late.head()
        if self._prompts.fill_a_step(itl_ns, view):
            is_urgent = head is not None and self._prompts.has_behind(self._ranks[head.request_id])
            return head if is_urgent else None
        return head or self._late.head()

    def line(self, num: int, view: View) -> list[Request]:
        """As of now: who is late already stands with the late, who would be by the time they board do not."""
        itl_ns = min(map(self._itl_ns.__getitem__, self._due_ns), default=None)
        timely, late = deque[Request](), deque(self._late.first(num))
        for request in self._line.first(num):
            (late if self._is_late(request, itl_ns, view) else timely).append(request)
        found, num_since_late = list[Request](), self._num_since_late
        while len(found) < num and (timely or late):
            is_turn_of_late = bool(late) and (not timely or num_since_late >= LATE_TURN - 1)
            found.append((late if is_turn_of_late else timely).popleft())
            num_since_late = 0 if is_turn_of_late else num_since_late + bool(late)
        return found

    def _is_late(self, request: Request, itl_ns: int | None, view: View) -> bool:
        deadline_ns = self._deadlines_ns.get(request.request_id)
        if deadline_ns is None:
            return False
        rank, left_ns = self._ranks[request.request_id], deadline_ns - view.now_ns
        if self._prompts.first_token_in_ns(request.num_tokens, rank, itl_ns, view) <= left_ns:
            return False
        num_tokens = request.num_tokens - view.num_matched_tokens(request)
        return self._prompts.first_token_in_ns(num_tokens, rank, itl_ns, view) > left_ns

    def passed_over(self, head: Request) -> Iterator[tuple[Request, WaitReason]]:
        first = self._late.head()
        if first is not None and first is not head:
            yield first, WaitReason.LATE

    def keep_key(self, request: Request, view: View) -> tuple[int, ...]:
        return (self._ranks[request.request_id], request.request_id)

    def charge(self, request: Request, num_prefill: int, num_decode: int, now_ns: int) -> None:
        if not num_decode:
            return
        self._prompts.discard(request)
        itl_ns = self._itl_ns.get(request.request_id)
        if itl_ns is not None and request.state is RequestState.RUNNING:
            self._due_ns[request.request_id] = now_ns + itl_ns

    def step_target_ns(self, view: View) -> int | None:
        return max(1, min(self._due_ns.values()) - view.now_ns) if self._due_ns else None
