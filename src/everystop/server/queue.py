"""Who waits for a place to run, how much room is left for more, and when there will be some. Asyncio thread only, but
for `receive` and what says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from everystop.core.errors import RequestError
from everystop.core.events import AdmitEvent, Event, PreemptEvent, StepEvent
from everystop.server.errors import Overloaded
from everystop.server.service_rate import ServiceRate
from everystop.server.tenant_queue import TenantLimits, TenantQueues

RATIO_WINDOW_BYTES = 1 << 18
FIRST_BYTES, FIRST_TOKENS = 4096, 1024  # what a body's bytes hold of tokens before any has been counted


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The most that may wait without a place to run: sequences, and the tokens of their prompts; and sequences of
    single tenants.
    """

    max_num_reqs: int
    max_num_tokens: int
    by_tenant: Mapping[str, TenantLimits] = field(default_factory=dict)


class TokensInBytes:
    """Guesses the tokens in a body that nobody has read yet, by those that were counted in the last ones."""

    def __init__(self) -> None:
        self._num_bytes = float(FIRST_BYTES)
        self._num_tokens = float(FIRST_TOKENS)

    def note(self, num_bytes: int, num_tokens: int) -> None:
        """That many tokens were in a body of that length."""
        self._num_bytes += num_bytes
        self._num_tokens += num_tokens
        if self._num_bytes > RATIO_WINDOW_BYTES:
            self._num_bytes /= 2
            self._num_tokens /= 2

    def guess(self, num_bytes: int) -> int:
        """At least 1."""
        return max(1, int(num_bytes * self._num_tokens / self._num_bytes))


