"""`everystop claims`: the claims that are made for continuous batching, measured on this machine, and their page."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everystop.backend import choose_backend, settled
from everystop.cli import settings
from everystop.config import Config
from everystop.core.errors import ConfigError

if TYPE_CHECKING:
    from everystop.claims.claim import Claim
    from everystop.claims.lab import Lab
    from everystop.claims.results import Result

ENGINE = ("device", "dtype", "cuda_graphs", "deterministic", "threads")
"""The settings of `serve` that may be chosen; all others are the claims' own."""
DEFAULT_REPEATS = 5
MAX_REPEATS = 100


def add_parser(commands: Any) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "claims",
        usage="everystop claims [MODEL] [--only N ...] [options]",
        help="measure what is claimed for continuous batching, with a verdict for each claim",
        description="Measure the claims that are made for continuous batching, and write claims.md: a figure, a "
        "picture and a verdict for each. Claims that are not measured keep what an earlier run found.",
        epilog=settings.SIMULATED_EPILOG,
        formatter_class=settings.HelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="as for serve (default: smollm2)")
    add("--only", metavar="N", nargs="+", type=int, help="measure these claims alone")
    add(
        "--repeats",
        metavar="N",
        type=int,
        default=DEFAULT_REPEATS,
        help="runs of each trial, in turns (default: 5), twice and four times as many for a claim that they leave "
        "undecided; with 1 there are no intervals",
    )
    add("--out", metavar="DIR", type=settings.path, help="folder to write to (default: docs in a clone, else ./claims)")
    add("--draw", action="store_true", help="measure nothing; draw pictures and page again from claims.json")
    settings.add_config_option(parser)
    engine = parser.add_argument_group("what computes")
    for field in settings.flag_fields():
        if field.name in ENGINE:
            settings.add_option(engine, field)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure claim by claim; what is done is kept, also when interrupted."""
    if not 1 <= arguments.repeats <= MAX_REPEATS:
        raise ConfigError(f"--repeats is {arguments.repeats}; it must be 1 to {MAX_REPEATS}")
    from everystop.claims.everything import CLAIMS
    from everystop.claims.results import read_results
    from everystop.observe.report.drawing import matplotlib

    chosen = choose(CLAIMS, arguments.only)
    matplotlib()  # what cannot be drawn need not be measured
    folder = arguments.out or default_folder()
    make_folder(folder)
    book = Book(folder, read_results(folder), CLAIMS)
    if arguments.draw:
        return book.draw_again(chosen)
    with progress(show=sys.stderr.isatty()) as watcher:
        return measure(arguments, chosen, book, watcher)


def choose(claims: Sequence[Claim], only: Sequence[int] | None) -> list[Claim]:
    """The claims of these numbers, or all; raises ConfigError for a number that there is not."""
    if only is None:
        return list(claims)
    known = {claim.number: claim for claim in claims}
    for number in only:
        if number not in known:
            raise ConfigError(f"--only names claim {number}; there are {', '.join(map(str, known))}")
    return [known[number] for number in sorted(set(only))]


def default_folder() -> Path:
    """`docs` where this is a clone, else `claims`."""
    return Path("docs") if Path("src", "everystop", "claims").is_dir() and Path("docs").is_dir() else Path("claims")


def make_folder(folder: Path) -> None:
    """Raises ConfigError if nothing could be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "claims.json.try").touch()
        (folder / "claims.json.try").unlink()
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be written: {error.strerror}; name another folder") from None


