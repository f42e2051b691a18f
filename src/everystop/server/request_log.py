"""One line for each HTTP request that is over, with its numbers and the largest cause of its time; never its text.

Requests are noted when the engine has said how they ended, and told a few times a second.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from starlette.types import Scope

from everystop.core.durations import NS_PER_MS, NS_PER_S
from everystop.observe.history import Answer, Client, History, Trail
from everystop.observe.life import Life
from everystop.observe.main_cause import largest_cause, main_cause
from everystop.observe.thread_share import ThreadShare
from everystop.server.http_counts import LEFT
from everystop.server.logs import Fields
from everystop.server.paths import OPEN_PATHS

logger = logging.getLogger(__name__)

COST_SHARE = 0.005  # for finding causes
MAX_SAVED_NS = NS_PER_S // 20
REFUSALS_PER_S = 5
MAX_REFUSALS = 10  # in a row
SUMMARY_NS = 10 * NS_PER_S
MAX_PATH_CHARS = 100

Write = Callable[[str, Fields], None]


class Refusal(NamedTuple):
    """A request that never became one of the engine's: what it asked for, and what it got."""

    method: str
    path: str
    given_name: str
    status: int
    code: str


def refusal_of(scope: Scope, status: int) -> Refusal:
    """What the scope says of a request that was answered with an error, `error_code` included."""
    code = scope.get("error_code", "server_error" if status == 500 else "")
    return Refusal(scope["method"], scope["path"][:MAX_PATH_CHARS], scope.get("given_name", ""), status, code)


