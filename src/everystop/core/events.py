"""The one event schema: everything that is shown (metrics, records, pictures, explanations) is a view of these tuples.

All times are integer nanoseconds of the engine's monotonic clock. Appending an event is one tuple append; formatting
happens elsewhere.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from everystop.core.plan import StepPlan
from everystop.core.request import FinishReason, Request


class WaitReason(StrEnum):
    """Why a request is not running."""

    NO_SLOT = "no_slot"
    NO_BLOCKS = "no_blocks"
    TOKEN_BUDGET = "token_budget"
    BATCH_BARRIER = "batch_barrier"
    BATCH_FILL = "batch_fill"
    AFTER_PREEMPT = "after_preempt"
    TENANT_LIMIT = "tenant_limit"
    OVER_SHARE = "over_share"
    LATE = "late"
    FORK = "fork"
    BEHIND = "behind"


class ArrivalEvent(NamedTuple):
    """`Scheduler.add` took a request."""

    now_ns: int
    request_id: int
    group_id: int
    choice_index: int
    num_prompt_tokens: int
    max_tokens: int
    tenant: str
    priority: int

    @classmethod
    def of(cls, request: Request, now_ns: int) -> ArrivalEvent:
        """The arrival of this request."""
        return cls(
            now_ns,
            request.request_id,
            request.group_id,
            request.choice_index,
            request.num_prompt_tokens,
            request.max_tokens,
            request.tenant,
            request.priority,
        )


class RefuseEvent(NamedTuple):
    """`Scheduler.add` refused a request; `code` is the error's class name."""

    now_ns: int
    request_id: int
    code: str
    tenant: str = ""


class AdmitEvent(NamedTuple):
    """A request boarded; `num_cached_tokens` came from the prefix cache, `forked_from` is a sibling's id or -1.

    One that `resumed` after a preemption mostly finds its own blocks there: these are no prefix hits.
    """

    now_ns: int
    step_id: int
    request_id: int
    slot: int
    num_tokens: int
    num_cached_tokens: int
    resumed: bool
    forked_from: int


class PreemptEvent(NamedTuple):
    """A request lost slot and blocks; `num_lost_tokens` were computed and must be computed or matched again."""

    now_ns: int
    step_id: int
    request_id: int
    slot: int
    num_lost_tokens: int


class WaitEvent(NamedTuple):
    """The reason why a request waits has changed. `need` and `have` are blocks for `no_blocks`, where need may include
    what the running are expected to grow by; `behind` is the id of the one ahead.

    The head of the queue gets its own reason, and so do those that the policy passes over for its sake
    (`tenant_limit`, `over_share`, `late`); the event with reason `behind` and request_id -1 stands for all others.
    """

    now_ns: int
    request_id: int
    reason: WaitReason
    need: int
    have: int
    behind: int


class StepEvent(NamedTuple):
    """A step was executed and taken back: its plan, the tokens accepted, the state after it, its durations.

    A step planned by time has a `target_ns`, and a `predicted_ns` that is above it where the target is out of reach;
    others have 0 for both. Of the tokens computed, `num_recomputed_tokens` had been there before a preemption. Of
    `execute_ns`, `sample_ns` went to sampling, as far as the runner knows.
    """

    now_ns: int
    scheduled_ns: int
    execute_ns: int
    plan: StepPlan
    tokens: tuple[tuple[int, ...], ...]
    num_running: int
    num_waiting: int
    num_held: int
    num_free_blocks: int
    num_cached_blocks: int
    num_evicted_blocks: int
    num_wasted_rows: int
    target_ns: int = 0
    predicted_ns: int = 0
    num_recomputed_tokens: int = 0
    sample_ns: int = 0


class FinishEvent(NamedTuple):
    """The one terminal event of a request that was taken.

    `step_id` is the step that brought the end, for an abort the last one planned. `detail` says what ended it: the id
    of a stop token, a stop string, the code of a failure, or `NO_TOKEN_LEFT`.
    """

    now_ns: int
    step_id: int
    request_id: int
    slot: int
    reason: FinishReason
    detail: str | int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int

    @classmethod
    def of(
        cls, request: Request, now_ns: int, step_id: int, slot: int, reason: FinishReason, detail: str | int
    ) -> FinishEvent:
        """The end of this request, in its last slot."""
        return cls(
            now_ns,
            step_id,
            request.request_id,
            slot,
            reason,
            detail,
            request.num_prompt_tokens,
            request.num_output_tokens,
            request.num_cached_tokens,
            request.num_preemptions,
        )


class BlockEvent(NamedTuple):
    """Who holds the blocks of the KV cache at this moment, after the planning of step `step_id`; made only when
    somebody asks, since it takes time in proportion to the blocks.

    `ref_counts` has an entry a block; `cached` are those that nobody holds and a prefix can still match, in no order;
    `tables` are (request id, block table) of those on board, in the order of boarding. Blocks that a step on its way
    keeps for a request that has left are in no table.
    """

    now_ns: int
    step_id: int
    ref_counts: tuple[int, ...]
    cached: tuple[int, ...]
    tables: tuple[tuple[int, tuple[int, ...]], ...]


class LineEvent(NamedTuple):
    """Who boards next if places come free one after the other and nothing else happens, after the planning of step
    `step_id`: the first of those who wait, in order; made only when somebody asks.
    """

    now_ns: int
    step_id: int
    request_ids: tuple[int, ...]


class LedgerEvent(NamedTuple):
    """What the engine's thread did since the last one, up to the end of step `step_id`, in parts that sum to all of its
    time but sleep. It comes with the step whose plan it executed; no scheduler makes one, and no record holds it.

    `schedule_ns` takes messages in and plans; `metadata_ns` is the runner's bookkeeping around the native call, which
    takes `native_ns`, and `gil_wait_ns` is the wait for the interpreter behind it; `detokenise_ns` looks for stop
    strings; `update_ns` takes the result back; `deliver_ns` makes outputs and hands them and the events over, those of
    the step before; `other_ns` is the loop itself. `native_cpu_ns` is the thread's processor time in the native call.
    """

    now_ns: int
    step_id: int
    schedule_ns: int
    metadata_ns: int
    native_ns: int
    gil_wait_ns: int
    detokenise_ns: int
    update_ns: int
    deliver_ns: int
    other_ns: int
    native_cpu_ns: int

    @property
    def whole_ns(self) -> int:
        """The sum of the parts."""
        return sum(self[2:10])


Event = (
    ArrivalEvent
    | RefuseEvent
    | AdmitEvent
    | PreemptEvent
    | WaitEvent
    | StepEvent
    | FinishEvent
    | BlockEvent
    | LineEvent
    | LedgerEvent
)
