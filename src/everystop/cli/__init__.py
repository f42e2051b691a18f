"""The command line: reads the words, hands them to one command, and turns named errors into one sentence.

It knows the commands' names and flags; what a command needs is imported only once it runs, so `--help` stays quick.
argparse is used because it is the only parser that costs nothing at start-up: it is in the standard library.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from everystop import __version__
from everystop.cli import (
    batch,
    calibrate,
    claims,
    compare,
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

    A reader of the output that leaves early, such as `| head`, is a silent 1.
    """
    parser = make_parser()
    arguments = parser.parse_args(argv)
    arguments.words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = int(arguments.run(arguments))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
        return 1
    except EverystopError as error:
        print(f"everystop: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except MemoryError:
        is_simulated = hasattr(arguments, "num_blocks")
        options = "--num-blocks or --replicas" if is_simulated else "--kv-cache-memory or --max-num-batched-tokens"
        print(f"everystop: the memory is used up; lower {options}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets `run`, a function of the parsed arguments."""
    parser = argparse.ArgumentParser(
        prog="everystop", description="An LLM inference server with continuous batching.", epilog=EPILOG
    )
    parser.add_argument("--version", action="version", version=f"everystop {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (serve, pull, key, batch, compare, claims, top, explain, simulate, plan, calibrate, replay, trace):
        command.add_parser(commands)
    return parser
