"""Runs a workload against a server of any kind: only what its clients saw is known."""

from __future__ import annotations

from everystop.observe.comparison import RequestLine, Run
from everystop.sim.workloads import Workload
from everystop.trial.http_client import ClientRecord, Target
from everystop.trial.http_load import LoadRun, Progress, run_load


def run_on_server(workload: Workload, target: Target, policy: str, repeat: int, progress: Progress) -> Run:
    """Send the workload once; raises LoadError where there is no server."""
    return seen_by_clients(workload, run_load(workload, target, progress=progress), policy, repeat)


def seen_by_clients(workload: Workload, done: LoadRun, policy: str, repeat: int) -> Run:
    """A load as a run without a history."""
    scheduled = [workload.jobs[record.job].at_s for record in done.records]
    lines = tuple(_line(record, at_s) for record, at_s in zip(done.records, scheduled, strict=True))
    return Run(
        policy=policy,
        repeat=repeat,
        duration_s=max(0.0, *(line.end_s for line in lines)),
        requests=lines,
        start_ns=0,
        max_num_seqs=0,
        history=None,
    )


def _line(record: ClientRecord, scheduled_s: float | None) -> RequestLine:
    """A server that sends no usage does not say how many tokens it sent: then every event counts as one."""
    usage = record.usage
    return RequestLine(
        index=record.job,
        group=record.group,
        num_prompt_tokens=record.num_prompt if usage is None else usage.prompt_tokens,
        num_output_tokens=len(record.event_s) if usage is None else usage.completion_tokens,
        scheduled_s=scheduled_s,
        sent_s=record.sent_s,
        token_s=tuple(record.event_s),
        end_s=record.end_s,
        error=record.error,
        digest=record.text_hash,
        request_id=None,
    )
