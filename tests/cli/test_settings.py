"""Where a setting comes from, and what is said when it is wrong."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everystop.cli import make_parser, settings
from everystop.config import Config
from everystop.config.setting import GROUPS, parse_bytes
from everystop.core.errors import ConfigError
from everystop.keys import KeyHash, hash_key


def keys(*texts: str) -> tuple[KeyHash, ...]:
    return tuple(map(hash_key, texts))


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model", nargs="?")
    settings.add_options(parser)
    return parser.parse_args(words)


def config(*words: str, **environment: str) -> Config:
    return settings.make_config(parse(*words), environment)


def test_nothing_given_means_the_defaults() -> None:
    assert config() == Config()


def test_flags_set_their_fields() -> None:
    made = config(
        "m.gguf", "--port", "0", "--kv-cache-memory", "1.5GiB", "--no-enable-prefix-caching", "--api-key", "a"
    )
    assert made == Config(
        model="m.gguf", port=0, kv_cache_memory=3 * 2**29, enable_prefix_caching=False, api_key=("a",)
    )


def test_every_field_has_a_flag_and_a_group() -> None:
    fields = [field.name for field in dataclasses.fields(Config) if field.name != "model"]
    assert [field.name for field in settings.flag_fields()] == fields
    assert {field.metadata["group"] for field in settings.flag_fields()} == set(GROUPS)


def test_repeated_flag_collects_values() -> None:
    assert config("--api-key", "a", "--api-key", "b").api_key == keys("a", "b")


def test_admin_keys_and_the_slow_log_are_set_by_flag_or_environment() -> None:
    flags = config("--admin-key", "a", "--admin-key", "b", "--slow-log", "250", "--explain-history", "5")
    assert flags == config(EVERYSTOP_ADMIN_KEY="a, b", EVERYSTOP_SLOW_LOG="250", EVERYSTOP_EXPLAIN_HISTORY="5")
    assert (flags.admin_key, flags.slow_log, flags.explain_history) == (keys("a", "b"), 250.0, 5)


def test_flag_wins_over_environment_and_that_over_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("port = 1\nmax-num-seqs = 2\npolicy = 'static'\nbatch_wait_ms = 3\n")
    made = config("--config", str(file), "--port", "10", EVERYSTOP_PORT="20", EVERYSTOP_MAX_NUM_SEQS="20")
    assert (made.port, made.max_num_seqs, made.batch_wait_ms) == (10, 20, 3)


def test_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('model = "x.gguf"\napi-key = ["a", "b"]\nenable-prefix-caching = false\nshutdown-timeout = 5\n')
    made = config(EVERYSTOP_CONFIG=str(file))
    assert made == Config(model="x.gguf", api_key=("a", "b"), enable_prefix_caching=False, shutdown_timeout=5.0)


def test_environment_holds_lists_and_truth_values() -> None:
    made = config(EVERYSTOP_API_KEY="a, b", EVERYSTOP_ENABLE_PREFIX_CACHING="Off", EVERYSTOP_SEED="")
    assert made == Config(api_key=("a", "b"), enable_prefix_caching=False)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("prot = 1", ["'prot'", "is it port?", "serve --help"]),
        ("max_num_seq = 1", ["is it max-num-seqs?"]),
        ("log-formats = 'json'", ["is it log-format?"]),
        ('port = "x"', ["port in", "'x'", "a whole number"]),
        ("port = 1.5", ["port in", "1.5", "a whole number"]),
        ("port = true", ["port in", "True", "a whole number"]),
        ("host = 1", ["host in", "text"]),
        ("seed = [1]", ["seed in", "[1]"]),
        ('enable-prefix-caching = "maybe"', ["enable-prefix-caching in", "true or false"]),
        ('kv-cache-memory = "lots"', ["kv-cache-memory in", "512MiB"]),
        ('dtype = "int4"', ["--dtype", "int4", "int8"]),
        ("port = ", ["is not TOML"]),
        ('record = "a\\u0000b"', ["record in", "null character"]),
        ('served-model-name = ["a\\u0000b"]', ["served-model-name in", "null character"]),
    ],
)
def test_wrong_line_of_a_file_is_named(tmp_path: Path, line: str, words: list[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text(line + "\n")
    with pytest.raises(ConfigError) as caught:
        config("--config", str(file))
    assert [word for word in words if word not in str(caught.value)] == []


def test_option_that_a_file_sets_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "everystop.toml"
    file.write_text("max-num-seqs = 5\nmax_num_seqs = 6\n")
    with pytest.raises(ConfigError, match="max-num-seqs twice"):
        config("--config", str(file))


def test_names_of_the_model_are_collected_in_order() -> None:
    made = config("--served-model-name", "a", "--served-model-name", "b")
    assert made.served_model_name == ("a", "b")
    assert made == config(EVERYSTOP_SERVED_MODEL_NAME="a, b")


@pytest.mark.parametrize("words", [["--host", "127.0.0.1"], ["--port", "8000"], ["--port", "9"]])
def test_a_path_and_an_address_are_two_places(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--uds and {words[0]}"):
        config("--uds", "/run/s", *words)
    with pytest.raises(ConfigError, match=r"^--uds and EVERYSTOP_PORT are both given"):
        config("--uds", "/run/s", EVERYSTOP_PORT="8000")
    with pytest.raises(ConfigError, match=r"^EVERYSTOP_UDS and --host are both given"):
        config("--host", "::1", EVERYSTOP_UDS="/run/s")
    file = tmp_path / "served.toml"
    file.write_text('uds = "/run/s"')
    with pytest.raises(ConfigError, match=rf"^uds in {re.escape(str(file))} and EVERYSTOP_PORT are both given"):
        config("--config", str(file), EVERYSTOP_PORT="8000")
    assert config("--uds", "/run/s").uds == "/run/s"


def test_every_setting_can_come_from_each_source(tmp_path: Path) -> None:
    """A flag, a variable and a line of the file for each field; what they say is what the flag says."""
    fields = [field for field in settings.flag_fields() if field.name not in ("host", "port")]
    for field in fields:
        text = sample(field)
        name = field.metadata["flag"].removeprefix("--")
        words = [field.metadata["flag"]] if isinstance(field.default, bool) else [field.metadata["flag"], text]
        by_flag = settings.given_values(parse(*words), {})
        by_variable = settings.given_values(parse(), {f"EVERYSTOP_{field.name.upper()}": text})
        file = tmp_path / "c.toml"
        file.write_text(f"{name} = {toml_value(field, text)}\n")
        by_file = settings.given_values(parse("--config", str(file)), {})
        assert by_flag == by_variable == by_file, name
        assert list(by_flag) == [field.name]


def sample(field: dataclasses.Field[Any]) -> str:
    """A value of the field's kind, as a flag takes it."""
    if isinstance(field.default, bool):
        return "true"
    if field.metadata["choices"]:
        return str(field.metadata["choices"][-1])
    return "7" if field.metadata["parse"] in (int, float, parse_bytes) else "text"


