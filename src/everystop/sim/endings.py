"""Where the outputs of simulated requests end."""

from __future__ import annotations

from collections.abc import Iterable

from everystop.core.events import Event, FinishEvent
from everystop.core.policy.shortest import remaining_prompt
from everystop.core.request import Request

STOP_TOKEN = -1  # a request's last token; all others are its id, so that nothing is taken for another's


class Endings:
    """Where the output of each request under way ends. The replicas' runners know, their schedulers do not."""

    def __init__(self) -> None:
        self._num_tokens: dict[int, int] = {}  # by request: prompt and output, when it ends

    def expect(self, request_id: int, num_tokens: int) -> None:
        """This request ends when it has so many tokens, its prompt included."""
        self._num_tokens[request_id] = num_tokens

    def token_of(self, request_id: int, num_tokens: int) -> int:
        """What a request of so many tokens samples: its id, or at the end the stop token."""
        return STOP_TOKEN if self._num_tokens.get(request_id) == num_tokens + 1 else request_id

    def num_left(self, request: Request) -> int:
        """Tokens of it that are still to be computed or generated, as only the trace knows."""
        return remaining_prompt(request) + self._num_tokens[request.request_id] - request.num_tokens

    def note(self, events: Iterable[Event]) -> None:
        """Forget those who have ended."""
        for event in events:
            if isinstance(event, FinishEvent):
                self.forget(event.request_id)

    def forget(self, request_id: int) -> None:
        """It is no longer under way."""
        del self._num_tokens[request_id]
