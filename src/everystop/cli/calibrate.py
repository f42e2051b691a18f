"""`everystop calibrate RECORD --out FILE`: step times for the simulator, fitted to a recorded run."""

from __future__ import annotations

import argparse
from typing import Any

from everystop.cli import settings
from everystop.cli.costs import MEASURED, cost_path


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "calibrate",
        help="fit step times to a recorded run",
        description="Fit the simulator's step times to a run recorded with `everystop serve --record`.",
        allow_abbrev=False,
    )
    parser.add_argument("record", metavar="RECORD", type=settings.path, help="what --record has written")
    parser.add_argument(
        "--out",
        metavar="FILE",
        default=MEASURED,
        help="where the step times go, as JSON (default: kept in the cache, for simulate's --cost measured)",
    )
    parser.add_argument(
        "--held-out", metavar="RECORD", type=settings.path, help="another record: say how far its simulation is off"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Fit, write, and print how far the model is off on steps that it has not seen."""
    from everystop.sim.report import describe_model
    from everystop.sim.run import calibrate

    model = calibrate(arguments.record, arguments.held_out)
    model.write(cost_path(arguments.out))
    print(describe_model(model))
    return 0
