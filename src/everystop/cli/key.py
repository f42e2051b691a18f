"""`everystop key`: makes an API key, or the hash of one, as a line for the file of `--api-key-file`."""

from __future__ import annotations

import argparse
import getpass
import secrets
import sys
from typing import Any

from everystop.keys import hash_key, key_line

NUM_RANDOM_BYTES = 32


def add_parser(commands: Any) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "key",
        usage="everystop key [--tenant NAME] [--hash]",
        help="make an API key and the line that stands for it in a file of keys",
        description="Make a random API key, and print it and the line that lets it in, for the file of --api-key-file. "
        "The line holds the key's hash alone, so the file gives no key away.",
        allow_abbrev=False,
    )
    parser.add_argument("--tenant", metavar="NAME", default="", help="the tenant whose key it is (default: nobody's)")
    parser.add_argument(
        "--hash", action="store_true", help="print only the line for a key that is typed in, or that comes by a pipe"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the key, unless it was given, and its line."""
    key = _read_key() if arguments.hash else f"sk-{secrets.token_urlsafe(NUM_RANDOM_BYTES)}"
    line = key_line(arguments.tenant, hash_key(key))
    print(line if arguments.hash else f"key:  {key}\nline: {line}")
    return 0


def _read_key() -> str:
    if sys.stdin.isatty():
        return getpass.getpass("key: ")
    return sys.stdin.readline().rstrip("\r\n")