class QueueAccount:
    """The edge's account of the sequences that have been handed to the engine, and which of them wait for a place.

    It enters a sequence before the engine hears of it and forgets it as soon as its client is gone, so it counts
    what waits in the engine, what is on its way there, and what is being prepared for it. Who boards and who is
    preempted it hears from the engine's events, at its own time. Of the choices of one prompt the first counts for
    the prompt's tokens, the others for one each: they share what it computes.

    A newcomer for whom a place is free is taken whatever waits in the accounts: it does not queue. Places count as free
    unless somebody was left waiting by the last step, which then lacked something other than places.
    """

    def __init__(self, limits: QueueLimits, num_places: int) -> None:
        self.limits = limits
        self._num_places = num_places
        self._held: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        self._num_tokens = 0
        self._num_reserved = 0
        self._num_reserved_tokens = 0
        self._is_held_up = False
        self._inbox: deque[list[Event]] = deque()
        self._rate = ServiceRate()
        self._ratio = TokensInBytes()
        self.tenants = TenantQueues(limits.by_tenant, num_places)
        self._seen_ns = 0

    @property
    def num_reqs(self) -> int:
        """Sequences that wait, or are being prepared."""
        return len(self._waiting) + self._num_reserved

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of those that wait, and a guess for those that are being prepared."""
        return self._num_tokens + self._num_reserved_tokens

    @property
    def num_held(self) -> int:
        """Sequences that the engine has, or is about to get."""
        return len(self._held)

    @property
    def max_num_held(self) -> int:
        """The most that can run and wait."""
        return self._num_places + self.limits.max_num_reqs

    def receive(self, events: list[Event]) -> None:
        """The events of one turn of the engine, which are looked at later; any thread."""
        self._inbox.append(events)

    def catch_up(self) -> None:
        """Take in what has been received."""
        while self._inbox:
            for event in self._inbox.popleft():
                if isinstance(event, StepEvent):
                    self._is_held_up = event.num_waiting > 0
                elif isinstance(event, AdmitEvent):
                    self._board(event)
                elif isinstance(event, PreemptEvent):
                    self._wait_again(event)
        if not self._waiting:
            self._is_held_up = False

    def enter(self, sizes: Mapping[int, int], now_ns: int, tenant: str = "") -> None:
        """These sequences, with the tokens that each stands for, are handed to the engine in this turn of the loop."""
        self._held.update(sizes)
        self.tenants.enter(tenant, sizes, now_ns)
        for request_id, num_tokens in sizes.items():
            self._wait(request_id, num_tokens, now_ns)

    def leave(self, request_ids: Iterable[int]) -> None:
        """These have ended, or nobody wants them any more; unknown ones are passed over."""
        for request_id in request_ids:
            self._held.pop(request_id, None)
            self._num_tokens -= self._waiting.pop(request_id, 0)
            self.tenants.leave(request_id)
        if not self._waiting:
            self._is_held_up = False

    @contextmanager
    def reserved(self, num_bytes: int) -> Iterator[None]:
        """Count one sequence, and what its body may hold, while it is being prepared."""
        num_tokens = self._guess(num_bytes)
        self._num_reserved += 1
        self._num_reserved_tokens += num_tokens
        try:
            yield
        finally:
            self._num_reserved -= 1
            self._num_reserved_tokens -= num_tokens

    def note_counted(self, num_bytes: int, num_tokens: int) -> None:
        """A body has been read: that many tokens were in it."""
        self._ratio.note(num_bytes, num_tokens)

    def check_bytes(self, num_bytes: int, now_ns: int) -> None:
        """Raise Overloaded where a body of that length, of which no more is known, has no place in the queue."""
        self.catch_up()
        self._pass_time(now_ns)
        self._check_room(1, self._guess(num_bytes))

    def check_num(self, num_reqs: int, *, num_reserved: int = 0) -> None:
        """Raise RequestError for more sequences than may ever run and wait, and Overloaded for more than there is room
        for, beside what is reserved for them; any thread.
        """
        if num_reqs > self.max_num_held:
            raise RequestError(
                f"{num_reqs:,} sequences are asked for at once, but at most {self.max_num_held:,} may run and wait "
                f"(--max-num-seqs {self._num_places:,} + --max-num-queued-reqs {self.limits.max_num_reqs:,}); "
                "send fewer in a request, or lower n",
                param="n",
                code="too_many_sequences",
            )
        if num_reqs - num_reserved > self._room_for_reqs():
            raise self._full(num_reqs, 1)

    def check_tenant(self, tenant: str, n: int, num_prompts: int, now_ns: int) -> None:
        """Raise TooManyChoices and Overloaded for n choices of each of so many prompts which are beyond what the
        tenant may have waiting, as far as that is known here; any thread.
        """
        self.tenants.check(tenant, n, num_prompts, len(self._held) - len(self._waiting), now_ns)

    def check(self, num_reqs: int, num_tokens: int, now_ns: int) -> None:
        """As `check_num`, and the same for the tokens of all prompts, which are counted now."""
        self.catch_up()
        self._pass_time(now_ns)
        self.check_num(num_reqs)
        if num_reqs > self._num_places and num_tokens > self.limits.max_num_tokens:
            raise RequestError(
                f"the prompts have {num_tokens:,} tokens, but at most {self.limits.max_num_tokens:,} may wait "
                "(--max-num-queued-tokens); send fewer prompts in a request",
                param="prompt",
                code="too_many_tokens",
            )
        self._check_room(num_reqs, num_tokens)

    def _guess(self, num_bytes: int) -> int:
        """Never more than may wait at all: a guess must not keep anybody out for ever."""
        return min(self._ratio.guess(num_bytes), self.limits.max_num_tokens)

    def _num_free(self) -> int:
        """Places that whoever waits can be expected to take in the next step."""
        num_on_board = len(self._held) - len(self._waiting)
        return 0 if self._is_held_up else max(0, self._num_places - num_on_board)

    def _room_for_reqs(self) -> int:
        return self.limits.max_num_reqs + self._num_free() - self.num_reqs

    def _check_room(self, num_reqs: int, num_tokens: int) -> None:
        if self.num_reqs + num_reqs <= self._num_free():
            return
        room = self.limits.max_num_tokens - self.num_tokens
        if num_reqs > self._room_for_reqs() or num_tokens > room:
            raise self._full(num_reqs, num_tokens)

    def _full(self, num_reqs: int, num_tokens: int) -> Overloaded:
        limits, seconds = self.limits, self._rate.seconds_for(self.num_tokens)
        rate, num_free = self._rate.tokens_per_s, min(self._num_free(), self.num_reqs)
        beside = f", beside {num_free:,} for whom places are free," if num_free else ""
        return Overloaded(
            f"the queue is full: waiting {self.num_reqs - num_free:,} of at most {limits.max_num_reqs:,} requests "
            f"(--max-num-queued-reqs){beside} with {self.num_tokens:,} of at most {limits.max_num_tokens:,} prompt "
            f"tokens (--max-num-queued-tokens), so {num_reqs:,} more with about {num_tokens:,} cannot be taken; lately "
            f"{rate:,.0f} prompt tokens a second have got a place to run; try again in {seconds:,} s",
            retry_after_s=seconds,
        )

    def _wait(self, request_id: int, num_tokens: int, now_ns: int) -> None:
        self._pass_time(now_ns)
        self._waiting[request_id] = num_tokens
        self._num_tokens += num_tokens

    def _board(self, event: AdmitEvent) -> None:
        if event.request_id in self._waiting:
            self._pass_time(event.now_ns)
            num_tokens = self._waiting.pop(event.request_id)
            self._num_tokens -= num_tokens
            self._rate.board(num_tokens)
            self.tenants.board(event.request_id, event.now_ns)

    def _wait_again(self, event: PreemptEvent) -> None:
        num_tokens = self._held.get(event.request_id)
        if num_tokens is not None and event.request_id not in self._waiting:
            self._wait(event.request_id, num_tokens, event.now_ns)
            self.tenants.wait_again(event.request_id, event.now_ns)

    def _pass_time(self, now_ns: int) -> None:
        """Time passes for those who wait; called before anybody joins or leaves them. Events come late, so it may seem
        to go back.
        """
        if now_ns > self._seen_ns:
            if self._waiting:
                self._rate.wait(now_ns - self._seen_ns)
            self._seen_ns = now_ns
