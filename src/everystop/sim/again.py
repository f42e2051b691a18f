"""The requests of a record as a workload, so that they can be sent again, to this server or another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from everystop.core.durations import NS_PER_S
from everystop.core.errors import RecordError
from everystop.sim.record import Record


def workload_of_record(path: Path) -> list[str]:
    """JSON lines of a workload: a header, then each sequence that brought a token, sent when it arrived.

    An answer is as long as the recorded one, whatever ended that. Tenants are numbered, where there are several. Raises
    RecordError, also for a record without prompts.
    """
    record = Record.read(path)
    if not record.prompts:
        raise RecordError(f"{path} has no prompts; record them with --record-prompts")
    jobs = list(_jobs(record))
    if not jobs:
        raise RecordError(f"{path} has no request that brought a token")
    return [json.dumps({"workload": path.name, "num_clients": 0}), *jobs]


def _jobs(record: Record) -> Iterator[str]:
    adds = [call for call in record.calls if call[0] == "add"]
    has_tenants = len({call[10] for call in adds}) > 1
    for call in adds:
        _, now_ns, request_id, group_id, *_ = call
        num_tokens = len(record.outputs.get(request_id, ()))
        if num_tokens and group_id in record.prompts:
            yield json.dumps(
                {
                    "prompt": record.prompts[group_id].token_ids,
                    "max_tokens": num_tokens,
                    "at_s": (now_ns - adds[0][1]) / NS_PER_S,
                    **({"tenant": str(call[10])} if has_tenants else {}),
                }
            )
