"""The command line: reads the words, hands them to one command, and turns named errors into one sentence.

It knows the commands' names and flags; what a command needs is imported only once it runs, so `--help` stays quick.
argparse is used because it is the only parser that costs nothing at start-up: it is in the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from everystop import __version__
from everystop.cli import (
    batch,
    bench,
    cache,
    calibrate,
    claims,
    compare,
    doctor,
    explain,
    key,
    plan,
    pull,
    replay,
    serve,
    simulate,
    top,
    trace,
)
from everystop.core.errors import ConfigError, EverystopError

EPILOG = "In a clone, `./everystop test` runs the linters and the tests."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0 done, 1 failed, 2 called wrongly, 130 interrupted.

    A reader of the output that leaves early, such as `| head`, is a silent 1; output that cannot be written, such as on
    a full disk, is a 1 with one sentence.
    """
    _open_standard_streams()
    try:
        return _run(argv)
    finally:
        _give_up_output()


def _run(argv: Sequence[str] | None) -> int:
    arguments: argparse.Namespace | None = None
    try:
        arguments = make_parser().parse_args(argv)
        arguments.words = list(sys.argv[1:] if argv is None else argv)
        status = int(arguments.run(arguments))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        return 1
    except EverystopError as error:
        return _fail(str(error), 2 if isinstance(error, ConfigError) else 1)
    except OSError as error:
        return _fail(_describe(error))
    except MemoryError:
        return _fail(f"the memory is used up; {_what_takes_less(arguments)}")
    except KeyboardInterrupt:
        return 130


def _fail(sentence: str, status: int = 1) -> int:
    """Say it, if standard error can be written; returns the exit status."""
    with contextlib.suppress(OSError):
        print(f"everystop: {sentence}", file=sys.stderr, flush=True)
    return status


def _what_takes_less(arguments: argparse.Namespace | None) -> str:
    """What helps where memory ends, by what the command was given."""
    if hasattr(arguments, "num_blocks"):
        return "lower --num-blocks or --replicas"
    if hasattr(arguments, "record") and not hasattr(arguments, "config"):
        return "take a shorter record, or read it where there is more"
    return "lower --kv-cache-memory or --max-num-batched-tokens"


def _describe(error: OSError) -> str:
    """What the system did not do; without a file it was standard output that could not be written."""
    reason = error.strerror or str(error) or type(error).__name__
    return f"standard output: {reason}" if error.filename is None else f"{error.filename}: {reason}"


def _open_standard_streams() -> None:
    """Open what the caller has closed on /dev/null: else the next file that is opened would get its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def _give_up_output() -> None:
    """Let what cannot be written go to /dev/null: Python flushes it once more at its end, and would say so."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets `run`, a function of the parsed arguments."""
    parser = argparse.ArgumentParser(
        prog="everystop", description="An LLM inference server with continuous batching.", epilog=EPILOG
    )
    parser.add_argument("--version", action="version", version=f"everystop {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (
        serve, pull, cache, doctor, key, batch, bench, compare, claims, top, explain, simulate, plan, calibrate, replay,
        trace,
    ):  # fmt: skip
        command.add_parser(commands)
    return parser
