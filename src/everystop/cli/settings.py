"""Makes the `Config` from flags, environment variables and a `--config` file; which fields there are, `Config` says.

A flag wins over an environment variable (`EVERYSTOP_` and the flag's name), that over the file, that over the default.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from everystop.config import Config
from everystop.config.setting import GROUPS, parse_bytes
from everystop.core.errors import ConfigError
from everystop.keys import hash_key
from everystop.server_url import EXAMPLE_URL

ENVIRONMENT_PREFIX = "EVERYSTOP_"
OTHER_VARIABLES = ("EVERYSTOP_CONFIG", "EVERYSTOP_HOME", "EVERYSTOP_ISA")
"""Variables that are no field of `Config`: the file of options, the cache folder, the instruction-set path."""
KEY_VARIABLE = f"{ENVIRONMENT_PREFIX}API_KEY"
_SOURCES = (
    "can also be given in the environment (--max-num-seqs as EVERYSTOP_MAX_NUM_SEQS) or as a line of the TOML file "
    'named by --config (max-num-seqs = 32, policy = "fair"); a flag wins over the environment, and that over the file.'
)
EPILOG = f"Each option {_SOURCES}"
SIMULATED_EPILOG = (
    f"Each option that serve has too {_SOURCES} A file made for serve will do: what means nothing here is not used."
)
METAVARS: dict[Any, str] = {int: "N", float: "SECONDS", parse_bytes: "SIZE"}
TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
FALSE_WORDS = frozenset({"0", "false", "no", "off"})


class HelpFormatter(argparse.HelpFormatter):
    """argparse's own look, with room for the longest flags and no wider than is pleasant to read."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=min(shutil.get_terminal_size().columns - 2, 110))


def add_options(parser: argparse.ArgumentParser, *, without: tuple[str, ...] = ()) -> None:
    """Add a flag for each field of `Config` but the model and those of the groups named in `without`."""
    groups: dict[str, Any] = {title: parser.add_argument_group(title) for title in GROUPS if title not in without}
    add_config_option(parser)
    for field in flag_fields():
        if field.metadata["group"] in groups:
            add_option(groups[field.metadata["group"]], field)


def add_remote_options(parser: Any) -> None:
    """Add the flags of a command that looks at a running server: which one, and with which key."""
    parser.add_argument("--url", metavar="URL", default=EXAMPLE_URL, help=f"the server (default: {EXAMPLE_URL})")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"key that the server wants (default: the first of {KEY_VARIABLE}, which no list of processes shows)",
    )
    add_ca_file(parser)


def add_ca_file(parser: Any, **options: Any) -> None:
    """Add the flag that names the certificates to trust."""
    parser.add_argument(
        "--ca-file",
        metavar="FILE",
        help="PEM file with the certificate that the server's own is signed by, or with that itself, for an https URL "
        "(default: those of the system)",
        **options,
    )


def key_to_send(given: str | None) -> str | None:
    """The key of a command that asks a server: the flag's, else the first of the environment's; raises ConfigError."""
    key = given or os.environ.get(KEY_VARIABLE, "").partition(",")[0].strip() or None
    if key is not None and not key.isprintable():
        raise ConfigError("the API key has characters that cannot be printed; give the key itself")
    return key


def add_config_option(parser: Any) -> None:
    """Add the flag for the file of options."""
    parser.add_argument("--config", metavar="FILE", help="a TOML file with options, one a line")


def add_option(group: Any, field: dataclasses.Field[Any], *, default: str | None = None) -> None:
    """Add the flag of one field; an absent flag leaves no attribute, so that the other sources show through.

    `default` says what holds then, where it is not the field's default.
    """
    flag = field.metadata["flag"]
    options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": help_text(field, default)}
    parse = field.metadata["parse"]
    if isinstance(field.default, bool):
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["type"] = as_argparse_type(parse)
        options["choices"] = field.metadata["choices"]
        options["metavar"] = None if options["choices"] else field.metadata["metavar"] or metavar(flag, parse)
        if isinstance(field.default, tuple):
            options["action"] = "append"
    group.add_argument(flag, **options)


def metavar(flag: str, parse: Any) -> str:
    """What stands for the value in the help: its unit, or what kind of value it is."""
    last_word = flag.rpartition("-")[2].upper()
    return "MS" if last_word == "MS" else METAVARS.get(parse, last_word)


def help_text(field: dataclasses.Field[Any], default: str | None = None) -> str:
    """What the field means and its default, unless the text itself says what happens by default."""
    text: str = field.metadata["help"]
    if default is not None:
        text = f"{text.partition(' (default')[0]} (default: {default})"
    elif "(default" not in text and field.default not in (None, ()):
        text += f" (default: {in_words(field.default)})"
    return text.replace("%", "%%")


def in_words(value: Any) -> str:
    """A default as a reader of the help would type it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def path(text: str) -> Path:
    """The type of options that name a file or a folder: the empty text, such as an unset variable of a shell, names
    none, and must not mean the folder that the command runs in.
    """
    if not text:
        raise argparse.ArgumentTypeError("it is empty; name a file or a folder, or leave it out")
    return Path(text)


def as_argparse_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser of one value whose errors argparse reports in its own form."""

    def parse_value(text: str) -> Any:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    parse_value.__name__ = {int: "whole number", float: "number"}.get(parse, "value")  # type: ignore[call-overload]
    return parse_value


