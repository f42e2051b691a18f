"""Stand-in until the explanation is written: all time is unattributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from everystop.observe.history import History


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a request took so long."""

    data: dict[str, Any]
    sentence: str

    def as_data(self) -> dict[str, Any]:
        """JSON."""
        return self.data


def explain(
    history: History, request_ids: Sequence[int], *, now_ns: int, name_of: Callable[[int], str | None]
) -> Explanation:
    """Stand-in."""
    client = history.trails[request_ids[0]].client
    assert client is not None
    is_live = client.delivered_ns is None
    e2e_ns = (client.delivered_ns or now_ns) - client.received_ns
    data = {
        "id": name_of(request_ids[0]),
        "state": "running" if is_live else "over",
        "is_live": is_live,
        "e2e_ns": e2e_ns,
        "sentence": "it took a while",
        "causes": [{"cause": "stub", "ns": e2e_ns}],
        "segments": [{"cause": "stub", "start_ns": 0, "end_ns": e2e_ns}],
        "choices": [{"id": name_of(i)} for i in request_ids] if len(request_ids) > 1 else [],
        "steps": [],
    }
    return Explanation(data, "it took a while")
