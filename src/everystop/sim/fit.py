"""Fits a cost model to recorded steps, so that a step which another program held up does not bend it.

Iteratively reweighted least squares over relative errors: a step far from the line, by the spread of the others, counts
less (Huber 1964), and at last not at all (Beaton and Tukey 1974, the biweight). What the steps do not tell comes from a
prior: each coefficient is drawn to it as if it had been known to within its own size, which many steps outweigh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from statistics import median
from typing import NamedTuple

from everystop.core.step_time import UNKNOWN_STEP_TIMES, StepFeatures, StepTimeModel
from everystop.core.step_time_fit import solve_nonnegative
from everystop.sim.cost import CostError, CostModel

MIN_FIT_STEPS = 20
HELD_OUT_SHARE = 0.2
HUBER, BIWEIGHT = 1.345, 4.685  # in standard deviations; 95 % as efficient as least squares where nothing is held up
HUBER_ROUNDS, MAX_ROUNDS = 6, 30
MIN_SPREAD = 1e-3
SETTLED = 1e-4
DEVIATIONS = 1.4826  # standard deviations in a median absolute deviation, of normal errors

# A 135M model on two cores, where the record does not tell what its server measured when it started.
PRIOR = StepTimeModel(step_ns=5.5e6, token_ns=3.3e5, decode_context_ns=500, prefill_pair_ns=300, row_ns=5e4)


class TimedStep(NamedTuple):
    """A recorded step: its features, the runner's time, and the host's since the step before (None after idling)."""

    features: StepFeatures
    execute_ns: int
    host_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Fit:
    """A model, and how far it is off on the recorded steps that it has not seen: the last fifth.

    Errors are shares: of each step's time (median and 90th percentile), and of the sum of all times, with its sign.
    `held_up_share` is the share of the fitted steps that were set aside.
    """

    model: CostModel
    num_steps: int
    num_held_out: int
    median_error: float
    p90_error: float
    total_error: float
    held_up_share: float


def fit(steps: Sequence[TimedStep], prior: StepTimeModel = UNKNOWN_STEP_TIMES) -> Fit:
    """Fit a model to the first four fifths of the steps, drawn to the proportions of `prior`.

    Raises CostError if there are fewer than 20 steps.
    """
    if len(steps) < MIN_FIT_STEPS:
        raise CostError(f"{len(steps)} steps are too few to fit a cost model to; record at least {MIN_FIT_STEPS}")
    num_fitted = len(steps) - int(len(steps) * HELD_OUT_SHARE)
    model, held_up_share = _fit_model(steps[:num_fitted], prior)
    held_out = steps[num_fitted:]
    pairs = [(model.execute_ns(step.features), step.execute_ns) for step in held_out]
    errors = sorted(abs(predicted - real) / max(real, 1) for predicted, real in pairs)
    total = fsum(real for _, real in pairs)
    return Fit(
        model,
        num_fitted,
        len(held_out),
        errors[len(errors) // 2],
        errors[len(errors) * 9 // 10],
        fsum(predicted for predicted, _ in pairs) / max(total, 1) - 1,
        held_up_share,
    )


def fit_line(steps: Sequence[TimedStep], prior: StepTimeModel = UNKNOWN_STEP_TIMES) -> CostModel:
    """The model of these steps; of none, one that takes no time."""
    return _fit_model(steps, prior)[0]


def _fit_model(steps: Sequence[TimedStep], prior: StepTimeModel) -> tuple[CostModel, float]:
    """The model, and the share of the steps that it takes for held up."""
    if not steps:
        return CostModel(), 0.0
    times = [float(max(1, step.execute_ns)) for step in steps]
    guess = _in_proportion(prior if prior.step_ns else PRIOR, steps, times)
    line = RobustLine([(1, *step.features) for step in steps], times, guess)
    step_ns, token_ns, decode_context_ns, prefill_pair_ns, row_ns = line.coefficients
    host_ns, host_row_ns = _fit_host(steps)
    model = CostModel(
        step_ns=step_ns,
        token_ns=token_ns,
        decode_context_ns=decode_context_ns,
        prefill_pair_ns=prefill_pair_ns,
        row_ns=row_ns,
        host_ns=host_ns,
        host_row_ns=host_row_ns,
    )
    return model, line.set_aside_share


def _in_proportion(prior: StepTimeModel, steps: Sequence[TimedStep], times: Sequence[float]) -> list[float]:
    """The coefficients of a prior, times what makes it right for half of the steps."""
    scale = median(time / prior.execute_ns(step.features) for time, step in zip(times, steps, strict=True))
    numbers = (prior.step_ns, prior.token_ns, prior.decode_context_ns, prior.prefill_pair_ns, prior.row_ns)
    return [scale * number for number in numbers]


def _fit_host(steps: Sequence[TimedStep]) -> tuple[float, float]:
    """Nanoseconds between steps: for each step, and for each row.

    A robust line tells how they grow with the rows, and the mean how long they are: waiting for the HTTP side is the
    server's own time, rare and long, so a typical gap would leave it out. The longest hundredth counts as its shortest.
    """
    gaps = [(step.features.num_rows, float(max(1, step.host_ns))) for step in steps if step.host_ns is not None]
    if not gaps:
        return 0.0, 0.0
    typical = median(gap for _, gap in gaps)
    line = RobustLine([(1, num_rows) for num_rows, _ in gaps], [gap for _, gap in gaps], [typical, 0.0])
    host_ns, host_row_ns = line.coefficients
    longest = sorted(gap for _, gap in gaps)[len(gaps) * 99 // 100]
    total = fsum(min(gap, longest) for _, gap in gaps)
    factor = total / fsum(host_ns + host_row_ns * num_rows for num_rows, _ in gaps)
    return factor * host_ns, factor * host_row_ns


class RobustLine:
    """Coefficients, none negative, of the line from `rows` to `times` (all above 0) that most of them lie near.

    `prior` holds a guess for each coefficient; its unit is the guess or, where that is 0, what would explain the
    longest time. `set_aside_share` is the share of rows that do not count at all.
    """

    def __init__(self, rows: Sequence[Sequence[int]], times: Sequence[float], prior: Sequence[float]) -> None:
        self._rows = rows
        self._times = times
        self._prior = prior
        self._units = [
            guess or max(times) / max(1, *column) for guess, column in zip(prior, zip(*rows, strict=True), strict=True)
        ]
        self._least = 1e-3 * median(times)
        self.set_aside_share = 0.0
        self.coefficients = self._fit()

    def _fit(self) -> list[float]:
        weights = [1.0 / time**2 for time in self._times]
        coefficients, spread = self._weighted_solution(weights, MIN_SPREAD), MIN_SPREAD
        for number in range(MAX_ROUNDS):
            predicted = self._predict(coefficients)
            off = [abs(time / guess - 1) for time, guess in zip(self._times, predicted, strict=True)]
            spread = max(MIN_SPREAD, DEVIATIONS * median(off))
            weigh = _huber if number < HUBER_ROUNDS else _biweight
            shares = [weigh(x / spread) for x in off]
            self.set_aside_share = sum(share == 0 for share in shares) / len(shares)
            weights = [share / guess**2 for share, guess in zip(shares, predicted, strict=True)]
            before, coefficients = predicted, self._weighted_solution(weights, spread)
            after = self._predict(coefficients)
            moved = max(abs(y / x - 1) for x, y in zip(before, after, strict=True))
            if number > HUBER_ROUNDS and moved < SETTLED:
                break
        return coefficients

    def _predict(self, coefficients: Sequence[float]) -> list[float]:
        least = self._least
        return [max(least, _dot(coefficients, row)) for row in self._rows]

    def _weighted_solution(self, weights: Sequence[float], spread: float) -> list[float]:
        """Weighted least squares with a ridge towards the prior, each coefficient counted in its own unit."""
        units, ridge = self._units, spread**2
        columns = range(len(units))
        matrix = [[0.0] * len(units) for _ in columns]
        right = [0.0] * len(units)
        for i in columns:
            weighted = [w * row[i] * units[i] for w, row in zip(weights, self._rows, strict=True)]
            right[i] = fsum(w * time for w, time in zip(weighted, self._times, strict=True))
            right[i] += ridge * self._prior[i] / units[i]
            for j in range(i + 1):
                matrix[i][j] = fsum(w * row[j] for w, row in zip(weighted, self._rows, strict=True)) * units[j]
                matrix[j][i] = matrix[i][j]
            matrix[i][i] += ridge
        return [value * unit for value, unit in zip(solve_nonnegative(matrix, right), units, strict=True)]


def _huber(deviations: float) -> float:
    return 1.0 if deviations <= HUBER else HUBER / deviations


def _biweight(deviations: float) -> float:
    return (1 - (deviations / BIWEIGHT) ** 2) ** 2 if deviations < BIWEIGHT else 0.0


def _dot(coefficients: Sequence[float], row: Sequence[int]) -> float:
    total = 0.0
    for coefficient, value in zip(coefficients, row, strict=True):
        total += coefficient * value
    return total
