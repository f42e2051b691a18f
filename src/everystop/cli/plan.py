"""`everystop plan`: how many replicas carry an arrival rate within latency targets, and with which flags."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everystop.cli import settings, simulate
from everystop.cli.costs import read_cost
from everystop.core.errors import ConfigError

if TYPE_CHECKING:
    from everystop.sim.planner import Progress, Question

MAX_REPLICAS = 4096


def add_parser(commands: Any) -> None:
    """Describe the command and its options; those of trace, machine and scheduler are those of `simulate`."""
    parser = commands.add_parser(
        "plan",
        usage="everystop plan --trace FILE [options]",
        help="find how many replicas a load needs",
        description="Find how many replicas carry an arrival rate within latency targets, by simulating the server's "
        "own scheduler. Ends with 1 if no number of replicas that was tried does.",
        epilog=settings.SIMULATED_EPILOG,
        formatter_class=settings.HelpFormatter,
        allow_abbrev=False,
    )
    simulate.add_trace_options(parser.add_argument_group("trace"))
    add_question(parser.add_argument_group("question"))
    simulate.add_machine_options(parser)
    add = parser.add_argument_group("output").add_argument
    add("--jobs", metavar="N", type=int, help="simulations at once (default: as many as there are cores)")
    add("--out", metavar="DIR", type=settings.path, help="write plan.json, pictures and the recommended flags there")
    add("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(run=run)


def add_question(group: Any) -> None:
    """What is wanted, and where to look."""
    add = group.add_argument
    add("--rate", metavar="R", type=float, help="requests a second that must be carried (default: the trace's own)")
    add("--slo-ttft-p95-ms", metavar="MS", type=float, default=500.0, help="target of TTFT's p95 (default: 500)")
    add("--slo-itl-p95-ms", metavar="MS", type=float, default=50.0, help="target of ITL's p95 (default: 50)")
    add("--replicas", metavar="N", default="1..8", help="such as 1,2,4 or 1..8 (the default)")
    add("--rates", metavar="R", help="such as 1,2,4 or 1..16 (8 in equal ratios; default: half the cliff to the cliff)")
    add(
        "--requests",
        metavar="N",
        type=int,
        default=250,
        help="requests in each simulation for each replica of the largest number; the first fifth is not counted "
        "(default: 250)",
    )
    add("--price", metavar="P", type=float, help="what one replica costs an hour")
    add("--currency", default=None, help="of --price (default: EUR)")
    add("--search", action=argparse.BooleanOptionalAction, default=True, help="try other flags too (default: on)")


def run(arguments: argparse.Namespace) -> int:
    """Plan, print the answer, and write what --out asks for."""
    config = settings.make_config(arguments)
    from everystop.sim.parallel import Workers
    from everystop.sim.plan_report import describe_plan, plan_figures
    from everystop.sim.planner import make_plan
    from everystop.sim.probe import Traffic
    from everystop.sim.traces import read_trace

    question = make_question(arguments)
    options = simulate.trace_options(arguments)
    workload = Traffic(list(read_trace(arguments.trace, options)))
    setup = simulate.make_setup(
        config,
        read_cost(arguments.cost),
        num_blocks=arguments.num_blocks,
        num_replicas=max(question.replicas),
        router=arguments.router,
        max_tokens=workload.longest_output if arguments.max_tokens is None else arguments.max_tokens,
    )
    if arguments.out is not None:
        make_folder(arguments.out)
    with Workers(num_jobs(arguments)) as workers, progress_bar(show=sys.stderr.isatty()) as progress:
        plan = make_plan(question, workload, setup, workers, progress)
    figures = plan_figures(
        plan, trace={"file": arguments.trace.name, **asdict(options)}, given=simulate.changed_settings(config)
    )
    print(json.dumps(figures) if arguments.json else describe_plan(figures))
    if arguments.out is not None:
        write_files(arguments.out, figures)
    return 0 if figures["answer"]["is_met"] else 1


def num_jobs(arguments: argparse.Namespace) -> int:
    """Simulations at once: as asked, else one for each core that may be used."""
    return len(os.sched_getaffinity(0)) if arguments.jobs is None else int(arguments.jobs)


def make_question(arguments: argparse.Namespace) -> Question:
    """The question that the options ask; raises ConfigError."""
    from everystop.sim.planner import Price, Question
    from everystop.sim.probe import Target

    if arguments.price is None and arguments.currency is not None:
        raise ConfigError("--currency needs --price; give what one replica costs an hour")
    price = None if arguments.price is None else Price(per_hour=arguments.price, currency=arguments.currency or "EUR")
    return Question(
        target=Target(ttft_p95_ms=arguments.slo_ttft_p95_ms, itl_p95_ms=arguments.slo_itl_p95_ms),
        replicas=parse_replicas(arguments.replicas),
        rate=arguments.rate,
        rates=None if arguments.rates is None else parse_rates(arguments.rates),
        num_requests=arguments.requests,
        price=price,
        is_searching=arguments.search,
    )


def parse_replicas(text: str) -> list[int]:
    """Whole numbers from "1,2,4" or "1..8"; raises ConfigError."""
    first, dots, last = text.partition("..")
    try:
        numbers = range(int(first), int(last) + 1) if dots else [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"--replicas is {text!r}; write whole numbers, such as 1,2,4 or 1..8") from None
    if any(number > MAX_REPLICAS for number in numbers[-1:]) or len(numbers) > MAX_REPLICAS:
        raise ConfigError(f"--replicas is {text!r}; at most {MAX_REPLICAS:,} can be planned with")
    return list(numbers)


def parse_rates(text: str) -> list[float]:
    """Rates from "0.5,1,2", or eight in equal ratios from "1..16"; raises ConfigError."""
    first, dots, last = text.partition("..")
    try:
        if not dots:
            return [float(word) for word in text.split(",")]
        low, high = float(first), float(last)
    except ValueError:
        raise ConfigError(f"--rates is {text!r}; write numbers, such as 0.5,1,2 or 1..16") from None
    if not 0 < low < high < float("inf"):
        raise ConfigError(f"--rates is {text!r}; a range goes up from a number above 0, such as 1..16")
    from everystop.sim.planner import equal_ratios

    return equal_ratios(low, high)


def make_folder(folder: Path) -> None:
    """Before anything is simulated: raises ConfigError if the results could not be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be written: {error.strerror}; name another folder") from None


def write_files(folder: Path, figures: Mapping[str, Any]) -> None:
    """Write JSON, flags and pictures; raises ConfigError if the folder cannot be written."""
    from everystop.sim.plan_picture import PictureError, draw_plan
    from everystop.sim.plan_report import as_toml, as_yaml

    files = {"plan.json": json.dumps(figures, indent=1) + "\n"}
    if figures["recommended"] is not None:
        files |= {"recommended.yaml": as_yaml(figures), "recommended.toml": as_toml(figures)}
    try:
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        drawn = draw_plan(figures, folder)
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be written: {error.strerror}; name another folder") from error
    except PictureError as error:
        print(f"everystop: {error}", file=sys.stderr)
        drawn = []
    print(f"\nwritten to {folder}: {', '.join([*files, *drawn])}", file=sys.stderr)


@contextlib.contextmanager
def progress_bar(*, show: bool) -> Iterator[Progress]:
    """One bar on standard error; silent where nobody watches."""
    if not show:
        yield lambda what, num, num_all: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
    from rich.progress import Progress as Bars

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(what: str, num: int, num_all: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=0)
            if num == 0:
                bars.update(tasks[what], total=(bars.tasks[tasks[what]].total or 0) + num_all)
            bars.advance(tasks[what], num)

        yield advance
