"""How long a simulated step takes: the line of `everystop.core.step_time` with the host's part, read from a file."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from everystop.core.errors import EverystopError
from everystop.core.plan import StepPlan
from everystop.core.step_time import StepFeatures, StepTimeModel

COST_VERSION = 1


class CostError(EverystopError):
    """A cost model that cannot be read, or steps that none can be fitted to."""


class StepCost(Protocol):
    """What the simulator asks of step times; a frozen dataclass, so that results can tell what was assumed."""

    @property
    def source(self) -> str:
        """Where the numbers come from, and how far they were off where they could be checked."""

    @property
    def request_ns(self) -> float:
        """What the server's front end adds to every request's TTFT and E2E."""

    def plan_ns(self, plan: StepPlan) -> int:
        """Time from one step to the next for this plan; one that computes nothing takes none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel(StepTimeModel):
    """A step-time model that can be read and written.

    The host takes `host_ns` + `host_row_ns` for each row between two steps, and `request_ns` once a request. `source`
    says where the numbers come from, and `errors` how far they are off, as shares by name.
    """

    host_ns: float = 0.0
    host_row_ns: float = 0.0
    request_ns: float = 0.0
    source: str = ""
    errors: dict[str, float] = field(default_factory=dict)

    def plan_ns(self, plan: StepPlan) -> int:
        """Time from one step to the next for this plan; one that computes nothing takes none."""
        if not plan.rows:
            return 0
        features = StepFeatures.of(plan)
        return max(1, round(self.execute_ns(features) + self.between_ns(features)))

    def between_ns(self, features: StepFeatures) -> float:
        """The host's time beside a step of these features."""
        return self.host_ns + self.host_row_ns * features.num_rows

    def numbers(self) -> dict[str, float]:
        """The nanoseconds by name."""
        return {name: value for name, value in asdict(self).items() if name not in ("source", "errors")}

    def write(self, path: Path) -> None:
        """Write the numbers as JSON; raises CostError if the file cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"everystop_cost": COST_VERSION} | asdict(self), indent=2) + "\n", "utf-8")
        except OSError as error:
            raise CostError(f"{path} cannot be written: {error.strerror}") from error

    @classmethod
    def read(cls, path: Path) -> CostModel:
        """Read what `write` wrote; raises CostError for anything else."""
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CostError(
                f"there are no step times {path}; record a run with `everystop serve --record FILE`, then run "
                "`everystop calibrate FILE`"
            ) from None
        except OSError as error:
            raise CostError(f"the cost model {path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise CostError(f"the cost model {path} is not JSON: {error}") from error
        if not isinstance(table, dict) or table.pop("everystop_cost", None) != COST_VERSION:
            raise CostError(f"{path} is no cost model of version {COST_VERSION}; `everystop calibrate` writes one")
        source, errors = table.pop("source", ""), table.pop("errors", {})
        known = {field.name for field in fields(cls)}
        for name, value in table.items():
            if name not in known:
                raise CostError(f"{path} sets {name!r}; a cost model has {', '.join(sorted(known))}")
            if not _is_number(value) or value < 0:
                raise CostError(f"{path}: {name} is {value!r}; it must be a number of nanoseconds from 0")
        if not isinstance(errors, dict) or not all(map(_is_number, errors.values())):
            raise CostError(f"{path}: errors is {errors!r}; it must be an object of numbers, or be left out")
        return cls(**table, source=str(source), errors=errors)


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
