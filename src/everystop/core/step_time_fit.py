"""Learns a step-time model from steps as they come back, for a scheduler that plans by time; standard library only, and
the same steps give the same model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt

from everystop.core.step_time import UNKNOWN_STEP_TIMES, StepFeatures, StepTimeModel

NUM_FEATURES = 5
KEEP = 0.995  # share of a step's weight that is left when the next of its kind comes: half of it after 140 steps
PRIOR_STEPS = 1.0  # the prior counts as much as so many steps
NO_PRIOR_STEPS = 0.001  # decides between columns that are the same
SOLVE_EVERY = 8
MAX_DEVIATIONS = 3.0
_FIRST_DEVIATION = 0.1
_LEAST_DEVIATION = 0.001  # from which it recovers soon, when steps begin to last longer
_DEVIATION_SHARE = 0.02


def solve_nonnegative(products: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """The coefficients x of products · x = targets, none negative: the most negative is left out until none is.

    `products` is a symmetric positive matrix [n][n]. Variables with a diagonal of 0 are 0.
    """
    n = len(targets)
    active = [j for j in range(n) if products[j][j] > 0]
    solution: list[float] = []
    while active:
        solution = _solve([[products[i][j] for j in active] for i in active], [targets[i] for i in active])
        lowest = min(range(len(active)), key=lambda k: solution[k])
        if solution[lowest] >= 0:
            break
        del active[lowest]
    coefficients = [0.0] * n
    for j, value in zip(active, solution, strict=False):
        coefficients[j] = value
    return coefficients


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small system by Gaussian elimination with row exchanges; a column that adds nothing gets 0."""
    n = len(right)
    rows = [[*matrix[i], right[i]] for i in range(n)]
    for k in range(n):
        pivot = max(range(k, n), key=lambda i: abs(rows[i][k]))
        rows[k], rows[pivot] = rows[pivot], rows[k]
        for i in range(k + 1, n):
            factor = rows[i][k] / rows[k][k] if rows[k][k] else 0.0
            rows[i] = [x - factor * y for x, y in zip(rows[i], rows[k], strict=True)]
    solution = [0.0] * n
    for k in reversed(range(n)):
        known = 0.0
        for j in range(k + 1, n):
            known += rows[k][j] * solution[j]
        solution[k] = (rows[k][n] - known) / rows[k][k] if rows[k][k] else 0.0
    return solution


@dataclass(slots=True)
class _Moments:
    """Weighted sums over the steps of one kind, the older ones fading."""

    products: list[list[float]] = field(default_factory=lambda: [[0.0] * NUM_FEATURES for _ in range(NUM_FEATURES)])
    targets: list[float] = field(default_factory=lambda: [0.0] * NUM_FEATURES)
    num_steps: float = 0.0

    def add(self, columns: tuple[int, ...], time_ns: float, weight: float) -> None:
        """Take in one step."""
        targets = self.targets
        self.num_steps = self.num_steps * KEEP + 1
        for i, row in enumerate(self.products):
            scaled = columns[i] * weight
            targets[i] = targets[i] * KEEP + scaled * time_ns
            for j in range(i, NUM_FEATURES):
                row[j] = row[j] * KEEP + scaled * columns[j]


class StepTimeFit:
    """A step-time model that learns from every step: ridge regression towards a prior, on relative errors.

    A step of another kind does not wash out what is known: steps with and without prefill fade apart, each by the
    number of its own kind. A step that is far off (the machine was busy with something else) counts as if it were off
    by three times the usual deviation, after Huber.
    """

    def __init__(self, prior: StepTimeModel) -> None:
        self.model = prior
        self.deviation = _FIRST_DEVIATION
        self._prior_steps = NO_PRIOR_STEPS if prior == UNKNOWN_STEP_TIMES else PRIOR_STEPS
        self._prior = (prior.step_ns, prior.token_ns, prior.decode_context_ns, prior.prefill_pair_ns, prior.row_ns)
        self._decodes, self._prefills = _Moments(), _Moments()
        self._num_new = 0

    def observe(self, features: StepFeatures, time_ns: int) -> None:
        """Learn that a step of these features took so long, in nanoseconds; less than one counts as one."""
        columns, time_ns = (1, *features), max(1, time_ns)
        predicted_ns = max(self.model.execute_ns(features), time_ns / 4)
        off = abs(time_ns - predicted_ns) / predicted_ns
        limit = MAX_DEVIATIONS * self.deviation
        weight = 1.0 if off <= limit else limit / off
        self.deviation += _DEVIATION_SHARE * (min(off, limit) - self.deviation)
        self.deviation = max(self.deviation, _LEAST_DEVIATION)
        moments = self._prefills if features.prefill_pairs else self._decodes
        moments.add(columns, time_ns, weight / (predicted_ns * predicted_ns))
        self._num_new += 1
        if self._num_new >= SOLVE_EVERY or moments.num_steps < SOLVE_EVERY:
            self.solved()

    def solved(self) -> StepTimeModel:
        """Fit the model to all that has been observed; done by itself at every eighth step, and at the first ones of
        a kind.

        Each column is scaled to a mean square of 1, and the prior weighs as much as a few steps in each. What has not
        been seen stays as the prior has it.
        """
        self._num_new = 0
        decodes, prefills = self._decodes, self._prefills
        num_steps = decodes.num_steps + prefills.num_steps
        columns = range(NUM_FEATURES)
        squares = [decodes.products[j][j] + prefills.products[j][j] for j in columns]
        scale = [sqrt(square / num_steps) for square in squares]
        products = [[0.0] * NUM_FEATURES for _ in columns]
        targets = [0.0] * NUM_FEATURES
        for i in columns:
            if not scale[i]:
                continue
            for j in range(i, NUM_FEATURES):
                if scale[j]:
                    value = (decodes.products[i][j] + prefills.products[i][j]) / (scale[i] * scale[j])
                    products[i][j] = products[j][i] = value
            products[i][i] += self._prior_steps
            targets[i] = (decodes.targets[i] + prefills.targets[i]) / scale[i]
            targets[i] += self._prior_steps * self._prior[i] * scale[i]
        fitted = solve_nonnegative(products, targets)
        step, token, context, pair, row = (
            value / unit if unit else prior for value, unit, prior in zip(fitted, scale, self._prior, strict=True)
        )
        self.model = StepTimeModel(
            step_ns=step, token_ns=token, decode_context_ns=context, prefill_pair_ns=pair, row_ns=row
        )
        return self.model
