"""`everystop compare`: the same requests under several policies, measured on this machine, and what that makes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everystop.backend import choose_backend
from everystop.cli import settings, simulate
from everystop.cli.compare_progress import progress_bars
from everystop.cli.compare_requests import add_requests, read_requests
from everystop.cli.compare_server import add_server, on_server
from everystop.config import Config
from everystop.config.rules import POLICY_OPTIONS, check_honoured
from everystop.config.setting import KV_CACHE, MODEL, SCHEDULER
from everystop.core.errors import ConfigError
from everystop.core.policy import POLICIES, honouring
from everystop.scheduling import batch_wait_ms

if TYPE_CHECKING:
    from everystop.observe.comparison import Comparison, Run
    from everystop.sim.workloads import Workload
    from everystop.trial.repeats import Watcher

GROUPS = (MODEL, SCHEDULER, KV_CACHE)
UNUSED = ("policy", "record", "record_prompts")  # a policy is set for each run, and no run is recorded
WITHOUT = (*UNUSED, "chat_template", "generation_config", "seed")  # of these groups, but with no effect here
DEFAULT_POLICIES = "static,continuous"
MAX_REPEATS = 1000


def add_parser(commands: Any) -> None:
    """Describe the command and its options; those of model, scheduler and KV cache are those of `serve`."""
    parser = commands.add_parser(
        "compare",
        usage="everystop compare [MODEL] --out DIR [options]",
        help="run the same requests under several policies and report the difference",
        description="Run the same requests under several policies on this machine, in turns, and write a report. "
        "Ends with 1 if outputs differ between policies, or if a request failed.",
        epilog=settings.SIMULATED_EPILOG,
        formatter_class=settings.HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="as for serve; with --url the model's name there")
    settings.add_config_option(parser)
    add_requests(parser)
    add_method(parser.add_argument_group("method"))
    simulate.add_slo_options(parser.add_argument_group("goodput"))
    add_server(parser.add_argument_group("a running server instead of this program's engine"))
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for field in engine_fields():
        settings.add_option(groups[field.metadata["group"]], field)
    parser.set_defaults(run=run)


def add_method(group: Any) -> None:
    """How it is measured."""
    add = group.add_argument
    add(
        "--policies",
        metavar="NAMES",
        help=f"which, the baseline first (default: {DEFAULT_POLICIES}); with --url one name of your own",
    )
    add("--repeats", metavar="N", type=int, default=5, help="runs of each policy, in turns (default: 5)")
    add("--temperature", metavar="X", type=float, default=0.0, help="draw tokens (default: 0, greedily)")
    add("--seed", metavar="N", type=int, default=argparse.SUPPRESS, help="another one draws other tokens (default: 0)")
    add("--out", metavar="DIR", type=settings.path, required=True, help="folder for report.json and the other files")


def engine_fields() -> Iterator[dataclasses.Field[Any]]:
    """The settings of `serve` that decide what the engine does here."""
    for field in settings.flag_fields():
        if field.metadata["group"] in GROUPS and field.name not in WITHOUT:
            yield field


def run(arguments: argparse.Namespace) -> int:
    """Measure, write, print."""
    if not 1 <= arguments.repeats <= MAX_REPEATS:
        raise ConfigError(f"--repeats is {arguments.repeats}; it must be 1 to {MAX_REPEATS:,}")
    simulate.make_slo(arguments)  # which says what is no time
    workload, max_num_seqs = read_requests(arguments)
    make_folder(arguments.out)
    try:
        with progress_bars(arguments.repeats, show=sys.stderr.isatty()) as watcher:
            if arguments.url is not None:
                refuse_engine_options(arguments)
                comparison = on_server(arguments, workload, watcher, method(arguments, workload, None))
            else:
                comparison = on_engine(arguments, workload, max_num_seqs, watcher)
    except KeyboardInterrupt:
        print("everystop: interrupted before the end of the first run; nothing is written", file=sys.stderr)
        return 130
    from everystop.observe.comparison_text import describe_comparison

    written = write(comparison, arguments.out)  # first: whoever reads the words may leave
    print(describe_comparison(comparison))
    print(f"\nwritten to {arguments.out}: {', '.join(written)}", file=sys.stderr)
    same = comparison.equality().holds
    if not same and arguments.url is None:
        say_if_not_promised(make_configs(arguments, max_num_seqs))
    if not comparison.is_complete:
        return 130
    return 0 if same and not comparison.num_errors else 1


def say_if_not_promised(configs: Mapping[str, Config]) -> None:
    """Outputs differ: on some devices they may, unless they are asked not to."""
    backend = choose_backend(next(iter(configs.values())))
    if not backend.is_deterministic:
        print(
            f"with --device {backend.device} a request's tokens may depend on who else is in its batch; "
            "--deterministic makes outputs equal",
            file=sys.stderr,
        )


def refuse_engine_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options that only an engine of our own has."""
    for field in engine_fields():
        if hasattr(arguments, field.name):
            raise ConfigError(f"{field.metadata['flag']} has no effect with --url: the server has settings of its own")


