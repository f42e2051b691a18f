"""How a reader is told of steps, requests and decisions.

A reader who may not see a request gets it without name, lengths and arrival, under an id of this reader alone; that it
takes part in steps, and with how many tokens, is no secret from those who share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from everystop.observe.block_map import NOBODY
from everystop.observe.decision_log import Decision, sentence
from everystop.observe.live_request import LiveRequest
from everystop.observe.wording import NameOf, number_name

FIRST_STRANGER = -2
_NOT_OF_STRANGERS = dict.fromkeys(
    (
        "num_prompt_tokens",
        "num_cached_tokens",
        "num_output_tokens",
        "arrival_ns",
        "finish_reason",
        "num_preemptions",
        "max_gap_ns",
        "blame",
    )
)


class Strangers:
    """Which ids a reader may see: real ones for what it sees, else numbers from -2 downwards that mean nothing."""

    def __init__(self, name_of: NameOf) -> None:
        self._name_of = name_of
        self._shown: dict[int, tuple[int, str | None]] = {}
        self._next = FIRST_STRANGER

    def name(self, request_id: int) -> str | None:
        """Its name; None for a stranger."""
        return self._look(request_id)[1]

    def sees(self, request_id: int) -> bool:
        """It is none."""
        return self._look(request_id)[1] is not None

    def number(self, request_id: int) -> str | None:
        """What a sentence calls it, by its number; None for a stranger."""
        return number_name(request_id) if self.sees(request_id) else None

    def id(self, request_id: int) -> int:
        """The id to show; -1 stands for nobody."""
        return NOBODY if request_id < 0 else self._look(request_id)[0]

    def forget(self, num: int, is_needed: Callable[[int], bool]) -> None:
        """Where more than `num` are known, keep those that are needed."""
        if len(self._shown) > num:
            self._shown = {request_id: shown for request_id, shown in self._shown.items() if is_needed(request_id)}

    def _look(self, request_id: int) -> tuple[int, str | None]:
        shown = self._shown.get(request_id)
        if shown is None:
            name = self._name_of(request_id)
            shown = (request_id, name) if name is not None else (self._next, None)
            self._next -= name is None
            self._shown[request_id] = shown
        return shown


class Teller:
    """Puts into a message what one reader may see; with `sees_all` there is no stranger."""

    def __init__(self, strangers: Strangers, *, sees_all: bool) -> None:
        self._strangers = strangers
        self._sees_all = sees_all

    def steps(self, steps: list[list[object]]) -> list[list[object]]:
        """Steps, as they are sent."""
        return steps if self._sees_all else [self._redacted(step) for step in steps]

    def _redacted(self, step: list[object]) -> list[object]:
        rows = step[-1]
        assert isinstance(rows, list)
        rows = rows.copy()
        rows[1::4] = map(self._strangers.id, rows[1::4])
        return [*step[:-1], rows]

    def request(self, request: LiveRequest) -> dict[str, Any]:
        """A request, as it stands."""
        request_id = request.request_id
        name = self._strangers.name(request_id)
        shown = {
            "id": self._strangers.id(request_id),
            "name": name,
            "state": request.state,
            "slot": request.slot,
            "admit_ns": request.admit_ns,
            "first_token_ns": request.first_token_ns,
            "finish_ns": request.finish_ns,
        }
        if name is None:
            if request.finish_ns is not None:
                shown["state"] = "finished"  # how it ended is its own affair
            return shown | _NOT_OF_STRANGERS
        return shown | {
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_cached_tokens": request.num_cached_tokens,
            "num_output_tokens": request.num_output_tokens,
            "arrival_ns": request.received_ns,
            "finish_reason": request.finish_reason,
            "num_preemptions": request.num_preemptions,
            "max_gap_ns": request.max_gap_ns,
            "blame": request.blame or request.guessed_blame,
        }

    def acts(self, decisions: Iterable[Decision]) -> list[tuple[int, int, str]]:
        """When each was, its step, and what it says."""
        number = self._strangers.number
        return [(one.now_ns, one.step_id, sentence(one, number)) for one in decisions]
