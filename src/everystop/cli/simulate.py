"""`everystop simulate`: a trace through the server's own scheduler in virtual time."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from everystop.cli import calibrate, settings
from everystop.config import Config
from everystop.core.errors import ConfigError

SETTINGS = {
    "scheduler": (
        "policy",
        "admission",
        "batch_wait_ms",
        "ageing",
        "ttft_target_ms",
        "itl_target_ms",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_num_prefill_tokens",
        "max_model_len",
    ),
    "KV cache": ("block_size", "enable_prefix_caching"),
}
NUM_CACHE_TOKENS = 524_288


def add_parser(commands: Any) -> None:
    """Describe the command and its options; those of the scheduler are those of `serve`."""
    parser = commands.add_parser(
        "simulate",
        usage="everystop simulate --trace FILE [options]",
        help="run a trace in virtual time",
        description="Run a trace through the server's own scheduler in virtual time; docs/simulator.md says how.",
        formatter_class=settings.HelpFormatter,
        allow_abbrev=False,
    )
    add_trace_options(parser.add_argument_group("trace"))
    add = parser.add_argument_group("machine").add_argument
    add(
        "--cost",
        metavar="NAME",
        default=calibrate.MEASURED,
        help="step times: measured (the default) for those that calibrate keeps for this machine, a file that it "
        "wrote, or a preset, GPU:MODEL",
    )
    add("--replicas", metavar="N", type=int, default=1, help="equal servers behind a router (default: 1)")
    add("--router", default="round-robin", help="round-robin (default), least-loaded or prefix-affinity")
    for title, names in SETTINGS.items():
        group = parser.add_argument_group(title)
        for field in settings.flag_fields():
            if field.name in names:
                settings.add_option(group, field)
    parser.add_argument(
        "--num-blocks",
        metavar="N",
        type=int,
        help=f"blocks of the KV cache (default: as many as hold {NUM_CACHE_TOKENS:,} tokens)",
    )
    parser.add_argument("--check", action="store_true", help="check every invariant of the scheduler after each step")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(run=run)


def add_trace_options(group: Any) -> None:
    """What is read, and how it is changed."""
    add = group.add_argument
    add("--trace", metavar="FILE", type=Path, required=True, help="requests with arrival times and lengths")
    add("--format", help="azure, mooncake, sharegpt, tenant or own (default: as the first line looks)")
    add("--scale-lengths", metavar="X", type=float, default=1.0, help="multiply all lengths by X (default: 1)")
    add("--dilate-time", metavar="Y", type=float, default=1.0, help="multiply times between arrivals by Y (default: 1)")
    add("--limit", metavar="N", type=int, help="read only the first N requests")


def run(arguments: argparse.Namespace) -> int:
    """Simulate, and print the results."""
    config = settings.make_config(arguments)
    from everystop.sim.report import describe_run, run_trace
    from everystop.sim.traces import FORMATS, TraceOptions

    if arguments.format is not None and arguments.format not in FORMATS:
        raise ConfigError(f"--format is {arguments.format!r}; choose one of {', '.join(FORMATS)}")
    options = TraceOptions(
        format=arguments.format,
        scale_lengths=arguments.scale_lengths,
        dilate_time=arguments.dilate_time,
        limit=arguments.limit,
    )
    results = run_trace(
        arguments.trace,
        options,
        scheduler=scheduler_settings(config, arguments.num_blocks),
        cost=calibrate.read_cost(arguments.cost),
        num_replicas=arguments.replicas,
        router=arguments.router,
        check=arguments.check,
    )
    print(json.dumps(results) if arguments.json else describe_run(results))
    return 0


def scheduler_settings(config: Config, num_blocks: int | None) -> dict[str, Any]:
    """The settings that a simulated server has in common with a real one."""
    given = dataclasses.asdict(config)
    chosen = {name: given[name] for names in SETTINGS.values() for name in names}
    return {**chosen, "num_blocks": NUM_CACHE_TOKENS // config.block_size if num_blocks is None else num_blocks}
