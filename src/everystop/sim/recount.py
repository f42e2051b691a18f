"""The metrics of a recorded run, counted again from its record: what `/metrics` of its server said when it ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from everystop.core.events import Event
from everystop.observe.aftermath import Aftermath
from everystop.observe.metrics import Metrics
from everystop.observe.thread_share import free
from everystop.sim.past import Past
from everystop.sim.record import Record
from everystop.sim.redrive import Redrive


def metrics_of_record(path: Path, tenants: Sequence[str] = ()) -> Metrics:
    """All that is counted from events and from the ends of answers, exactly; nothing of HTTP or of the process.

    `tenants` are the numbers of those in the record that are told apart. Blame is of all requests that were answered,
    also those that the server left out. Raises RecordError.
    """
    record = Record.read(path)
    metrics = Metrics(
        record.kv["num_blocks"],
        tenants,
        block_size=record.kv["block_size"],
        num_slots=record.limits.max_num_seqs,
        max_model_len=record.limits.max_model_len,
    )
    past = Past(record)
    aftermath = Aftermath(past.history, free())
    aftermath.on_life.append(lambda client, life: metrics.explained(life))
    for client in record.clients:
        metrics.came(client)

    def hear(events: list[Event]) -> None:
        past.hear(events)
        metrics.receive(events)
        metrics.catch_up()

    redrive = Redrive(record, hear)
    redrive.run()
    redrive.check_same()
    past.fold()
    for client in record.clients:
        aftermath.note(client)
    aftermath.tick(past.history.last_ns, is_last=True)
    return metrics
