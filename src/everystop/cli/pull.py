"""`everystop pull [MODEL]`: fetch a model into the cache."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "pull",
        help="fetch a model into the cache",
        description="Fetch a model into the cache (EVERYSTOP_HOME, by default ~/.cache/everystop) and check it.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", default="smollm2", help="name of the model: smollm2")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Fetch, check, and print where the model lies."""
    from everystop.model.home import Home
    from everystop.model.pull import pull

    print(pull(arguments.model, Home.from_environment()))
    return 0
