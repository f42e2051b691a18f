"""Writes every call of a scheduler to a file, so that the run can be replayed, and the times of its clients; knows
nothing of models.

A record is gzip-compressed JSON, one array or object a line:

    {"everystop_record": 2, "limits": {...}, "kv": {...}, "step_times": {...}, "policy": "continuous",
     and the fields of PolicySettings: "batch_wait_ns": 0, ..., "shares": {tenant's number: {...}, ...}}
    ["add", now_ns, request_id, group_id, choice_index, num_prompt_tokens, max_tokens, min_tokens, n, num_stop_ids,
            tenant, priority, and if it has targets of its own, or has its prompt scored: ttft_target_ns, itl_target_ns,
            and if it has its prompt scored: true]
    ["refuse", ... the same ...]      by the scheduler
    ["decline", ... the same ...]     by whoever asks, before the scheduler saw it
    ["abort", now_ns, request_id]
    ["schedule", now_ns, num_rows, num_tokens, fingerprint of the plan]
    ["update", now_ns, execute_ns, rows, request_ids whose stop string was found, and if it is known: sample_ns]
    ["keys", request_id, [block keys]]
    ["client", first_request_id, num, id of the answer, received_ns, submitted_ns, first_sent_ns, delivered_ns,
               and if either says something: the id that the client gave, whether it left]

and, only if the user asked for token ids:

    ["prompt", group_id, [token ids], {fields of SamplingParams that are not the default}, [end-of-sequence ids]]
    ["output", request_id, [token ids]]

In an update, `rows` runs parallel to the rows of the oldest plan that has not come back: the number of tokens sampled,
or [number, index of each that is a stop token ...], or the code of a failure. Keys stand after their request's calls:
they are complete when it ends, and hashed again with a salt of this record alone; so do outputs. Of a request at work
they may stand there before, as far as they are known; the last ones count. Tenants are numbered:
those with a share of their own first, in the order of `shares`, then the others in order of appearance; beyond
10,000 tenants a number is a hash of the name, with that salt. A client stands where its answer was done, give or take
a second; a time that never came is null. Otherwise there are no token ids and no text.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from everystop.core.plan import StepPlan, StepResult
from everystop.core.policy import PolicySettings
from everystop.core.recording import RECORD_VERSION
from everystop.core.request import Request, SamplingParams
from everystop.observe.history import Client
from everystop.observe.record_file import open_record

log = logging.getLogger("everystop.recorder")

CALLS_PER_BATCH = 256
WRITE_S = 1.0  # what has happened reaches the file so soon
KEY_DIGITS = 32
MAX_NUMBERED_TENANTS = 10_000  # clients may name themselves, as often as they like
HASHED_TENANTS = 1 << 56  # the least number of those beyond them
_PLAIN = SamplingParams()
T = TypeVar("T")
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Recorder:
    """A listener of one scheduler's calls; formats and writes them on a thread of its own.

    A call costs the caller one tuple and one append. Calls reach the file in batches of 256 at most, after a second at
    the latest, and in the end at `close`; up to the last one the file can be read at any time. A file that cannot be
    written ends the record with a warning, never the run. `with_tokens` adds what clients asked and got, in token ids.
    """

    def __init__(self, path: Path, policy: str, settings: PolicySettings, *, with_tokens: bool = False) -> None:
        self._file = open_record(path)  # closed by the thread
        self.path = path
        self._header = {"everystop_record": RECORD_VERSION, "policy": policy, **settings.numbered().as_data()}
        self._calls: deque[tuple[Any, ...]] = deque()
        self._clients: deque[Client] = deque()
        self._flushes: deque[threading.Event] = deque()
        self._wake = threading.Event()
        self._has_begun = self._is_closed = self._has_ended = False
        self._formatter = _Formatter(secrets.token_bytes(16), settings.shares, with_tokens=with_tokens)
        self._thread = threading.Thread(target=self._run, name="everystop-recorder", daemon=True)
        self._thread.start()

    @property
    def thread_id(self) -> int | None:
        """The writing thread's, as `threading.Thread.ident`."""
        return self._thread.ident

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

    def declined(self, request: Request, now_ns: int) -> None:
        """A request is turned away before."""
        self._note("decline", now_ns, request)

    def aborted(self, request_id: int, now_ns: int) -> None:
        """A client is gone."""
        self._note("abort", now_ns, request_id)

    def scheduled(self, plan: StepPlan, now_ns: int) -> None:
        """A plan is made."""
        self._note("schedule", now_ns, plan)

    def updated(self, plan: StepPlan, result: StepResult, now_ns: int, ended: list[int]) -> None:
        """A result is back, and these requests have ended since the last one."""
        self._note("update", now_ns, plan, result, ended)

    # Called by whoever answers.

    def client(self, client: Client) -> None:
        """An answer is done, and its times are known; from any thread, and of no effect once the record is closed."""
        self._clients.append(client)

    # Called by whoever reads the file meanwhile.

    @property
    def is_open(self) -> bool:
        """What happens is written; once the file could not be, or after `close`, nothing is any more."""
        return not self._has_ended

    def flush(self, timeout_s: float) -> bool:
        """Have all in the file that has been noted until now, and the block keys of requests at work; False if that
        took longer, or nothing is written any more. From any thread.
        """
        done = threading.Event()
        self._flushes.append(done)
        self._wake.set()
        return self.is_open and done.wait(timeout_s) and self.is_open

    # Called in the end.

    def close(self) -> None:
        """Write what is left and close the file."""
        self._is_closed = True
        self._wake.set()
        self._thread.join()

    def _note(self, *call: Any) -> None:
        self._calls.append(call)
        if len(self._calls) == CALLS_PER_BATCH:  # while there are more, the thread is awake
            self._wake.set()

    # On the writing thread.

    def _run(self) -> None:
        try:
            with self._file:
                while not self._is_closed:
                    self._wake.wait(WRITE_S)
                    self._wake.clear()
                    self._write_news()
                self._write_news()
                self._write(self._formatter.last_lines())
        except Exception as error:
            if isinstance(error, OSError):
                log.warning("the record %s ends here, the run goes on: %s", self.path, error.strerror or error)
            else:
                log.error("the record %s ends here, the run goes on", self.path, exc_info=error)
        self._calls = deque(maxlen=0)  # nobody writes any more
        self._clients = deque(maxlen=0)
        self._has_ended = True
        self._answer_flushes(len(self._flushes))

    def _write_news(self) -> None:
        """All that waits. Clients who come before the header wait for it."""
        num_flushes = len(self._flushes)
        while batch := _taken(self._calls, CALLS_PER_BATCH):
            self._write(line for call in batch for line in self._formatter.lines(call))
            self._has_begun = True
            self._write_clients()
        if self._has_begun:
            self._write_clients()
        if num_flushes:
            self._write(self._formatter.keys_so_far())
            self._answer_flushes(num_flushes)

    def _answer_flushes(self, num: int) -> None:
        for done in _taken(self._flushes, num):
            done.set()

    def _write_clients(self) -> None:
        lines = []
        for client in _taken(self._clients, len(self._clients)):
            times = (client.received_ns, client.submitted_ns, client.first_sent_ns, client.delivered_ns)
            extra = (client.given_name, client.has_left) if client.given_name or client.has_left else ()
            lines.append(["client", client.first_request_id, client.num, client.name, *times, *extra])
        if lines:
            self._write(lines)

    def _write(self, lines: Iterable[Any]) -> None:
        self._file.write("".join([_encode(line) + "\n" for line in lines]))
        self._file.flush()


