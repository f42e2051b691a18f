"""Who keeps slot and blocks longest, and so is computed first: those preempted too often, then as the policy says."""

from __future__ import annotations

from collections.abc import Iterable

from everystop.core.policy.base import Policy, View
from everystop.core.request import Request


class KeepOrder:
    """The order in which prompts are dealt tokens, and from whose end places and blocks are taken: the same within one
    step, whatever happens in it.

    Who is dealt tokens later may rely on blocks that an earlier one fills in this very step, so it must be the first to
    go. Dealing changes what a policy may go by (what is left to compute, which blocks are shared), hence each request's
    key is asked for once a step.
    """

    def __init__(self, policy: Policy, max_preemptions: int) -> None:
        self._policy = policy
        self._max_preemptions = max_preemptions
        self._keys: dict[int, tuple[int, ...]] = {}

    def begin_step(self) -> None:
        """Keys are asked for anew."""
        self._keys.clear()

    def is_front(self, request: Request) -> bool:
        """It has been preempted too often: it boards before and keeps before all others."""
        return 0 < request.num_preemptions >= self._max_preemptions

    def key(self, request: Request, view: View) -> tuple[int, ...]:
        """Smaller keeps longer. Those at the front have an order that nothing changes, so the first of them ends."""
        key = self._keys.get(request.request_id)
        if key is None:
            key = (0, request.request_id) if self.is_front(request) else self.key_of_other(request, view)
            self._keys[request.request_id] = key
        return key

    def key_of_other(self, request: Request, view: View) -> tuple[int, ...]:
        """The key now of a request as if it were not at the front."""
        return (1, *self._policy.keep_key(request, view))

    def tail(self, requests: Iterable[Request], view: View) -> Request:
        """The last of them in this order."""
        return max(requests, key=lambda request: self.key(request, view))
