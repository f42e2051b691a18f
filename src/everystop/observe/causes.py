"""What a request's time can have gone to: one list, in the order in which it is shown, with a label for each."""

from __future__ import annotations

from enum import StrEnum

from everystop.core.events import WaitReason


class Cause(StrEnum):
    """One cause of a stretch of a request's life; those of waiting begin with `queue.` and the reason's own word."""

    RECEIVE = "receive"
    STEP_RUNNING = "queue.step_running"
    NO_SLOT = "queue.no_slot"
    NO_BLOCKS = "queue.no_blocks"
    TOKEN_BUDGET = "queue.token_budget"
    BATCH_BARRIER = "queue.batch_barrier"
    BATCH_FILL = "queue.batch_fill"
    AFTER_PREEMPT = "queue.after_preempt"
    TENANT_LIMIT = "queue.tenant_limit"
    OVER_SHARE = "queue.over_share"
    LATE = "queue.late"
    FORK = "queue.fork"
    PREFILL = "prefill"
    DECODE = "decode"
    OTHERS_PREFILL = "others_prefill"
    SAMPLING = "sampling"
    SKIPPED = "skipped"
    PREEMPTED = "preempted"
    HOST = "host"
    DELIVERY = "delivery"
    UNATTRIBUTED = "unattributed"

    @classmethod
    def of_wait(cls, reason: WaitReason) -> Cause:
        """The cause of time that passed while a request, or the one ahead of it, waited for this reason."""
        return cls(f"queue.{reason.value}")

    @property
    def label(self) -> str:
        """In a few words, for a legend."""
        return LABELS[self]

    @property
    def is_queue(self) -> bool:
        """The request had not boarded yet."""
        return self.value.startswith("queue.")

    @property
    def is_modelled(self) -> bool:
        """Divided off by the step-time model, not measured."""
        return self is Cause.OTHERS_PREFILL


LABELS = {
    Cause.RECEIVE: "received and tokenised",
    Cause.STEP_RUNNING: "queued: a step was running",
    Cause.NO_SLOT: "queued: no free slot",
    Cause.NO_BLOCKS: "queued: too few free KV blocks",
    Cause.TOKEN_BUDGET: "queued: no tokens left in the step",
    Cause.BATCH_BARRIER: "queued: the batch had not ended",
    Cause.BATCH_FILL: "queued: the batch was filling",
    Cause.AFTER_PREEMPT: "queued: somebody had just lost a place",
    Cause.TENANT_LIMIT: "queued: its tenant was at a limit",
    Cause.OVER_SHARE: "queued: its tenant was above its share",
    Cause.LATE: "queued: late, behind those still on time",
    Cause.FORK: "queued: its sibling computed the prompt",
    Cause.PREFILL: "own prefill",
    Cause.DECODE: "decode",
    Cause.OTHERS_PREFILL: "others' prefill in its steps",
    Cause.SAMPLING: "sampling",
    Cause.SKIPPED: "on board, left out of steps",
    Cause.PREEMPTED: "preempted, until caught up",
    Cause.HOST: "scheduling and hand-over",
    Cause.DELIVERY: "detokenised and delivered",
    Cause.UNATTRIBUTED: "not known any more",
}

ORDER = {cause: place for place, cause in enumerate(Cause)}
