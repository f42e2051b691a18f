"""`everystop bench steps|gpu`: what a step of a server costs, by part and thread, and what a GPU makes of steps."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from everystop.cli import settings
from everystop.cli.settings import HelpFormatter
from everystop.core.errors import ConfigError

if TYPE_CHECKING:
    from everystop.trial.steps import StepCost

LEAST_SLOTS, LEAST_TOKENS = 64, 256  # as `serve` has them


def add_parser(commands: Any) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser("bench", help="measure what a server does", allow_abbrev=False)
    benches = parser.add_subparsers(title="measurements", metavar="WHAT", required=True)
    steps = benches.add_parser(
        "steps",
        usage="everystop bench steps [options] [-- MODEL and options of serve]",
        help="the cost of a step by part, for steps of a fixed number of decoding rows",
        description="Start a server, have it decode a fixed number of rows for a while, and print what a step cost: "
        "where the time of the engine's thread went, what the event loop's thread did meanwhile, and the "
        "processor time of all threads. What stands behind -- is given to serve.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    steps.add_argument("--rows", metavar="N,N", default="1,32,128", help="rows of a step (default: 1,32,128)")
    steps.add_argument("--steps", metavar="N", type=int, default=300, help="steps to look at (default: 300)")
    steps.add_argument("--context", metavar="N", type=int, default=128, help="tokens of each prompt (default: 128)")
    steps.add_argument("--json", metavar="FILE", type=settings.path, help="write the figures to a file as well")
    steps.add_argument("serve_options", metavar="OPTION", nargs="*", help=argparse.SUPPRESS)
    steps.set_defaults(run=run_steps)
    _add_gpu(benches)


def _add_gpu(benches: Any) -> None:
    gpu = benches.add_parser(
        "gpu",
        help="a GPU's step times, throughput and correctness, on models with random weights",
        description="Measure the PyTorch runner on a GPU against what the GPU can copy and multiply: correctness, "
        "decode and prefill steps of Llama-shaped models of 1B and 8B with random weights, throughput of continuous "
        "and static batching and of transformers, and what graphs and determinism change. It needs no files and no "
        "network.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    gpu.add_argument(
        "--device", choices=("cuda", "torch"), default="cuda", help="torch tries it out on the CPU (default: cuda)"
    )
    gpu.add_argument(
        "--minutes", metavar="N", type=float, default=7.5, help="what does not fit is left out and named (default: 7.5)"
    )
    gpu.add_argument(
        "--json", metavar="FILE", type=settings.path, help="write the figures to a file as well, part by part"
    )
    gpu.set_defaults(run=run_gpu)


def run_gpu(arguments: argparse.Namespace) -> int:
    """Measure and print; raises ConfigError where there is no PyTorch, or no GPU."""
    import importlib.util

    from everystop.backend import INSTALL

    if not arguments.minutes > 0:
        raise ConfigError(f"--minutes is {arguments.minutes}; it must be above 0")
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f"everystop bench gpu needs PyTorch, which is not installed; {INSTALL}")
    from everystop.trial.gpu.run import run, table

    results = run(
        arguments.device,
        60 * arguments.minutes,
        lambda text: print(f"  {text}", file=sys.stderr, flush=True),
        path=arguments.json,
    )
    print(table(results))
    return 0


def run_steps(arguments: argparse.Namespace) -> int:
    """Measure and print; raises ConfigError for numbers that are none, and what the server says."""
    import asyncio

    from everystop.trial.own_server import OwnServer
    from everystop.trial.steps import measure

    all_rows = _numbers(arguments.rows)
    if arguments.steps < 1 or arguments.context < 1:
        raise ConfigError("--steps and --context must be at least 1")
    costs = []
    with OwnServer([*_room_for(max(all_rows)), *arguments.serve_options]) as server:
        for num_rows in all_rows:
            cost = asyncio.run(measure(server, num_rows, num_steps=arguments.steps, context=arguments.context))
            print(text_of(cost), flush=True)
            costs.append(cost)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([cost.to_dict() for cost in costs], indent=1) + "\n")
    return 0


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"--rows is {text!r}; write numbers of rows, such as 1,32")
    return numbers


def _room_for(num_rows: int) -> Sequence[str]:
    """Options of `serve` for so many rows at once; those behind them win."""
    tokens = max(num_rows, LEAST_TOKENS)
    return ("--max-num-seqs", str(max(num_rows, LEAST_SLOTS)), "--max-num-batched-tokens", str(tokens))


def text_of(cost: StepCost) -> str:
    """A table."""
    last_context = cost.first_context + cost.num_steps
    lines = [
        f"{cost.num_rows} rows: {cost.num_steps} steps of {cost.step_ms:.3f} ms, contexts from about "
        f"{cost.first_context} to {last_context} tokens, {1e3 * cost.num_rows / cost.step_ms:,.0f} tokens a second",
        *_part_lines("engine's thread", cost.engine_ms, cost.step_ms),
        _line("the step", cost.step_ms, cost.step_ms),
        _line("gap between native calls", cost.gap_ms, cost.step_ms),
        *_part_lines("event loop's thread, meanwhile", cost.event_loop_ms, cost.step_ms),
        *_cpu_lines(cost),
    ]
    return "\n".join(lines) + "\n"


def _part_lines(title: str, parts: dict[str, float], step_ms: float) -> list[str]:
    return [f"  {title}", *(_line(f"  {name}", ms, step_ms) for name, ms in parts.items())]


def _cpu_lines(cost: StepCost) -> list[str]:
    cpu, whole = cost.cpu, cost.cpu.server_ms
    return [
        "  processor time, the system's for sockets included",
        _line("  native call, all threads", cpu.native_ms, whole),
        _line("  event loop's thread", cpu.event_loop_ms, whole),
        _line("  engine outside, and others", cpu.others_ms, whole),
        _line("  outside the native call", cpu.event_loop_ms + cpu.others_ms, whole),
        f"    {'the clients, not counted':<28} {cpu.clients_ms:9.3f} ms",
    ]


def _line(name: str, ms: float, whole_ms: float) -> str:
    return f"  {name:<30} {ms:9.3f} ms {100 * ms / whole_ms:6.2f} %"