def toml_value(field: dataclasses.Field[Any], text: str) -> str:
    if isinstance(field.default, bool) or field.metadata["parse"] in (int, float):
        return text
    return f'["{text}"]' if isinstance(field.default, tuple) else f'"{text}"'


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read: No such file"):
        config("--config", str(tmp_path / "none.toml"))


def test_wrong_environment_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="EVERYSTOP_THREADS is 'two'; it must be a whole number"):
        config(EVERYSTOP_THREADS="two")


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("EVERYSTOP_MAX_NUM_SEQ", "EVERYSTOP_MAX_NUM_SEQS"),
        ("EVERYSTOP_BLOCKSIZE", "EVERYSTOP_BLOCK_SIZE"),
        ("EVERYSTOP_ISAS", "EVERYSTOP_ISA"),
        ("EVERYSTOP_PORTS", "EVERYSTOP_PORT"),
    ],
)
@pytest.mark.parametrize("value", ["32", ""])
def test_misspelt_environment_variable_is_refused_with_the_closest_name(slip: str, meant: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{slip} is set.* is it {meant}\?"):
        config(**{slip: value})


def test_variables_that_are_no_settings_are_known() -> None:
    assert config(EVERYSTOP_HOME="/x", EVERYSTOP_ISA="avx2", EVERYSTOPPED="1", PATH="/bin") == Config()


def test_help_names_the_unit_of_a_time() -> None:
    for field in settings.flag_fields():
        shown = settings.metavar(field.metadata["flag"], field.metadata["parse"])
        assert (shown == "MS") == field.name.endswith("_ms"), field.name
        if field.metadata["parse"] is float and not field.metadata["metavar"] and shown != "MS":
            assert "second" in f"{field.name} {field.metadata['help']}", f"{field.name} is said to be in seconds"
    assert settings.metavar("--ageing", float) == "SECONDS"
    assert settings.metavar("--max-num-seqs", int) == "N"


def test_help_names_each_default_once() -> None:
    for field in settings.flag_fields():
        text = settings.help_text(field)
        assert text.count("(default") == (0 if field.default in (None, ()) and "(default" not in text else 1)
    assert settings.help_text(next(f for f in settings.flag_fields() if f.name == "max_num_seqs")).endswith(
        "(default: 64)"
    )


def test_no_error_repeats_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.toml"
    said = []
    for value in ("7654321", '"7654321 "', "[7654321]", '{ a = "7654321" }', '["sha256:7654321"]'):
        file.write_text(f"api-key = {value}\n")
        with pytest.raises(ConfigError, match="api-key") as caught:
            config("--config", str(file))
        said.append(str(caught.value))
    with pytest.raises(ConfigError, match="EVERYSTOP_ADMIN_KEY") as caught:
        config(EVERYSTOP_ADMIN_KEY="sha256:7654321")
    with pytest.raises(SystemExit):
        parse("--api-key", "7654321 ")
    assert "7654321" not in " ".join([*said, str(caught.value), capsys.readouterr().err])


def test_a_configuration_shows_no_key() -> None:
    made = config("--api-key", "7654321", EVERYSTOP_ADMIN_KEY="1234567", EVERYSTOP_API_KEY_FILE="keys.txt")
    assert made.api_key_file == "keys.txt"
    shown = repr(made) + str(dataclasses.asdict(made))
    assert "7654321" not in shown
    assert "1234567" not in shown
    assert hash_key("7654321").digest.hex() not in repr(made)


def options_of(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Each option and argument of a parser and of its commands, behind the words that lead there."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield from options_of(command, (*words, name))
        else:
            yield words, action


PATHS = [
    pytest.param(
        words, action, id=" ".join((*words, action.option_strings[0] if action.option_strings else action.dest))
    )
    for words, action in options_of(make_parser())
    if action.type in (Path, settings.path)
]


@pytest.mark.parametrize(("words", "action"), PATHS)
def test_an_empty_path_is_refused_by_name(
    words: tuple[str, ...], action: argparse.Action, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be the folder that the command runs in."""
    assert action.type is settings.path
    given = [action.option_strings[0], ""] if action.option_strings else [""] * 2
    with pytest.raises(SystemExit) as stopped:
        make_parser().parse_args([*words, *given])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "it is empty; name a file or a folder" in error
    assert not action.option_strings or f"argument {action.option_strings[0]}" in error


def test_there_are_paths_to_be_refused() -> None:
    assert len(PATHS) > 12
