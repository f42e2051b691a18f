"""`everystop simulate`: a trace through the server's own scheduler in virtual time."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from everystop.cli import settings
from everystop.cli.costs import MEASURED, read_cost
from everystop.config import Config
from everystop.config.setting import KV_CACHE, SCHEDULER
from everystop.core.durations import NS_PER_MS
from everystop.core.errors import ConfigError
from everystop.sim.routing import ROUTERS
from everystop.sim.traces import FORMATS

if TYPE_CHECKING:
    from everystop.sim.cost import StepCost
    from everystop.sim.simulator import Setup
    from everystop.sim.tally import Slo
    from everystop.sim.traces import TraceOptions

GROUPS = (SCHEDULER, KV_CACHE)
FURTHER = ("max_model_len",)  # of the model, as far as the scheduler cares
WITHOUT = (
    "record",
    "record_prompts",
    "kv_cache_memory",
    "kv_cache_dtype",
    "gpu_memory_utilization",
)  # of these groups, but of no meaning in virtual time
NUM_CACHE_TOKENS = 524_288
MAX_SLO_MS = 1_000_000_000
MAX_REPLICAS = 4096
MAX_BLOCKS = 2**24  # 537 million tokens in blocks of 32


def add_parser(commands: Any) -> None:
    """Describe the command and its options; those of the scheduler are those of `serve`."""
    parser = commands.add_parser(
        "simulate",
        usage="everystop simulate --trace FILE [options]",
        help="run a trace in virtual time",
        description="Run a trace through the server's own scheduler in virtual time; docs/simulator.md says how.",
        epilog=settings.SIMULATED_EPILOG,
        formatter_class=settings.HelpFormatter,
        allow_abbrev=False,
    )
    add_trace_options(parser.add_argument_group("trace"))
    add_machine_options(parser)
    add_slo_options(parser.add_argument_group("goodput"))
    parser.add_argument(
        "--replicas", metavar="N", type=int, default=1, help="equal servers behind a router (default: 1)"
    )
    parser.add_argument(
        "--oracle",
        action="store_true",
        help="policy shortest: order by the true length of the output as well, which no server knows",
    )
    parser.add_argument("--check", action="store_true", help="check every invariant of the scheduler after each step")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(run=run)


def add_machine_options(parser: Any) -> None:
    """Step times, router, and the options of the scheduler and the KV cache, which a file may give too."""
    settings.add_config_option(parser)
    add = parser.add_argument_group("machine").add_argument
    add(
        "--cost",
        metavar="NAME",
        default=MEASURED,
        help="step times: measured (the default) for those that calibrate keeps for this machine, a file that it "
        "wrote, or a preset, GPU:MODEL",
    )
    add("--router", default=ROUTERS[0], help=f"{', '.join(ROUTERS)} (default: {ROUTERS[0]})")
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for field in scheduler_fields():
        settings.add_option(groups.get(field.metadata["group"], groups[SCHEDULER]), field)
    parser.add_argument(
        "--num-blocks",
        metavar="N",
        type=int,
        help=f"blocks of the KV cache (default: as many as hold {NUM_CACHE_TOKENS:,} tokens)",
    )


def add_trace_options(group: Any) -> None:
    """What is read, and how it is changed."""
    add = group.add_argument
    add("--trace", metavar="FILE", type=settings.path, required=True, help="requests with arrival times and lengths")
    add_trace_changes(group)
    add(
        "--max-tokens",
        metavar="N",
        type=int,
        help="tokens that every request asks for; its output still ends where the trace says (default: the longest "
        "output of the trace; of a pipe, as many as fit)",
    )


def add_trace_changes(group: Any) -> None:
    """How a trace is read."""
    add = group.add_argument
    add("--format", help=f"{', '.join(FORMATS)} (default: as the first line looks)")
    add("--scale-lengths", metavar="X", type=float, default=1.0, help="multiply all lengths by X (default: 1)")
    add("--dilate-time", metavar="Y", type=float, default=1.0, help="multiply times between arrivals by Y (default: 1)")
    add("--limit", metavar="N", type=int, help="read only the first N requests")


def add_slo_options(group: Any) -> None:
    """What a request must have to count as good."""
    add = group.add_argument
    add("--slo-ttft-ms", metavar="MS", type=float, help="first token within that time of the arrival")
    add("--slo-itl-ms", metavar="MS", type=float, help="each later token within that time of the one before")


def scheduler_fields() -> Iterator[dataclasses.Field[Any]]:
    """The settings of `serve` that a simulated server has as well."""
    for field in settings.flag_fields():
        if (field.metadata["group"] in GROUPS and field.name not in WITHOUT) or field.name in FURTHER:
            yield field


def run(arguments: argparse.Namespace) -> int:
    """Simulate, and print the results."""
    config = settings.make_config(arguments)
    if arguments.router == "prefix-affinity" and not config.enable_prefix_caching:
        raise ConfigError(
            "--router prefix-affinity needs the prefix cache, for which it sends common prefixes to one replica; leave "
            "out --no-enable-prefix-caching, or choose another router"
        )
    from everystop.sim.report import describe_run
    from everystop.sim.run import run_trace

    setup = make_setup(
        config,
        read_cost(arguments.cost),
        num_blocks=arguments.num_blocks,
        max_tokens=arguments.max_tokens,
        num_replicas=arguments.replicas,
        router=arguments.router,
        oracle=arguments.oracle,
        slo=make_slo(arguments),
        check=arguments.check,
    )
    results = run_trace(arguments.trace, trace_options(arguments), setup)
    print(json.dumps(results) if arguments.json else describe_run(results))
    return 0


def trace_options(arguments: argparse.Namespace) -> TraceOptions:
    """How the trace is read; raises ConfigError."""
    from everystop.sim.traces import TraceOptions

    if arguments.format is not None and arguments.format not in FORMATS:
        raise ConfigError(f"--format is {arguments.format!r}; choose one of {', '.join(FORMATS)}")
    return TraceOptions(
        format=arguments.format,
        scale_lengths=arguments.scale_lengths,
        dilate_time=arguments.dilate_time,
        limit=arguments.limit,
    )


def make_slo(arguments: argparse.Namespace) -> Slo:
    """The demands of `--slo-ttft-ms` and `--slo-itl-ms`; raises ConfigError for what is no time."""
    from everystop.sim.tally import Slo

    limits: dict[str, int | None] = {}
    for name in ("ttft", "itl"):
        value = getattr(arguments, f"slo_{name}_ms")
        if value is not None and not 0 < value < MAX_SLO_MS:
            raise ConfigError(f"--slo-{name}-ms is {value:g}; it must be above 0 and below {MAX_SLO_MS:,}")
        limits[f"{name}_ns"] = None if value is None else round(value * NS_PER_MS)
    return Slo(**limits)


def make_setup(config: Config, cost: StepCost, *, num_blocks: int | None = None, **others: Any) -> Setup:
    """A simulated server set up as `serve` would be; `others` are further fields of `Setup`.

    `num_blocks` None means as many as hold 524,288 tokens. Raises ConfigError.
    """
    from everystop.backend import CPU, CUDA, Backend, settled
    from everystop.scheduling import policy_settings, scheduler_limits
    from everystop.sim.roofline import Roofline
    from everystop.sim.simulator import Setup

    config = settled(config, Backend(CUDA if isinstance(cost, Roofline) else CPU, config.dtype, is_deterministic=True))

    if num_blocks is None:
        num_blocks = NUM_CACHE_TOKENS // config.block_size
    if num_blocks > MAX_BLOCKS:
        raise ConfigError(f"--num-blocks is {num_blocks:,}; at most {MAX_BLOCKS:,} can be simulated")
    if others.get("num_replicas", 1) > MAX_REPLICAS:
        raise ConfigError(f"--replicas is {others['num_replicas']:,}; at most {MAX_REPLICAS:,} can be simulated")
    return Setup(
        limits=scheduler_limits(config, config.max_model_len or num_blocks * config.block_size),
        num_blocks=num_blocks,
        block_size=config.block_size,
        cost=cost,
        enable_prefix_caching=config.enable_prefix_caching,
        policy=config.policy,
        policy_settings=policy_settings(config),
        **others,
    )


def changed_settings(config: Config) -> dict[str, Any]:
    """The settings that a simulated server shares with `serve` and that are not left at their defaults."""
    usual = Config()
    values = {field.name: getattr(config, field.name) for field in scheduler_fields()}
    return {name: value for name, value in values.items() if value != getattr(usual, name)}
