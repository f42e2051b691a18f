"""Static (request-level) batching, the baseline: a batch is fixed when it starts, and nobody else boards until all of
it is done.
"""

from __future__ import annotations

from everystop.core.policy.base import Policy, SlotUse, View, Wait
from everystop.core.policy.waiting import WaitingLine
from everystop.core.request import Request


class Static(Policy):
    """The best case of request-level batching: finished rows keep their slot but cost no computation, and free their
    blocks.

    When nothing runs, it waits at most `batch_wait_ns` from the first waiting request for `max_num_seqs` to gather,
    then fixes the batch in order of arrival. Members board as the token budget lets them prefill; a preempted member
    boards again at once.
    """

    honours = ("batch_wait_ns",)
    slot_use = SlotUse.HELD

    def __init__(self, batch_wait_ns: int) -> None:
        self.batch_wait_ns = batch_wait_ns
        self._line = WaitingLine()
        self._boarding = WaitingLine()
        self._members: dict[int, Request] = {}
        self._waiting_since_ns: int | None = None

    def on_add(self, request: Request, view: View) -> None:
        if request.request_id in self._members:
            self._boarding.push(request)
            return
        if not len(self._line):
            self._waiting_since_ns = view.now_ns
        self._line.push(request)

    def on_admit(self, request: Request, view: View) -> None:
        self._boarding.discard(request)

    def on_remove(self, request: Request, view: View) -> None:
        self._members.pop(request.request_id, None)
        self._boarding.discard(request)
        self._line.discard(request)

    def pick(self, view: View) -> Request | Wait | None:
        if not self._members:
            gathering_until_ns = (self._waiting_since_ns or 0) + self.batch_wait_ns
            if 0 < len(self._line) < view.max_num_seqs and view.now_ns < gathering_until_ns:
                return Wait(gathering_until_ns)
            self._fix_batch(view)
        return self._boarding.head()

    def line(self, num: int, view: View) -> list[Request]:
        boarding = self._boarding.first(num)
        return boarding + self._line.first(num - len(boarding))

    def _fix_batch(self, view: View) -> None:
        while len(self._members) < view.max_num_seqs and (request := self._line.head()) is not None:
            self._line.discard(request)
            self._members[request.request_id] = request
            self._boarding.push(request)
        # Those left behind have waited since before this batch; the next one owes them no further wait.

    def batch_ended(self, view: View) -> bool:
        return not self._members


class StaticPadded(Static):
    """The naive case: finished rows are computed until the whole batch is done, as a padded `generate()` does."""

    slot_use = SlotUse.PADDED
