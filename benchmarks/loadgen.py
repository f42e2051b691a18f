"""Sends a workload to an OpenAI-compatible server and reports what its clients saw.

    python -m benchmarks.loadgen --url http://127.0.0.1:8000 --workload chat --out chat.json

`everystop.trial.http_load` says what is measured. How many events a token came in is printed, and so is the generator's
own CPU time, which it may have taken from a server on the same machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from everystop.core.errors import ConfigError, EverystopError
from everystop.server_url import ServerUrl
from everystop.sim.workloads import DEFAULT_SEED, MAKERS, Workload, make_workload, read_workload
from everystop.trial.http_client import Target
from everystop.trial.http_load import run_load
from everystop.trial.prompt_forms import PromptForm

MAX_JOBS = 100_000


def report(title: str, figures: dict[str, Any]) -> str:
    """The figures of `summarize`, readable."""
    lines = [
        f"{title}: {figures['requests']} requests, {figures['errors']} errors, {figures['exact_usage']} with exact "
        f"usage, {figures['without_usage']} without; wall {figures['wall_s']:.2f} s",
        f"  output {figures['output_tok_s']:,.0f} tok/s, with prompts {figures['total_tok_s']:,.0f} tok/s; "
        f"{figures['events_per_token']:.3f} events a token",
    ]
    for name in ("ttft", "itl", "e2e"):
        values = "  ".join(f"{key} {value:,.1f}" for key, value in figures[f"{name}_ms"].items())
        lines.append(f"  {name.upper():<5}ms  {values}")
    return "\n".join(lines)


def load_workload(name_or_file: str, seed: int) -> Workload:
    """A workload by name, or from a file of JSON lines."""
    if name_or_file in MAKERS:
        return make_workload(name_or_file, seed)
    path = Path(name_or_file)
    if not path.is_file():
        raise SystemExit(f"{name_or_file!r} is neither a file nor one of {', '.join(MAKERS)}")
    return read_workload(path.read_text(encoding="utf-8").splitlines())


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--workload", required=True, help=f"{', '.join(MAKERS)}, or a file of JSON lines")
    parser.add_argument("--workload-seed", type=int, default=DEFAULT_SEED, help="another one makes other prompts")
    parser.add_argument("--clients", type=int, help="clients of the closed loop (default: the workload's)")
    parser.add_argument("--limit", type=int, default=MAX_JOBS, help="send only the first N jobs")
    parser.add_argument("--out", type=Path, help="write figures and records to this JSON file")
    parser.add_argument("--model", help="for servers that insist on a name")
    parser.add_argument("--api-key")
    parser.add_argument("--tenant-header", metavar="NAME", help="header that carries the name of a job's tenant")
    parser.add_argument("--stop", type=float, metavar="SECONDS", help="cut off what is under way by then")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, help="sampling seed of every request")
    parser.add_argument("--prompts", type=PromptForm, choices=list(PromptForm), default=PromptForm.IDS)
    parser.add_argument("--extra", type=json.loads, default={}, help="more fields of every request, as JSON")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one request may take")
    parser.add_argument("--max-run", type=float, default=1200.0, help="seconds that the run may take")
    parser.add_argument("--allow-remote", action="store_true", help="send load to another machine")
    arguments = parser.parse_args(argv)
    try:
        ServerUrl.parse(arguments.url).check_load(allow_remote=arguments.allow_remote)
    except ConfigError as error:
        parser.error(str(error))
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; exit code 1 when a request failed."""
    arguments = parse_arguments(argv)
    workload = load_workload(arguments.workload, arguments.workload_seed)
    workload = Workload(workload.name, workload.num_clients, workload.jobs[: arguments.limit])
    if any(job.tenant for job in workload.jobs) and arguments.tenant_header is None:
        raise SystemExit(f"{workload.name} has tenants; say by --tenant-header which header names them")
    target = Target(
        url=arguments.url,
        model=arguments.model,
        api_key=arguments.api_key,
        temperature=arguments.temperature,
        seed=arguments.seed,
        form=arguments.prompts,
        extra=arguments.extra,
        timeout_s=arguments.timeout,
        max_run_s=arguments.max_run,
        stop_s=arguments.stop,
        tenant_header=arguments.tenant_header,
    )
    try:
        run = run_load(workload, target, arguments.clients)
    except EverystopError as error:
        raise SystemExit(str(error)) from None
    figures = run.summary()
    print(report(workload.name, figures))
    if len(run.groups) > 1:
        print("\n".join(report(f"{workload.name}/{group}", run.summary(group)) for group in run.groups))
    print(f"answers {run.digest}; generator {run.cpu_s:.2f} s of CPU")
    for record in [record for record in run.records if record.error is not None][:5]:
        print(f"job {record.job}: {record.error}", file=sys.stderr)
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(run.to_dict())))
    return 1 if figures["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
