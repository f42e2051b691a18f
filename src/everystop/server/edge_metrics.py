"""What `/metrics` says beside the engine's events: of the server's own state, and of HTTP."""

from __future__ import annotations

import time

from everystop import __version__
from everystop.core.durations import NS_PER_S
from everystop.observe.families import Family, Kind, alone, each
from everystop.observe.ledger import LEDGER_FAMILIES
from everystop.observe.prometheus import TENANT, Sheet
from everystop.server.delivery import DELIVERY_FAMILIES
from everystop.server.http_counts import HTTP_FAMILIES
from everystop.server.state import Phase, ServerState


def _oldest_s(state: ServerState) -> float:
    oldest_ns = None if state.metrics is None else state.metrics.oldest_ns
    return 0.0 if oldest_ns is None else (time.monotonic_ns() - oldest_ns) / NS_PER_S


STATE_FAMILIES: tuple[Family[ServerState], ...] = (
    Family(
        name="everystop_build_info",
        kind=Kind.GAUGE,
        text="Always 1; the label says which version this is",
        source="start-up",
        read=lambda state: [((__version__,), 1.0)],
        labels=("version",),
    ),
    Family(
        name="everystop_ready",
        kind=Kind.GAUGE,
        text="1 while requests are taken and the engine has not failed, else 0",
        source="state of the server",
        read=alone(lambda state: float(state.phase is Phase.READY)),
    ),
    Family(
        name="everystop_engine_silent_seconds",
        kind=Kind.GAUGE,
        text="Since when an engine that has work has not finished a step; 0 for an idle one",
        source="state of the engine",
        read=alone(lambda state: state.stall_clock.engine_silent_s),
    ),
    Family(
        name="everystop_oldest_waiting_seconds",
        kind=Kind.GAUGE,
        text="How long the oldest of the requests has been waiting that have not boarded yet; 0 if there is none",
        source="arrival, admit, finish",
        read=alone(_oldest_s),
    ),
    Family(
        name="everystop_requests_aborted_total",
        kind=Kind.COUNTER,
        text="Sequences that the server ended before their time, by the error behind it; ClientGone: the client left",
        source="the end of an answer",
        read=each(lambda state: {} if state.metrics is None else state.board.aborted),
        labels=("error",),
    ),
    Family(
        name="everystop_tenant_requests_turned_away_total",
        kind=Kind.COUNTER,
        text="Sequences beyond a tenant's max_queued that were refused before they were tokenised",
        source="account of the queue",
        read=each(lambda state: {} if state.metrics is None else state.board.queue.tenants.num_refused),
        labels=TENANT,
    ),
)


def edge_sheets(state: ServerState) -> list[Sheet]:
    """Of a server, as far as it is: before the model is there, nothing of the engine."""
    sheets = [Sheet(STATE_FAMILIES, state), Sheet(HTTP_FAMILIES, state.http)]
    if state.metrics is not None:
        sheets += [Sheet(LEDGER_FAMILIES, state.metrics.ledger), Sheet(DELIVERY_FAMILIES, state.board.deliveries)]
    return sheets