def make_config(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Config:
    """The validated `Config` of a command; raises `ConfigError` that names the source and the value."""
    return Config(**given_values(arguments, environment))


def given_values(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The fields of `Config` that flags, environment or file set; raises `ConfigError` as `make_config`."""
    path = getattr(arguments, "config", None) or environment.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    in_file = read_file(Path(path)) if path else {}
    in_environment = read_environment(environment)
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(arguments).items()
        if is_set(name, value)
    }
    values = in_file | in_environment | given

    def source(name: str) -> str:
        if name in given:
            return f"--{name}"
        return f"{ENVIRONMENT_PREFIX}{name.upper()}" if name in in_environment else f"{name} in {path}"

    for name in ("host", "port"):
        if name in values and values.get("uds") is not None:
            raise ConfigError(
                f"{source('uds')} and {source(name)} are both given, but a server listens at one place; leave one out"
            )
    return values


def is_set(name: str, value: Any) -> bool:
    """Whether a parsed argument is a field of `Config` that was given."""
    return value is not None and name in {field.name for field in dataclasses.fields(Config)}


def read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The fields set by environment variables; an empty variable counts as not set, and an unknown one is refused."""
    fields = {ENVIRONMENT_PREFIX + field.name.upper(): field for field in all_fields()}
    refuse_unknown_variables(environment, [*fields, *OTHER_VARIABLES])
    values = {}
    for variable, field in fields.items():
        text = environment.get(variable, "")
        if text:
            words = [word.strip() for word in text.split(",")] if isinstance(field.default, tuple) else text
            values[field.name] = convert(field, words, variable)
    return values


def refuse_unknown_variables(environment: Mapping[str, str], known: list[str]) -> None:
    """Raise ConfigError for a variable with our prefix that nothing reads: a slip would go unnoticed."""
    if all(f"{ENVIRONMENT_PREFIX}SERVICE_{part}" in environment for part in ("HOST", "PORT")):
        raise ConfigError(
            "Kubernetes has set EVERYSTOP_PORT, EVERYSTOP_SERVICE_HOST and others for a Service called everystop; "
            "write enableServiceLinks: false into the pod's spec, or give the Service another name"
        )
    for variable in sorted(environment):
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in known:
            closest = closest_name(variable, known)
            raise ConfigError(f"{variable} is set, but there is no such variable; is it {closest}? Else unset it")


def closest_name(name: str, known: list[str]) -> str:
    """The one of the known names that a slip most likely meant."""
    [closest] = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return closest


def read_file(path: Path) -> dict[str, Any]:
    """The fields set by a TOML file; a key may be spelt with hyphens or underscores, and an unknown one is refused."""
    import tomllib

    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--config {path} is not TOML: {error}") from error
    fields = {field.name: field for field in all_fields()}
    values = {}
    for key, value in table.items():
        field = fields.get(key.replace("-", "_"))
        if field is None:
            closest = closest_name(key, [name.replace("_", "-") for name in fields])
            raise ConfigError(
                f"{path} sets {key!r}, which is no option; is it {closest}? `everystop serve --help` lists them all"
            )
        if field.name in values:
            raise ConfigError(f"{path} sets {field.name.replace('_', '-')} twice; keep one of the lines")
        values[field.name] = convert(field, value, f"{key} in {path}")
    return values


def convert(field: dataclasses.Field[Any], value: Any, source: str) -> Any:
    """A value of the environment (text) or the file (any TOML value) as the field wants it; raises `ConfigError`."""
    if isinstance(field.default, tuple):
        items = value if isinstance(value, list) else [value]
        return tuple(convert_one(field, item, source) for item in items)
    return convert_one(field, value, source)


def convert_one(field: dataclasses.Field[Any], value: Any, source: str) -> Any:
    """One value, checked like a flag's."""
    if isinstance(field.default, bool):
        return as_bool(value, source)
    parse = field.metadata.get("parse", str)
    if "\0" in str(value):
        raise ConfigError(f"{source} has a null character in it, which no option may have; take it out")
    if parse is hash_key and not isinstance(value, str):
        raise ConfigError(f"{source} must be text")  # the value is a secret
    if isinstance(value, bool | dict | list) or (parse is str and not isinstance(value, str)):
        raise ConfigError(f"{source} is {value!r}; it must be {describe(parse)}")
    try:
        return parse(str(value))
    except ValueError as error:
        raise ConfigError(f"{source} is {value!r}; it must be {describe(parse)}") from error
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def describe(parse: Any) -> str:
    """The kind of value that `parse` takes, in words."""
    return {int: "a whole number", float: "a number", parse_bytes: "a size"}.get(parse, "text")


def as_bool(value: Any, source: str) -> bool:
    """A truth value from TOML's own or from a word."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word not in TRUE_WORDS | FALSE_WORDS:
        raise ConfigError(f"{source} is {value!r}; write true or false")
    return word in TRUE_WORDS


def all_fields() -> tuple[dataclasses.Field[Any], ...]:
    """Every field of `Config`."""
    return dataclasses.fields(Config)


def flag_fields() -> Iterator[dataclasses.Field[Any]]:
    """The fields that have a flag: all but the model, which is a word of its own."""
    return (field for field in all_fields() if "flag" in field.metadata)
