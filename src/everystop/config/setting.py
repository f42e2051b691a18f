"""One field of the configuration: its flag, its help, the values that can be honoured, and how they are read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import Field
from typing import Any

from everystop.core.errors import ConfigError

NETWORK, MODEL, SCHEDULER, KV_CACHE, OPERATIONS = GROUPS = ("network", "model", "scheduler", "KV cache", "operations")
DEVICES = ("auto", "cpu", "cuda", "torch")
DTYPES = ("auto", "int8", "float32", "bfloat16", "float16", "fp8")
KV_CACHE_DTYPES = ("auto", "float16", "int8")
GRAPHS = ("start", "lazy", "off")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
FAILURE_ENDS = ("exit", "stay")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(text: str) -> int:
    """Bytes from "512MiB", "2g", "1.5GB" or a plain number; raises ConfigError."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*([kmg]i?)?b?\s*", text.lower())
    if match is None:
        raise ConfigError(f"{text!r} is not a size in bytes; write for example 512MiB or 2g")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def setting(
    default: Any,
    flag: str,
    help_text: str,
    *,
    group: str,
    choices: Sequence[str] | None = None,
    parse: Any = None,
    least: float | None = None,
    most: float | None = None,
    metavar: str | None = None,
    is_secret: bool = False,
) -> Any:
    """A field of `Config`, shown under `group` in the help; only values from `least` to `most` can be honoured.

    `parse` turns a command-line string into the value (default: the type of the default). `metavar` stands for the
    value in the help where neither the flag nor the type says what it is. A value that `is_secret` is never written
    anywhere.
    """
    meta = {
        "flag": flag,
        "help": help_text,
        "group": group,
        "choices": choices,
        "parse": parse or (type(default) if default is not None else str),
        "least": least,
        "most": most,
        "metavar": metavar,
        "is_secret": is_secret,
    }
    return dataclasses.field(default=default, metadata=meta)


def without_credentials(value: Any) -> Any:
    """The value as it may be shown: a name and a password in a URL stand as "…"."""
    return re.sub(r"(?<=://).*@", "…@", value, flags=re.DOTALL) if isinstance(value, str) else value


def check(field: Field[Any], value: Any) -> None:
    """Raise ConfigError for a value outside the field's range, or none of its choices; NaN is in no range."""
    flag, choices, least, most = (field.metadata.get(key) for key in ("flag", "choices", "least", "most"))
    if choices is not None and value not in choices and not (value is None and field.default is None):
        raise ConfigError(f"{flag} is {value!r}; choose one of {', '.join(choices)}")
    if least is None or value is None:
        return
    if not isinstance(value, int | float):
        raise ConfigError(f"{flag} is {value!r}; it must be a number")
    if not value >= least:
        raise ConfigError(f"{flag} is {value}; it must be at least {least}")
    if most is not None and value > most:
        raise ConfigError(f"{flag} is {value:,}; it must be at most {most:,}")
