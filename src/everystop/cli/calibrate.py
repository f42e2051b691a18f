"""`everystop calibrate RECORD --out FILE`: step times for the simulator, fitted to a recorded run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everystop.sim.cost import StepCost

MEASURED = "measured"


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "calibrate",
        help="fit step times to a recorded run",
        description="Fit the simulator's step times to a run recorded with `everystop serve --record`.",
        allow_abbrev=False,
    )
    parser.add_argument("record", metavar="RECORD", type=Path, help="what --record has written")
    parser.add_argument(
        "--out",
        metavar="FILE",
        default=MEASURED,
        help="where the step times go, as JSON (default: kept in the cache, for simulate's --cost measured)",
    )
    parser.add_argument(
        "--held-out", metavar="RECORD", type=Path, help="another record: say how far its simulation is off"
    )
    parser.set_defaults(run=run)


def cost_path(name: str) -> Path:
    """The file of a cost model: that one, or for "measured" the one kept in EVERYSTOP_HOME."""
    if name != MEASURED:
        return Path(name)
    from everystop.model.home import Home

    return Home.from_environment().root / "cost.json"


def read_cost(name: str) -> StepCost:
    """The step times that `--cost` names: "measured", a preset such as "h200:llama-3.1-8b", or a file.

    Raises CostError, also for "gpu:model" that is no preset.
    """
    from everystop.sim.cost import CostModel
    from everystop.sim.roofline import find_preset

    return find_preset(name) or CostModel.read(cost_path(name))


def run(arguments: argparse.Namespace) -> int:
    """Fit, write, and print how far the model is off on steps that it has not seen."""
    from everystop.sim.report import calibrate, describe_model

    model = calibrate(arguments.record, arguments.held_out)
    model.write(cost_path(arguments.out))
    print(describe_model(model))
    return 0
