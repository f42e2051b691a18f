"""`everystop batch IN.jsonl OUT.jsonl`: answer a file of requests without a server."""

from __future__ import annotations

import argparse
from typing import Any

from everystop.cli import settings
from everystop.config.setting import NETWORK, OPERATIONS


def add_parser(commands: Any) -> None:
    """Describe the command and its options: those of `serve` that do not concern a running server."""
    parser = commands.add_parser(
        "batch",
        usage="everystop batch IN.jsonl OUT.jsonl [options]",
        help="answer a file of requests",
        description="Answer the requests of a JSON-lines file, in the form of OpenAI's batch API; "
        "a second run goes on where the first one stopped.",
        epilog=settings.EPILOG,
        formatter_class=settings.HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("input", metavar="IN.jsonl", type=settings.path, help="requests, one a line")
    parser.add_argument(
        "output", metavar="OUT.jsonl", type=settings.path, help="answers, one a line; extended where it exists"
    )
    parser.add_argument("--model", metavar="MODEL", help="as for serve (default: smollm2)")
    settings.add_options(parser, without=(NETWORK, OPERATIONS))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Answer what has no answer yet."""
    config = settings.make_config(arguments)
    from everystop.server.batch import run_batch

    return run_batch(config, arguments.input, arguments.output)
