"""`everystop serve [MODEL]`: the HTTP server."""

from __future__ import annotations

import argparse
import os
from typing import Any

from everystop.cli import settings

SECRET_VARIABLES = tuple(f"{settings.ENVIRONMENT_PREFIX}{name}" for name in ("API_KEY", "ADMIN_KEY"))


def add_parser(commands: Any) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "serve",
        usage="everystop serve [MODEL] [options]",
        help="serve a model through an OpenAI-compatible API",
        description="Serve a model through an OpenAI-compatible API.",
        epilog=settings.EPILOG,
        formatter_class=settings.HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="smollm2 (the default; fetched once), a .gguf file, or a folder with config.json and safetensors",
    )
    settings.add_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    config = settings.make_config(arguments)
    for variable in SECRET_VARIABLES:  # the configuration has their hashes, and nobody else needs them
        os.environ.pop(variable, None)
    from everystop.server.app import serve

    return serve(config)
