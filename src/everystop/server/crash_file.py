"""Crash files: what the scheduler did in the last minutes and where every thread stands, without what clients sent.

A crash file is JSON lines: an object that says what has happened, then the settings, the stacks, the requests that are
open, and last the events in the order of time, each a list that begins with its kind. Tenants are numbered; there is no
text, no token id and no key.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import platform
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from everystop import __version__
from everystop.core.durations import NS_PER_S
from everystop.core.events import ArrivalEvent, FinishEvent, RefuseEvent
from everystop.observe.history import Act, History, StepRecord, Trail

CRASH_VERSION = 1
EVENTS_NS = 300 * NS_PER_S
MAX_BYTES = 8 << 20
MAX_OPEN_REQUESTS = 1000
STEP_FIELDS = (
    "step_id", "scheduled_ns", "now_ns", "execute_ns", "num_running", "num_waiting", "num_held", "num_free_blocks",
    "num_cached_blocks", "num_padded_rows", "num_recomputed_tokens",
)  # fmt: skip
_NAME = re.compile(r"crash-\d{8}T\d{6}Z-\d+(-\d+)?\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What was taken in the moment: the recent events, and the requests that are not over."""

    steps: list[StepRecord] = field(default_factory=list)
    acts: list[Act] = field(default_factory=list)
    open_requests: list[Trail] = field(default_factory=list)

    @classmethod
    def of(cls, history: History, now_ns: int) -> Snapshot:
        """The last five minutes; the history must have caught up."""
        since_ns = now_ns - EVENTS_NS
        trails = [trail for trail in history.trails.values() if not trail.is_over]
        return cls(
            steps=history.steps_since_ns(since_ns),
            acts=history.acts_since_ns(since_ns),
            open_requests=trails[:MAX_OPEN_REQUESTS],
        )


class Crash(NamedTuple):
    """What has happened: one word, a sentence, and the error where there is one."""

    reason: str
    message: str
    error: str | None = None
    error_stack: tuple[str, ...] = ()


class CrashFiles:
    """Writes crash files to a folder and keeps the newest `max_files`; each has at most about 8 MiB.

    `settings` are shown in each, so they must hold no secret.
    """

    def __init__(self, folder: Path, max_files: int, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self._max_files = max_files
        self._settings = settings
        self._num_written = 0

    def write(self, crash: Crash, snapshot: Snapshot, facts: Mapping[str, Any]) -> Path | None:
        """Write one, with further `facts` of the server; None where none are kept. Raises OSError."""
        if self._max_files == 0:
            return None
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.folder / self._name()
        temporary = path.with_suffix(".tmp")
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
                file.writelines(self._lines(crash, snapshot, facts))
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        self._remove_old(path)
        return path

    def _name(self) -> str:
        self._num_written += 1
        number = f"-{self._num_written}" if self._num_written > 1 else ""
        return f"crash-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}{number}.jsonl"

    def _remove_old(self, newest: Path) -> None:
        others = sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name) and path != newest)
        for path in others[: max(0, len(others) - self._max_files + 1)]:
            with contextlib.suppress(OSError):
                path.unlink()

    def _lines(self, crash: Crash, snapshot: Snapshot, facts: Mapping[str, Any]) -> Iterator[str]:
        now_s, now_ns = time.time(), time.monotonic_ns()
        head = {
            "everystop_crash": CRASH_VERSION,
            "version": __version__,
            **{name: value for name, value in crash._asdict().items() if value},
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now_s)),
            "now_ns": now_ns,
            "pid": os.getpid(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            **facts,
        }
        yield _line(head)
        yield _line({"settings": self._settings})
        yield _line({"stacks": stacks()})
        tenants: dict[str, int] = {}
        yield _line({"open_requests": [_open_request(trail, now_ns, tenants) for trail in snapshot.open_requests]})
        yield _line({"step_fields": [*STEP_FIELDS, "rows: [request_id, start, num_tokens, num_outputs]"]})
        yield from _event_lines(snapshot, tenants)


def _event_lines(snapshot: Snapshot, tenants: dict[str, int]) -> list[str]:
    """The newest events that there is room for, in order."""
    events = heapq.merge(reversed(snapshot.acts), reversed(snapshot.steps), key=lambda event: -event.now_ns)
    lines, num_bytes, num_left_out = [], 0, 0
    for event in events:
        if num_bytes > MAX_BYTES:
            num_left_out += 1
            continue
        lines.append(_line(_step(event) if isinstance(event, StepRecord) else _act(event, tenants)))
        num_bytes += len(lines[-1])
    if num_left_out:
        lines.append(_line({"events_left_out": num_left_out}))
    return lines[::-1]


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), default=str) + "\n"


def _step(record: StepRecord) -> list[Any]:
    rows = zip(record.request_ids, record.starts, record.nums, record.num_outputs, strict=True)
    return ["step", *(getattr(record, name) for name in STEP_FIELDS), [list(row) for row in rows]]


def _act(act: Act, tenants: dict[str, int]) -> list[Any]:
    fields = act._asdict()
    if isinstance(act, ArrivalEvent | RefuseEvent):
        fields["tenant"] = _number(act.tenant, tenants)
    if isinstance(act, FinishEvent) and act.reason.value != "error":
        del fields["detail"]  # a stop string or a stop token is the client's
    return [type(act).__name__.removesuffix("Event").lower(), fields]


def _number(tenant: str, tenants: dict[str, int]) -> int:
    return tenants.setdefault(tenant, len(tenants))


def _open_request(trail: Trail, now_ns: int, tenants: dict[str, int]) -> dict[str, Any]:
    arrival = trail.arrival
    return {
        "request_id": trail.request_id,
        "age_ns": now_ns - trail.since_ns if trail.since_ns else None,
        "num_prompt_tokens": None if arrival is None else arrival.num_prompt_tokens,
        "tenant": None if arrival is None else _number(arrival.tenant, tenants),
        "is_waiting": trail.is_waiting,
        "num_admissions": len(trail.admits),
        "num_preemptions": len(trail.preemptions),
    }


def stacks() -> list[dict[str, Any]]:
    """Where each thread of this process stands, outermost call first; no values."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        {"thread": names.get(number, "?"), "frames": _frames(frame)} for number, frame in sys._current_frames().items()
    ]


def _frames(frame: FrameType) -> list[str]:
    summary: Iterable[traceback.FrameSummary] = traceback.StackSummary.extract(
        traceback.walk_stack(frame), lookup_lines=False
    )
    return [f"{one.filename}:{one.lineno} {one.name}" for one in summary][::-1]
