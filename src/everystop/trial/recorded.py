"""Plays workloads on a server of this machine that writes a record, and joins what its clients saw with what its engine
did, once the record is whole.

Every request has a name of its own, which the record keeps beside its number in the engine. Client and server read the
same monotonic clock. Each run has a `cache_salt` of its own, so the prefix cache knows nothing of what it asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from everystop.core.errors import RecordError
from everystop.observe.comparison import RequestLine, Run
from everystop.observe.history import History
from everystop.sim.record import Record
from everystop.sim.replay import histories_of_record
from everystop.sim.workloads import Workload
from everystop.trial.calm import calm_interpreter
from everystop.trial.http_client import Target
from everystop.trial.http_load import Progress, run_load
from everystop.trial.on_server import seen_by_clients


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A run as its clients saw it, without a history yet; `name` is no other run's on that server, and `cpu_s` is what
    the clients computed.
    """

    name: str
    run: Run
    cpu_s: float


def play(workload: Workload, target: Target, name: str, policy: str, repeat: int, progress: Progress) -> Played:
    """Send the workload once; raises LoadError where there is no server."""
    named = replace(target, id_prefix=_prefix(name), extra={**target.extra, "cache_salt": name})
    with calm_interpreter():
        done = run_load(workload, named, progress=progress)
    run = replace(seen_by_clients(workload, done, policy, repeat), start_ns=done.start_ns)
    return Played(name=name, run=run, cpu_s=done.cpu_s)


def joined(played: Sequence[Played], path: Path, max_num_seqs: int) -> list[Run]:
    """Each run with the numbers of its requests and its history; they were played one after the other, on a server with
    so many slots that wrote this record and has ended.

    Raises RecordError for a record that does not have just these requests as their clients saw them.
    """
    record = Record.read(path)
    numbers = {client.given_name: client.first_request_id for client in record.clients if client.given_name}
    runs = [_numbered(each, numbers, path) for each in played]
    firsts = [min(line.request_id for line in run.requests if line.request_id is not None) for run in runs]
    histories = histories_of_record(record, firsts)
    for run, history in zip(runs, histories, strict=True):
        _check_same(run, history, path)
    return [
        replace(run, history=history, max_num_seqs=max_num_seqs) for run, history in zip(runs, histories, strict=True)
    ]


def _prefix(name: str) -> str:
    return f"{name}-"


def _numbered(played: Played, numbers: Mapping[str, int], path: Path) -> Run:
    lines = []
    for line in played.run.requests:
        request_id = numbers.get(f"{_prefix(played.name)}{line.index}")
        if request_id is None:
            raise RecordError(f"{path} has no request {_prefix(played.name)}{line.index}, which was sent; run it again")
        lines.append(replace(line, request_id=request_id))
    return replace(played.run, requests=tuple(lines))


def _check_same(run: Run, history: History, path: Path) -> None:
    """The history has these requests and no others, of these lengths."""
    if len(history.trails) != len(run.requests):
        raise RecordError(f"{path} has {len(history.trails)} requests of a run of {len(run.requests)}; run it again")
    for line in run.requests:
        found = _lengths(history, line)
        if found != (line.num_prompt_tokens, line.num_output_tokens):
            raise RecordError(
                f"{path} says of request {line.request_id} that prompt and output have {found} tokens, and its client "
                f"that they have {(line.num_prompt_tokens, line.num_output_tokens)}; please report this"
            )


def _lengths(history: History, line: RequestLine) -> tuple[int, int] | None:
    assert line.request_id is not None, "it has been numbered"
    trail = history.trails.get(line.request_id)
    if trail is None or trail.arrival is None or trail.finish is None:
        return None
    return trail.arrival.num_prompt_tokens, trail.finish.num_output_tokens
