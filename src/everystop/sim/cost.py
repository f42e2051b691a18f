"""How long a simulated step takes: a step-time model read from a file or fitted to recorded steps."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

from everystop.core.errors import EverystopError
from everystop.core.plan import StepPlan
from everystop.core.step_time import StepFeatures, StepTimeModel
from everystop.core.step_time_fit import NUM_FEATURES, solve_nonnegative

COST_VERSION = 1
MIN_FIT_STEPS = 20
HELD_OUT_SHARE = 0.2
RIDGE = 1e-9


class CostError(EverystopError):
    """A cost model that cannot be read, or steps that none can be fitted to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel(StepTimeModel):
    """A step-time model that can be read and written. `source` says where the numbers come from."""

    source: str = ""

    def plan_ns(self, plan: StepPlan) -> int:
        """Time from one step to the next for this plan; one that computes nothing takes none."""
        return max(1, round(self.execute_ns(StepFeatures.of(plan)) + self.host_ns)) if plan.rows else 0

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
        except ValueError as error:
            raise CostError(f"the cost model {path} is not JSON: {error}") from error
        if not isinstance(table, dict) or table.pop("everystop_cost", None) != COST_VERSION:
            raise CostError(f"{path} is no cost model of version {COST_VERSION}; `everystop calibrate` writes one")
        source = table.pop("source", "")
        known = {field.name for field in fields(cls)}
        for name, value in table.items():
            if name not in known:
                raise CostError(f"{path} sets {name!r}; a cost model has {', '.join(sorted(known))}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise CostError(f"{path}: {name} is {value!r}; it must be a number of nanoseconds from 0")
        return cls(**table, source=str(source))


class TimedStep(NamedTuple):
    """A recorded step: its features, the runner's time, and the host's since the step before (None after idling)."""

    features: StepFeatures
    execute_ns: int
    host_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Fit:
    """A model, and how far it is off on the recorded steps that it has not seen: the last fifth.

    Errors are shares: of each step's time (median and 90th percentile), and of the sum of all times, with its sign.
    """

    model: CostModel
    num_steps: int
    num_held_out: int
    median_error: float
    p90_error: float
    total_error: float


def fit(steps: Sequence[TimedStep]) -> Fit:
    """Fit a model by least squares, no coefficient below zero, to the first four fifths of the steps.

    Raises CostError if there are fewer than 20 steps.
    """
    if len(steps) < MIN_FIT_STEPS:
        raise CostError(f"{len(steps)} steps are too few to fit a cost model to; record at least {MIN_FIT_STEPS}")
    num_fitted = len(steps) - int(len(steps) * HELD_OUT_SHARE)
    model = fit_line(steps[:num_fitted])
    held_out = steps[num_fitted:]
    pairs = [(model.execute_ns(step.features), step.execute_ns) for step in held_out]
    errors = sorted(abs(predicted - real) / max(real, 1) for predicted, real in pairs)
    total = sum(real for _, real in pairs)
    return Fit(
        model,
        num_fitted,
        len(held_out),
        errors[len(errors) // 2],
        errors[len(errors) * 9 // 10],
        sum(predicted for predicted, _ in pairs) / max(total, 1) - 1,
    )


def fit_line(steps: Sequence[TimedStep]) -> CostModel:
    """The least-squares model of these steps; of none, one that takes no time."""
    coefficients = _least_squares([(1, *step.features) for step in steps], [step.execute_ns for step in steps])
    step_ns, token_ns, decode_context_ns, prefill_pair_ns, row_ns = coefficients
    host = sorted(step.host_ns for step in steps if step.host_ns is not None)
    return CostModel(
        step_ns=step_ns,
        token_ns=token_ns,
        decode_context_ns=decode_context_ns,
        prefill_pair_ns=prefill_pair_ns,
        row_ns=row_ns,
        host_ns=host[len(host) // 2] if host else 0.0,
    )


def _least_squares(rows: Sequence[tuple[int, ...]], times: Sequence[int]) -> list[float]:
    """Coefficients, none negative. Columns are scaled to a maximum of 1, and a slight ridge decides between equals."""
    columns = range(NUM_FEATURES)
    scales = [max((row[j] for row in rows), default=0) for j in columns]
    scaled = [[row[j] / scales[j] if scales[j] else 0.0 for j in columns] for row in rows]
    products = [[sum(x[i] * x[j] for x in scaled) for j in columns] for i in columns]
    targets = [sum(x[i] * y for x, y in zip(scaled, times, strict=True)) for i in columns]
    for j in columns:
        products[j][j] += RIDGE * len(rows) if scales[j] else 0.0
    solution = solve_nonnegative(products, targets)
    return [value / scale if scale else 0.0 for value, scale in zip(solution, scales, strict=True)]