class RequestLog:
    """`write` gets "request" or "refused" and the fields of a line.

    Each request that was computed has its line. Refusals, and clients that left before the first token, are told up to
    5 a second; the others are counted, and a line every 10 s says how many there were. The largest cause of the time is
    worked out exactly within a `share` of the thread's time, 0.5 % of it unless said, the slowest requests first; for
    the others it is estimated from the times of boarding, first byte and end: receive, queue, first_token, decode, or
    running for an answer in one piece (`cause_estimated`).
    """

    def __init__(self, history: History, write: Write, share: ThreadShare | None = None) -> None:
        self._history = history
        self._write = write
        self._share = share or ThreadShare(COST_SHARE, MAX_SAVED_NS)
        self._ended: list[tuple[Client, Life | None]] = []
        self._untold: Counter[str] = Counter()
        self._told_ns = self._ticked_ns = time.monotonic_ns()
        self._num_allowed = float(MAX_REFUSALS)

    def note(self, client: Client, life: Life | None = None) -> None:
        """A request is over, as the engine has said; `life` where its time has been cut into pieces anyway."""
        self._ended.append((client, life))

    def refused(self, refusal: Refusal) -> None:
        """A request was turned away at the edge."""
        if refusal.path not in OPEN_PATHS and self._may_tell(refusal.status, refusal.code):
            fields = {"method": refusal.method, "path": refusal.path, "status": refusal.status}
            named = {"client_id": refusal.given_name, "code": refusal.code}
            self._write("refused", fields | {name: value for name, value in named.items() if value})

    def tick(self, now_ns: int, *, is_last: bool = False) -> None:
        """Tell what is over; the history must have caught up. The `is_last` call keeps nothing back."""
        elapsed_ns, self._ticked_ns = now_ns - self._ticked_ns, now_ns
        self._num_allowed = min(MAX_REFUSALS, self._num_allowed + elapsed_ns * REFUSALS_PER_S / NS_PER_S)
        self._share.refill(now_ns)
        ended, self._ended = self._ended, []
        exact = self._exact_causes(ended, now_ns)
        for client, _ in ended:
            self._tell(client, exact.get(client.name))
        if self._untold and (is_last or now_ns - self._told_ns >= SUMMARY_NS):
            self._summarise(now_ns)

    def _may_tell(self, status: int, code: str) -> bool:
        if self._num_allowed >= 1:
            self._num_allowed -= 1
            return True
        if not self._untold:
            self._told_ns = self._ticked_ns
        self._untold[f"{status} {code}".rstrip()] += 1
        return False

    def _summarise(self, now_ns: int) -> None:
        counts, self._untold = self._untold, Counter()
        seconds, self._told_ns = round((now_ns - self._told_ns) / NS_PER_S, 1), now_ns
        kinds = ", ".join(f"{num} x {kind}" for kind, num in counts.most_common())
        self._write("refused, not listed", {"requests": counts.total(), "seconds": seconds, "kinds": kinds})

    # ------------------------------------------------------------ one line

    def _tell(self, client: Client, cause: str | None) -> None:
        answer = client.answer or Answer()
        status = answer.status or LEFT
        if status >= 400 and not answer.num_output_tokens and not self._may_tell(status, answer.error_code):
            return
        fields: dict[str, Any] = {"id": client.name}
        if client.given_name:
            fields["client_id"] = client.given_name
        if client.tenant:
            fields["tenant"] = client.tenant
        fields |= {"status": status, "finish": answer.finish_reason}
        if answer.error_code:
            fields["code"] = answer.error_code
        fields |= {
            "prompt_tokens": answer.num_prompt_tokens,
            "cached_tokens": answer.num_cached_tokens,
            "output_tokens": answer.num_output_tokens,
        }
        self._write("request", fields | self._times(client, cause))

    def _times(self, client: Client, cause: str | None) -> dict[str, Any]:
        """Milliseconds since the last byte was received; what is not known is left out."""
        boarded_ns = self._boarded_ns(client)
        times = {
            "queue_ms": _ms(client.submitted_ns, boarded_ns),
            "ttft_ms": _ms(client.received_ns, client.first_sent_ns),
        }
        fields: dict[str, Any] = {name: ms for name, ms in times.items() if ms is not None}
        fields["e2e_ms"] = _ms(client.received_ns, client.delivered_ns)
        fields["cause"] = cause or _estimate(client, boarded_ns)
        if cause is None:
            fields["cause_estimated"] = True
        return fields

    def _boarded_ns(self, client: Client) -> int | None:
        """When the first of its sequences boarded; None where it did not, or it is forgotten."""
        trails = [trail for i in client.request_ids if (trail := self._history.trails.get(i)) is not None]
        return min((trail.admits[0].now_ns for trail in trails if trail.admits), default=None)

    def _exact_causes(self, ended: list[tuple[Client, Life | None]], now_ns: int) -> dict[str, str]:
        """The cause by the name of the request, as far as there is time for that."""
        found = {}
        for client, life in sorted(ended, key=lambda each: _took_ns(each[0]), reverse=True):
            if not self._share.has_time:
                break
            with self._share.paid():
                cause = self._exact_cause(client, life, now_ns)
            if cause is not None:
                found[client.name] = cause
        return found

    def _exact_cause(self, client: Client, life: Life | None, now_ns: int) -> str | None:
        """Of the sequence that ended last."""
        trails = [self._history.trails.get(i) for i in client.request_ids]
        known = [trail for trail in trails if trail is not None and trail.since_ns]
        if len(known) < len(trails):
            return None
        try:
            last = max(known, key=_end_ns)
            cause = main_cause(self._history, last, now_ns) if life is None else largest_cause(life)
        except Exception:
            logger.exception("the cause of a request's time could not be worked out; serving goes on")
            return None
        return None if cause is None else cause.value


def _end_ns(trail: Trail) -> int:
    return 0 if trail.finish is None else trail.finish.now_ns


def _took_ns(client: Client) -> int:
    return (client.delivered_ns or client.received_ns) - client.received_ns


def _ms(from_ns: int, to_ns: int | None) -> float | None:
    return None if to_ns is None else round((to_ns - from_ns) / NS_PER_MS, 1)


def _estimate(client: Client, boarded_ns: int | None) -> str:
    """The longest stretch between what is known without looking at steps."""
    answer, end_ns = client.answer or Answer(), client.delivered_ns or client.submitted_ns
    stretches = {"receive": client.submitted_ns - client.received_ns}
    if boarded_ns is None and not answer.num_output_tokens:
        stretches["queue"] = end_ns - client.submitted_ns
    elif boarded_ns is None or boarded_ns > end_ns:
        boarded_ns = client.submitted_ns  # forgotten; what was the queue counts as what followed it
    else:
        stretches["queue"] = boarded_ns - client.submitted_ns
    if boarded_ns is not None:
        first_ns = client.first_sent_ns if answer.is_streamed else None
        if first_ns is None:
            stretches["running"] = end_ns - boarded_ns
        else:
            stretches |= {"first_token": first_ns - boarded_ns, "decode": end_ns - first_ns}
    return max(stretches, key=stretches.__getitem__)
