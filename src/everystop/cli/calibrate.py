"""`everystop calibrate RECORD --out FILE`: step times for the simulator, fitted to a recorded run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "calibrate",
        help="fit step times to a recorded run",
        description="Fit the simulator's step times to a run recorded with `everystop serve --record`.",
        allow_abbrev=False,
    )
    parser.add_argument("record", metavar="RECORD", type=Path, help="what --record has written")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="where the cost model goes, as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Fit, write, and print how far the model is off on steps that it has not seen."""
    from everystop.sim.cost import fit
    from everystop.sim.replay import timed_steps
    from everystop.sim.report import describe_fit

    fitted = fit(timed_steps(arguments.record), source=f"fitted to {arguments.record.name}")
    fitted.model.write(arguments.out)
    print(describe_fit(fitted))
    return 0
