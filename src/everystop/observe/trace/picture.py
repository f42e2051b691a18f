"""The whole picture of a history: steps, slots, the queue, clients and counters."""

from __future__ import annotations

from everystop.observe.history import Client, History, StepRecord
from everystop.observe.trace.slots import SlotTracks, Span
from everystop.observe.trace.tracks import Arguments, Canvas, Lanes, Pen, Picture, present
from everystop.observe.trace.waits import Waits
from everystop.observe.wording import number_name

ROOT = 1
"""The number of the track that holds all others."""


def picture_of(history: History) -> Picture:
    """Everything that a history remembers, on one time axis.

    Per slot: slices of the requests on board, and in them prefill chunks and runs of decode steps; slots that finished
    requests hold. Per step: a slice with what it computed. The queue: its head with the reason, and a slice for each
    wait with the reasons in it. Clients: from the last byte of a request to the last of its answer. Counters as they
    are after each step. A request's waits and boardings are joined by a flow.
    """
    canvas = Canvas()
    canvas.group("everystop")
    steps = canvas.pen("steps", ROOT)
    slots, queue, clients, counters = (canvas.group(name, ROOT) for name in ("slots", "queue", "clients", "counters"))
    tracks = SlotTracks(history)
    records = history.steps.since(0)
    for record, span, num_prefill in zip(records, tracks.spans, tracks.num_prefill_tokens, strict=True):
        _draw_step(steps, record, span, num_prefill)
    Waits(history).draw(canvas, queue)
    tracks.draw(canvas, slots)
    _draw_clients(canvas, clients, sorted(history.clients.values(), key=lambda client: client.received_ns), history)
    _draw_counters(canvas, counters, records, tracks.spans)
    return canvas.picture()


def _draw_step(pen: Pen, record: StepRecord, span: Span, num_prefill: int) -> None:
    num_tokens = sum(record.nums)
    name = "bookkeeping" if not num_tokens else "decode" if not num_prefill else "prefill"
    if 0 < num_prefill < num_tokens:
        name = "mixed"
    arguments = present(
        [
            ("rows", record.num_rows),
            ("tokens", num_tokens),
            ("prefill_tokens", num_prefill),
            ("padded_rows", record.num_padded_rows),
            ("recomputed_tokens", record.num_recomputed_tokens),
            ("wasted_rows", record.num_wasted_rows),
            ("execute_us", record.execute_ns // 1000),
            ("sample_us", record.sample_ns // 1000),
            ("target_us", record.target_ns // 1000),
            ("predicted_us", record.predicted_ns // 1000),
        ]
    )
    pen.slice(span.start_ns, span.end_ns, name, (("step", record.step_id), *arguments))


def _draw_clients(canvas: Canvas, parent: int, clients: list[Client], history: History) -> None:
    lanes = Lanes(canvas, "HTTP requests", parent)
    for client in clients:
        end_ns = client.delivered_ns or max(history.last_ns, client.first_sent_ns or client.submitted_ns)
        pen = lanes.pen(client.received_ns, end_ns)
        first_ns = client.first_sent_ns or end_ns
        pen.begin(client.received_ns, client.name, _client_arguments(client))
        pen.slice(client.received_ns, client.submitted_ns, "receive")
        pen.slice(client.submitted_ns, first_ns, "to the first byte")
        if client.first_sent_ns is not None:
            pen.slice(first_ns, end_ns, "to the last byte")
        pen.end(end_ns)


def _client_arguments(client: Client) -> Arguments:
    ids = client.request_ids
    requests = number_name(ids[0]) if client.num == 1 else f"{number_name(ids[0])} to {number_name(ids[-1])}"
    return (("requests", requests),)


def _draw_counters(canvas: Canvas, parent: int, records: list[StepRecord], spans: list[Span]) -> None:
    """Counts after each step; the tokens of a step fall to 0 where nothing follows it for longer than it took."""
    tokens, running, waiting, free, held = (
        canvas.pen(name, parent, unit=unit)
        for name, unit in (
            ("tokens in the step", "tokens"),
            ("running", "requests"),
            ("waiting", "requests"),
            ("free blocks", "blocks"),
            ("held slots", "slots"),
        )
    )
    for i, (record, span) in enumerate(zip(records, spans, strict=True)):
        running.count(record.now_ns, record.num_running)
        waiting.count(record.now_ns, record.num_waiting)
        free.count(record.now_ns, record.num_free_blocks)
        held.count(record.now_ns, record.num_held)
        tokens.count(span.start_ns, sum(record.nums))
        if i + 1 == len(spans) or spans[i + 1].start_ns - span.end_ns > span.end_ns - span.start_ns:
            tokens.count(span.end_ns, 0)
