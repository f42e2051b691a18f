"""The contract between the scheduler and a policy: what one may see, what it is asked, what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from everystop.core.events import WaitReason
from everystop.core.request import Request
from everystop.core.step_time import UNKNOWN_STEP_TIMES, StepTimeModel

AGEING_NS = 10_000_000_000


class Wait(NamedTuple):
    """Nobody boards before `until_ns`, unless something happens meanwhile; `reason` is why those who wait do."""

    until_ns: int
    reason: WaitReason = WaitReason.BATCH_FILL


class SlotUse(Enum):
    """What a finished request does with its slot until the policy says that the batch has ended."""

    FREE = "free"
    HELD = "held"
    PADDED = "padded"


def _no_tokens(request: Request) -> int:
    return 0


@dataclass(slots=True)
class View:
    """What a policy may see: the time and counts, as of this step, the limits, the size of the KV cache, and what is
    known of step times.

    `num_matched_tokens(request)` is the length of the request's longest prefix that the cache holds now, in tokens;
    asking pins nothing, and takes time in proportion to the request's blocks.
    `num_private_tokens(request)` is how many tokens of a running request only its own blocks hold: what it would have
    to compute again if it lost them; this takes as long.
    """

    now_ns: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_num_prefill_tokens: int | None = None
    target_itl_ns: int | None = None
    num_running: int = 0
    num_waiting: int = 0
    num_held: int = 0
    step_times: StepTimeModel = UNKNOWN_STEP_TIMES
    num_blocks: int = 0
    block_size: int = 1
    num_matched_tokens: Callable[[Request], int] = _no_tokens
    num_private_tokens: Callable[[Request], int] = _no_tokens


class Policy:
    """Owns its order over waiting requests and nothing else; keeps the oldest longest, unless overridden.

    `on_add` is called when a request starts to wait: at arrival, after a preemption, and when a fork's source is ready.
    `on_admit` ends its waiting, `on_remove` its life: finished or aborted in any state. Of one that `add` refuses
    only `check_add` hears. With `may_displace`, the `claimant` (where no slot is free) or who is picked (where blocks
    are short) costs the tail of the keep order its place, if `displaces` says so and that one's key is greater.
    `barrier_reason` says why others wait when `pick` returns None.

    `honours` names the fields of `PolicySettings` that have an effect. `needs_step_times` asks for measured ones in the
    view. What a tenant may use counts with `has_shares`, times that a tenant or request is promised with `has_targets`,
    and the priority of a request with `has_priorities`.

    A request that was preempted `max_preemptions` times boards and keeps its place before all others, in order of
    arrival, whatever `pick` and `keep_key` say. So everyone ends even where keys change over time. Only a claimant goes
    before it, in a slot that was taken from the tail for its sake: nobody else would have had that one.
    """

    honours: tuple[str, ...] = ()
    needs_step_times: bool = False
    has_shares: bool = False
    has_targets: bool = False
    has_priorities: bool = False
    may_displace: bool = False
    slot_use: SlotUse = SlotUse.FREE
    barrier_reason: WaitReason = WaitReason.BATCH_BARRIER

    def check_add(self, request: Request, view: View) -> None:
        """Raise RequestError to refuse a request before it is taken; notes nothing.

        Asked with the first of the n choices of a client's request, for all of them (`params.n`); where that one was
        refused, with the others too, so the answer must not depend on which it is.
        """

    def on_add(self, request: Request, view: View) -> None:
        """Note that the request waits."""
        raise NotImplementedError

    def on_admit(self, request: Request, view: View) -> None:
        """Note that the request, which `pick` or too many preemptions had named, has boarded, or is parked behind a
        sibling.
        """
        raise NotImplementedError

    def on_remove(self, request: Request, view: View) -> None:
        """Forget the request, whatever its state was."""
        raise NotImplementedError

    def pick(self, view: View) -> Request | Wait | None:
        """Who boards next; None lets nobody board in this step and is forbidden while nothing runs."""
        raise NotImplementedError

    def line(self, num: int, view: View) -> list[Request]:
        """The first `num` of those who wait, in the order in which they would board if places came free one after the
        other and nothing else happened; changes nothing, and is asked only by those who watch.
        """
        raise NotImplementedError

    def keep_key(self, request: Request, view: View) -> tuple[int, ...]:
        """Smaller keeps slot and blocks longer; must end in `request_id` so that it is unique. It may change between
        steps, never within one: of a running request it is asked once a step.
        """
        return (request.request_id,)

    def may_return(self, request: Request, view: View) -> bool:
        """One preempted `max_preemptions` times may board ahead of all others; False while a limit of its own forbids
        it to board at all.
        """
        return True

    def claimant(self, view: View) -> Request | None:
        """Who may take a running request's place, as no slot is free, or the slot that somebody has lost to one who
        could not board yet; asked only with `may_displace`.
        """
        picked = self.pick(view)
        return picked if isinstance(picked, Request) else None

    def displaces(self, picked: Request, tail: Request, view: View) -> bool:
        """Whether `picked`, whose key is smaller than the tail's, takes its place; asked only with `may_displace`."""
        return True

    def charge(self, request: Request, num_prefill: int, num_decode: int, now_ns: int) -> None:
        """Account for computed tokens, at each update; the request may have lost its place since they were planned."""

    def passed_over(self, head: Request) -> Iterable[tuple[Request, WaitReason]]:
        """Requests that wait for a reason of their own while `head` is the next to board; asked when that changes."""
        return ()

    def step_target_ns(self, view: View) -> int | None:
        """How long the step being planned should take at most, as far as this policy cares; asked at every step."""
        return None

    def batch_ended(self, view: View) -> bool:
        """Held slots may be given back; asked at the start of a step while any is held."""
        return True