def make_folder(folder: Path) -> None:
    """Before anything is measured: raises ConfigError if the report could not be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be written: {error.strerror}; name another folder") from None


def make_configs(arguments: argparse.Namespace, max_num_seqs: int | None) -> dict[str, Config]:
    """The configuration of each policy, in their order: the same but for what only some policies honour.

    Raises ConfigError, also for an option that none of them honours.
    """
    policies = parse_policies(DEFAULT_POLICIES if arguments.policies is None else arguments.policies)
    given = settings.given_values(arguments)
    values = {name: value for name, value in given.items() if name not in UNUSED}
    if max_num_seqs is not None:
        values.setdefault("max_num_seqs", max_num_seqs)
    for option, field in POLICY_OPTIONS.items():
        if hasattr(arguments, option) and not set(honouring(field)) & set(policies):
            check_honoured(option, policies[0])
    return {policy: Config(**honoured(values, policy), policy=policy) for policy in policies}


def honoured(values: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """The values without options that have no effect under the policy."""
    return {
        name: value
        for name, value in values.items()
        if name not in POLICY_OPTIONS or policy in honouring(POLICY_OPTIONS[name])
    }


def parse_policies(text: str) -> list[str]:
    """Names between commas; raises ConfigError."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"--policies names {name!r}; choose from {', '.join(POLICIES)}")
    if len(set(names)) < len(names):
        raise ConfigError(f"--policies names a policy twice: {text}; name each once")
    return names


def on_engine(
    arguments: argparse.Namespace, workload: Workload, max_num_seqs: int | None, watcher: Watcher
) -> Comparison:
    """The comparison on engines of this process."""
    configs = make_configs(arguments, max_num_seqs)
    from everystop.trial.bench import Bench, describe_machine
    from everystop.trial.on_engine import EngineRun, Sampling, check_workload
    from everystop.trial.repeats import compare

    first = next(iter(configs.values()))
    bench = Bench(first)
    if wrong := check_workload(workload, bench.num_valid_tokens):
        raise ConfigError(f"{wrong[0]} ({len(wrong)} such); choose other requests, or another model")
    sampling = Sampling(temperature=arguments.temperature, seed=first.seed or 0)

    def play(workload: Workload, policy: str, repeat: int, progress: Callable[[int, int], None]) -> Run:
        engine = bench.engine(configs[policy])
        return EngineRun(workload, engine, sampling).play(policy, repeat, first.max_num_seqs, progress)

    described = {"backend": "everystop", **bench.describe(), **describe_machine(), **engine_settings(configs)}
    return compare(
        workload,
        list(configs),
        arguments.repeats,
        play,
        watcher,
        num_warm_up_jobs=2 * first.max_num_seqs,
        settings=described | method(arguments, workload, sampling.seed if sampling.temperature else None),
    )


def engine_settings(configs: Mapping[str, Config]) -> dict[str, Any]:
    """What the engines were set to: what they have in common, what is not left at its default, and how long batches
    wait where a policy has such.
    """
    usual, found = Config(), {}
    for field in engine_fields():
        values = {policy: getattr(config, field.name) for policy, config in configs.items()}
        changed = [value for value in values.values() if value != getattr(usual, field.name)]
        if changed:
            found[field.name] = changed[0]
    first = next(iter(configs.values()))
    waiting = [policy for policy in configs if policy in honouring(POLICY_OPTIONS["batch_wait_ms"])]
    return {
        "flags": found,
        "batch_wait_ms": {policy: batch_wait_ms(configs[policy]) for policy in waiting},
        "max_num_seqs": first.max_num_seqs,
        "max_num_batched_tokens": first.max_num_batched_tokens,
        "block_size": first.block_size,
    }


def method(arguments: argparse.Namespace, workload: Workload, seed: int | None) -> dict[str, Any]:
    """How it was measured, whoever served."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(arguments.words),
        "load_average": os.getloadavg()[0],
        "num_clients": workload.num_clients or None,
        "temperature": arguments.temperature,
        "seed": seed,
        "slo_ttft_ms": arguments.slo_ttft_ms,
        "slo_itl_ms": arguments.slo_itl_ms,
        "workload_seed": arguments.workload_seed,
        "order": "policies in turns within each repeat, backwards in every second one, after a warm-up",
    }


def command(words: Sequence[str]) -> str:
    """The command as it was typed, without the key."""
    shown = []
    is_key = False
    for word in words:
        name, equals, _ = word.partition("=")
        shown.append("…" if is_key else f"{name}=…" if name == "--api-key" and equals else word)
        is_key = word == "--api-key"
    return shlex.join(["everystop", *shown])


def write(comparison: Comparison, folder: Path) -> list[str]:
    """Write the report in place of an older one; returns the names of the files."""
    from everystop.observe.report import remove_files, write_report
    from everystop.observe.report_data import report_data

    remove_files(folder, POLICIES)
    (folder / "report.json").write_text(json.dumps(report_data(comparison)) + "\n", encoding="utf-8")
    return ["report.json", *(path.name for path in write_report(comparison, folder))]
