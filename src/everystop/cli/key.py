"""`everystop key`: makes an API key, or the hash of one, as a line for the file of `--api-key-file`."""

from __future__ import annotations

import argparse
import getpass
import re
import secrets
import sys
from typing import Any

from everystop.core.errors import ConfigError
from everystop.keys import HASH_PREFIX, hash_key

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
    name = arguments.tenant
    if name and re.fullmatch(r"[^\s:#](?:[^:\n\r]*[^\s:])?", name) is None:
        raise ConfigError(f"--tenant is {name!r}; a name has no colon, no blanks at its ends, and no # at its start")
    key = _read_key() if arguments.hash else f"sk-{secrets.token_urlsafe(NUM_RANDOM_BYTES)}"
    line = (f"{name}: " if name else "") + HASH_PREFIX + hash_key(key).digest.hex()
    print(line if arguments.hash else f"key:  {key}\nline: {line}")
    return 0


def _read_key() -> str:
    if sys.stdin.isatty():
        return getpass.getpass("key: ")
    return sys.stdin.readline().rstrip("\r\n")
