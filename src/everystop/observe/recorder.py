"""Writes every call of a scheduler to a file, so that the run can be replayed; knows nothing of models or clients.

A record is gzip-compressed JSON, one array or object a line:

    {"everystop_record": 1, "limits": {...}, "kv": {...}, "step_times": {...}, "policy": "continuous",
     and the fields of PolicySettings: "batch_wait_ns": 0, ..., "shares": {tenant's number: {...}, ...}}
    ["add", now_ns, request_id, group_id, choice_index, num_prompt_tokens, max_tokens, min_tokens, n, num_stop_ids,
            tenant, priority, and if it has targets of its own: ttft_target_ns, itl_target_ns]
    ["refuse", ... the same ...]
    ["abort", now_ns, request_id]
    ["schedule", now_ns, num_rows, num_tokens, fingerprint of the plan]
    ["update", now_ns, execute_ns, rows, request_ids whose stop string was found]
    ["keys", request_id, [block keys]]

In an update, `rows` runs parallel to the rows of the oldest plan that has not come back: the number of tokens sampled,
or [number, index of each that is a stop token ...], or the code of a failure. Keys stand after their request's calls:
they are complete when it ends, and hashed again with a salt of this record alone. Tenants are numbered: those
with a share of their own first, in the order of `shares`, then the others in order of appearance. There are no token
ids and no text.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import secrets
import threading
from collections.abc import Iterable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from everystop.core.plan import StepPlan, StepResult
from everystop.core.policy import PolicySettings
from everystop.core.recording import RECORD_VERSION
from everystop.core.request import Request

log = logging.getLogger("everystop.recorder")

CALLS_PER_BATCH = 256
KEY_DIGITS = 32


class Recorder:
    """A listener of one scheduler's calls; formats and writes them on a thread of its own.

    A call costs the caller one tuple and one append. Calls reach the file in batches of 256, the last of them at
    `close`. A file that cannot be written ends the record with a warning, never the run.
    """

    def __init__(self, path: Path, policy: str, settings: PolicySettings) -> None:
        self._file = gzip.open(path, "wt", compresslevel=4, encoding="ascii")  # noqa: SIM115 (closed by the thread)
        self._path = path
        self._header = {"everystop_record": RECORD_VERSION, "policy": policy, **settings.numbered().as_data()}
        self._calls: list[tuple[Any, ...]] = []
        self._batches: SimpleQueue[list[tuple[Any, ...]] | None] = SimpleQueue()
        self._formatter = _Formatter(secrets.token_bytes(16), settings.shares)
        self._thread = threading.Thread(target=self._write_batches, name="everystop-recorder", daemon=True)
        self._thread.start()

    # Called by the scheduler.

    def started(self, settings: dict[str, dict[str, Any]]) -> None:
        """Write the header."""
        self._note("header", self._header | settings)

    def added(self, request: Request, now_ns: int) -> None:
        """A request arrives."""
        self._note("add", now_ns, request)

    def refused(self, request: Request, now_ns: int) -> None:
        """A request arrives in vain."""
        self._note("refuse", now_ns, request)

    def aborted(self, request_id: int, now_ns: int) -> None:
        """A client is gone."""
        self._note("abort", now_ns, request_id)

    def scheduled(self, plan: StepPlan, now_ns: int) -> None:
        """A plan is made."""
        self._note("schedule", now_ns, plan)

    def updated(self, plan: StepPlan, result: StepResult, now_ns: int, ended: list[int]) -> None:
        """A result is back, and these requests have ended since the last one."""
        self._note("update", now_ns, plan, result, ended)

    def close(self) -> None:
        """Write what is left and close the file."""
        self._batches.put(self._calls)
        self._calls = []
        self._batches.put(None)
        self._thread.join()

    def _note(self, *call: Any) -> None:
        self._calls.append(call)
        if len(self._calls) >= CALLS_PER_BATCH:
            self._batches.put(self._calls)
            self._calls = []

    # On the writing thread.

    def _write_batches(self) -> None:
        try:
            with self._file:
                while (batch := self._batches.get()) is not None:
                    self._write(line for call in batch for line in self._formatter.lines(call))
                self._write(self._formatter.last_lines())
        except OSError as error:
            log.warning("the record %s ends here: %s", self._path, error)
            while self._batches.get() is not None:
                pass  # the run goes on, unrecorded

    def _write(self, lines: Iterable[Any]) -> None:
        for line in lines:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()


class _Formatter:
    """Turns calls into lines; remembers the requests that have not ended, for their stop ids and keys.

    It runs behind the scheduler, so it reads of a request only what stands still: what it arrived with, and, once the
    calls say that it has ended, its keys.
    """

    def __init__(self, salt: bytes, tenants: Iterable[str]) -> None:
        self._salt = salt
        self._requests: dict[int, Request] = {}
        self._tenants = {tenant: number for number, tenant in enumerate(tenants)}

    def lines(self, call: tuple[Any, ...]) -> list[Any]:
        """The lines of one call; the keys of requests that have ended follow it."""
        kind, *arguments = call
        if kind == "header":
            return arguments
        if kind in ("add", "refuse"):
            return [self._add(kind, *arguments)]
        if kind == "abort":
            return [list(call), *self._keys_of(arguments[1:])]
        if kind == "schedule":
            now_ns, plan = arguments
            return [[kind, now_ns, len(plan.rows), plan.num_tokens, plan.fingerprint()]]
        now_ns, plan, result, ended = arguments
        return [self._update(now_ns, plan, result), *self._keys_of(ended)]

    def last_lines(self) -> list[Any]:
        """The keys of requests that are still at work."""
        return self._keys_of(list(self._requests))

    def _add(self, kind: str, now_ns: int, request: Request) -> list[Any]:
        if kind == "add":
            self._requests[request.request_id] = request
        params = request.params
        targets = [request.ttft_target_ns, request.itl_target_ns]
        return [
            kind,
            now_ns,
            request.request_id,
            request.group_id,
            request.choice_index,
            request.num_prompt_tokens,
            params.max_tokens,
            params.min_tokens,
            params.n,
            len(request.stop_ids),
            self._tenants.setdefault(request.tenant, len(self._tenants)),
            request.priority,
            *(targets if targets != [None, None] else ()),
        ]

    def _update(self, now_ns: int, plan: StepPlan, result: StepResult) -> list[Any]:
        rows = [
            tokens if isinstance(tokens, str) else self._count(request_id, tokens)
            for request_id, tokens in zip(plan.rows.request_ids, result.rows, strict=True)
        ]
        return ["update", now_ns, result.execute_ns, rows, list(result.stopped)]

    def _count(self, request_id: int, tokens: tuple[int, ...]) -> int | list[int]:
        """How many tokens a row brought, and which of them are stop tokens (of a request that has not ended)."""
        request = self._requests.get(request_id)
        stops = [i for i, token in enumerate(tokens) if request is not None and token in request.stop_ids]
        return [len(tokens), *stops] if stops else len(tokens)

    def _keys_of(self, request_ids: list[int]) -> list[Any]:
        ended = [request for i in request_ids if (request := self._requests.pop(i, None)) is not None]
        return [["keys", request.request_id, [self._hash(key) for key in request.block_keys]] for request in ended]

    def _hash(self, key: bytes) -> str:
        return hashlib.sha256(self._salt + key).hexdigest()[:KEY_DIGITS]