def _taken(waiting: deque[T], num: int) -> list[T]:
    """The first `num` at most, taken out while others go on appending."""
    return [waiting.popleft() for _ in range(min(num, len(waiting)))]


class _Formatter:
    """Turns calls into lines; remembers the requests that have not ended, for their stop ids and keys.

    It runs behind the scheduler, so it reads of a request only what stands still: what it arrived with, its keys so
    far, and, once the calls say that it has ended, all of them and its output.
    """

    def __init__(self, salt: bytes, tenants: Iterable[str], *, with_tokens: bool) -> None:
        self._salt = salt
        self._with_tokens = with_tokens
        self._requests: dict[int, Request] = {}
        self._tenants = {tenant: number for number, tenant in enumerate(tenants)}

    def lines(self, call: tuple[Any, ...]) -> list[Any]:
        """The lines of one call; the keys and outputs of requests that have ended follow it."""
        kind, *arguments = call
        if kind == "header":
            return arguments
        if kind in ("add", "refuse", "decline"):
            return [self._add(kind, *arguments), *self._prompt_of(arguments[1])]
        if kind == "abort":
            return [list(call), *self._ends_of(arguments[1:])]
        if kind == "schedule":
            now_ns, plan = arguments
            return [[kind, now_ns, len(plan.rows), plan.num_tokens, plan.fingerprint()]]
        now_ns, plan, result, ended = arguments
        return [self._update(now_ns, plan, result), *self._ends_of(ended)]

    def keys_so_far(self) -> list[Any]:
        """Of requests that are still at work; only such keys are missing as have been made this moment."""
        return [self._keys(request) for request in self._requests.values() if request.block_keys]

    def last_lines(self) -> list[Any]:
        """The keys and outputs of requests that are still at work."""
        return self._ends_of(list(self._requests))

    def _add(self, kind: str, now_ns: int, request: Request) -> list[Any]:
        if kind == "add":
            self._requests[request.request_id] = request
        params = request.params
        more: list[Any] = [request.ttft_target_ns, request.itl_target_ns]
        if params.prompt_logprobs is not None:
            more.append(True)
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
            self._number_of(request.tenant),
            request.priority,
            *(more if more != [None, None] else ()),
        ]

    def _number_of(self, tenant: str) -> int:
        """The same each time, though names are kept of `MAX_NUMBERED_TENANTS` at most, or of those with a share."""
        number = self._tenants.get(tenant)
        if number is None and len(self._tenants) < MAX_NUMBERED_TENANTS:
            number = self._tenants[tenant] = len(self._tenants)
        if number is None:
            digest = hashlib.sha256(self._salt + tenant.encode("utf-8", "surrogatepass")).digest()
            number = HASHED_TENANTS + int.from_bytes(digest[:7], "little")
        return number

    def _update(self, now_ns: int, plan: StepPlan, result: StepResult) -> list[Any]:
        rows: list[int | list[int] | str] = []
        for request_id, tokens in zip(plan.rows.request_ids, result.rows, strict=True):
            if isinstance(tokens, str):
                rows.append(tokens)
                continue
            request = self._requests.get(request_id)  # None: it has ended, and its tokens come too late
            if request is None or request.stop_ids.isdisjoint(tokens):
                rows.append(len(tokens))
            else:
                rows.append([len(tokens), *(i for i, token in enumerate(tokens) if token in request.stop_ids)])
        sample_ns = (result.sample_ns,) if result.sample_ns else ()
        return ["update", now_ns, result.execute_ns, rows, list(result.stopped), *sample_ns]

    def _prompt_of(self, request: Request) -> list[Any]:
        """The line of a prompt, where it is wanted; the choices of a group share one."""
        if not self._with_tokens or request.choice_index:
            return []
        token_ids = request.token_ids[: request.num_prompt_tokens].tolist()
        return [["prompt", request.group_id, token_ids, _changed(request.params), list(request.eos_token_ids)]]

    def _ends_of(self, request_ids: list[int]) -> list[Any]:
        ended = [request for i in request_ids if (request := self._requests.pop(i, None)) is not None]
        lines = [self._keys(request) for request in ended]
        if self._with_tokens:
            lines += [["output", r.request_id, r.token_ids[r.num_prompt_tokens :].tolist()] for r in ended]
        return lines

    def _keys(self, request: Request) -> list[Any]:
        return ["keys", request.request_id, [self._hash(key) for key in tuple(request.block_keys)]]

    def _hash(self, key: bytes) -> str:
        return hashlib.sha256(self._salt + key).hexdigest()[:KEY_DIGITS]


def _changed(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    return {name: value for name, value in values.items() if value != getattr(_PLAIN, name)}