def measure(arguments: argparse.Namespace, chosen: Sequence[Claim], book: Book, watcher: Bars) -> int:
    """Measure, write after each claim, print its verdict; 130 if interrupted."""
    from everystop.claims.findings import CONFIDENCE
    from everystop.claims.server_lab import ServerLab
    from everystop.trial.interrupts import ended_in_order, noted_interrupts

    load_average = os.getloadavg()[0]  # of others: nothing runs here yet
    lab = ServerLab(make_config(arguments), arguments.repeats, watcher)
    try:
        with ended_in_order(), noted_interrupts() as watcher.check:
            settings = {**lab.describe(), "command": shlex.join(["everystop", *arguments.words])}
            settings |= {"load_average": round(load_average, 1), "confidence": CONFIDENCE}
            for place, claim in enumerate(chosen):
                watcher.name = f"claim {claim.number} ({place + 1} of {len(chosen)})"
                result = measure_one(claim, lab, settings)
                book.write({claim: result})
                watcher.say(verdict_line(claim, result))
    except KeyboardInterrupt:
        watcher.say("interrupted: the claims above are written, the others as they were")
        return 130
    watcher.say(f"written to {book.folder / 'claims.md'}")
    return 0


def make_config(arguments: argparse.Namespace) -> Config:
    """The model, what computes, and what depends on that; raises ConfigError, also for what has no effect there."""
    given = settings.given_values(arguments)
    config = Config(**{name: value for name, value in given.items() if name in ("model", *ENGINE)})
    return settled(config, choose_backend(config))


def measure_one(claim: Claim, lab: Lab, settings: dict[str, Any]) -> Result:
    """One claim, run on while that may decide it."""
    from everystop.claims.looks import look
    from everystop.claims.results import Result

    began_s, client_cpu_s = time.monotonic(), lab.client_cpu_s
    findings = look(claim.measure, lab)
    date = datetime.now(UTC).strftime("%-d %B %Y")
    return Result(
        findings=findings,
        settings=settings | {"date": date},
        seconds=round(time.monotonic() - began_s, 1),
        client_cpu_s=round(lab.client_cpu_s - client_cpu_s, 1),
    )


@dataclass(frozen=True, slots=True)
class Book:
    """The folder that results are in, those known so far by number, and all claims there are."""

    folder: Path
    results: dict[int, Result]
    claims: Sequence[Claim]

    def write(self, new: Mapping[Claim, Result]) -> None:
        """Take in what was found, and write it, the page and the pictures of what is new."""
        from everystop.claims.results import draw_result, write_results

        self.results.update({claim.number: result for claim, result in new.items()})
        write_results(self.folder, self.results, self.claims)
        for claim, result in new.items():
            draw_result(self.folder, claim, result.findings)

    def draw_again(self, chosen: Sequence[Claim]) -> int:
        """The page, and the pictures of these claims; raises ConfigError if none of them has a result."""
        known = {claim: self.results[claim.number] for claim in chosen if claim.number in self.results}
        if not known:
            raise ConfigError(f"--draw: {self.folder} has no results of these claims; measure them first")
        self.write(known)
        return 0


def verdict_line(claim: Claim, result: Result) -> str:
    """What a claim came to, in a line."""
    findings = result.findings
    return f"{claim.number}. {claim.title}: {findings.verdict.value} ({result.seconds:.0f} s)\n   {findings.headline}"


@dataclass(slots=True)
class Bars:
    """Shows how far the claims have come, and says what was found."""

    bars: Any
    task: Any
    name: str = "the model is being loaded"
    check: Callable[[], None] = lambda: None  # raises KeyboardInterrupt if there has been one

    def begin(self, words: str) -> None:
        """Something begins."""
        self.bars.update(self.task, description=f"{self.name}: {words}", completed=0, total=None)

    def advance(self, num_over: int, num_all: int) -> None:
        """So many of its requests are over."""
        self.check()
        self.bars.update(self.task, completed=num_over, total=num_all)

    def say(self, words: str) -> None:
        """A line above the bar."""
        self.bars.console.print(words, highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def progress(*, show: bool) -> Iterator[Bars]:
    """One bar on standard error for what is being done; without somebody who watches, only the lines."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    layout = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(
        *layout, console=Console(stderr=True), transient=True, disable=not show, refresh_per_second=2
    ) as bars:
        yield Bars(bars, bars.add_task("the model is being loaded", total=None))
