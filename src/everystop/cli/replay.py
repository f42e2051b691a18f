"""`everystop replay RECORD`: a recorded run again, under its own policy or another."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from typing import Any

from everystop.cli import settings
from everystop.config.rules import POLICY_OPTIONS
from everystop.core.errors import ConfigError
from everystop.core.policy import POLICIES


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "replay",
        help="repeat a recorded run",
        description="Repeat a run recorded with `everystop serve --record`: check that every plan is the recorded one, "
        "and show what another policy, or other settings, would have made of it. Ends with 1 if a plan differs.",
        formatter_class=settings.HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("record", metavar="RECORD", type=settings.path, help="what --record has written")
    parser.add_argument("--policy", choices=POLICIES, help="simulate this policy (default: the recorded one)")
    group = parser.add_argument_group("settings of that policy")
    for field in settings.flag_fields():
        if field.name in POLICY_OPTIONS:
            settings.add_option(group, field, default="as recorded")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument(
        "--write-workload",
        metavar="FILE",
        type=settings.path,
        help="instead, write the requests of a record with prompts (--record-prompts) as a workload, to send "
        "them again",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Replay, and print what was found."""
    from everystop.scheduling import changed_settings
    from everystop.sim.replay import replay
    from everystop.sim.replay_report import describe_replay, replay_figures

    if arguments.write_workload is not None:
        return write_workload(arguments)
    options = {name: getattr(arguments, name) for name in POLICY_OPTIONS if hasattr(arguments, name)}
    change = partial(changed_settings, options=options) if options else None
    report = replay(arguments.record, policy=arguments.policy, change=change)
    figures = replay_figures(report)
    print(json.dumps(figures) if arguments.json else describe_replay(figures))
    return 0 if report.first_difference is None else 1


def write_workload(arguments: argparse.Namespace) -> int:
    """Write the recorded requests; nothing is replayed."""
    from everystop.observe.record_file import create_private
    from everystop.sim.again import workload_of_record

    if arguments.policy or arguments.json or any(hasattr(arguments, name) for name in POLICY_OPTIONS):
        raise ConfigError("--write-workload replays nothing; leave out the other options")
    lines = workload_of_record(arguments.record)
    try:
        create_private(arguments.write_workload)
        arguments.write_workload.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write-workload {arguments.write_workload}: {error.strerror or error}") from error
    print(f"{arguments.write_workload}: {len(lines) - 1:,} requests", file=sys.stderr)
    return 0
