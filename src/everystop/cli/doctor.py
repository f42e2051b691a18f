"""`everystop doctor [MODEL]`: whether a server with these options would find what it needs on this machine."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from everystop.cli import settings
from everystop.config import Config
from everystop.core.errors import ConfigError

if TYPE_CHECKING:
    from everystop.checkup.finding import Finding


def add_parser(commands: Any) -> None:
    """Describe the command; it takes the options of `serve`."""
    parser = commands.add_parser(
        "doctor",
        usage="everystop doctor [MODEL] [options]",
        help="look whether a server would find what it needs",
        description="Look whether `everystop serve`, with the same options, would find what it needs on this machine. "
        "One line a finding: ok, warn or fail, and what to do. Ends with 1 if something fails.",
        epilog=settings.EPILOG,
        formatter_class=settings.HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="as for serve")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    settings.add_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what is found; 1 if something fails."""
    from everystop.checkup import examine
    from everystop.checkup.finding import Finding, Status

    try:
        config = settings.make_config(arguments)
        findings = [Finding("options", Status.OK, "well formed, and they go together")]
    except ConfigError as error:
        config, findings = Config(), [Finding("options", Status.FAIL, str(error))]
    findings += examine(config)
    _print(findings, as_json=arguments.json)
    return int(any(finding.status is Status.FAIL for finding in findings))


def _print(findings: list[Finding], *, as_json: bool) -> None:
    if as_json:
        told = [
            {"name": one.name, "status": one.status.value, "text": one.text, "advice": one.advice} for one in findings
        ]
        print(json.dumps({"findings": told}, indent=2))
        return
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        advice = f" -> {finding.advice}" if finding.advice else ""
        print(f"{finding.status.value:<4}  {finding.name:<{width}}  {finding.text}{advice}")
