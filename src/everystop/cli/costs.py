"""Where the step times are that `--cost` names: for every command that simulates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everystop.sim.cost import StepCost

MEASURED = "measured"


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
