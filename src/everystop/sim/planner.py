"""Plans capacity: which arrival rates so many replicas carry within latency targets, what that costs, and which flags
serve best.

Every figure is a simulation of the server's own scheduler; the planner only decides which ones to run, and reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from everystop.core.errors import ConfigError
from everystop.sim.probe import LEAST_REQUESTS, Point, Target, Workload, measure, saturation
from everystop.sim.simulator import Setup

NUM_RATES = 8
NEARLY_IDLE = 0.01
TOLERANCE = 1.02
WORTH_IT = 0.95
MOST_BATCHED_TOKENS, MOST_SEQS = 8192, 1024
SECONDS_PER_HOUR, TOKENS_PER_PRICE = 3600, 10**6

Progress = Callable[[str, int], None]  # what comes next, and how many simulations are still expected, it included


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one replica costs an hour."""

    per_hour: float
    currency: str = "EUR"

    def __post_init__(self) -> None:
        if not 0 <= self.per_hour < math.inf:
            raise ConfigError(f"--price is {self.per_hour:g}; it must be a number from 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked: the `rate` wanted (None: the trace's own), over which grid, within which targets.

    `rates` None means so many that the cliff of every number of replicas lies among them. A point simulates
    `num_requests` for each replica.
    """

    target: Target
    replicas: Sequence[int]
    rate: float | None = None
    rates: Sequence[float] | None = None
    num_requests: int = 500
    price: Price | None = None
    is_searching: bool = True

    def __post_init__(self) -> None:
        if not self.replicas or min(self.replicas) < 1:
            raise ConfigError("--replicas must name whole numbers from 1, such as 1,2,4 or 1..8")
        for rate in (*(self.rates or ()), *(() if self.rate is None else (self.rate,))):
            if not 0 < rate < math.inf:
                raise ConfigError(f"a rate of {rate:g} requests a second cannot be simulated; give numbers above 0")
        if self.num_requests < LEAST_REQUESTS:
            raise ConfigError(f"--requests is {self.num_requests}; percentiles need at least {LEAST_REQUESTS}")


@dataclass(slots=True)
class Carried:
    """What so many replicas carry. `rate` is the highest within the targets (0: none), `point` what was measured there,
    `limit` what the next higher rate misses ("ttft", "itl", "overload"), `cliff` the rate from which on the queue grows
    without bound. `nearly_idle` was measured where even the lowest rate of the grid was too high.
    """

    num_replicas: int
    cliff: float
    rate: float = 0.0
    limit: tuple[str, ...] = ()
    point: Point | None = None
    nearly_idle: Point | None = None


@dataclass(slots=True)
class Plan:
    """The answer. `chosen` is the point of the fewest replicas that carry the wanted rate, under `tuned`; None if no
    number of replicas does, and then `best` is the one that comes nearest. `as_given` and `best_as_given` are the same
    with the flags that were given, before any were changed; `carried` and `points` hold for those too.
    """

    question: Question
    workload: Workload
    setup: Setup
    tuned: Setup
    rate: float
    rates: list[float]
    points: list[Point] = field(default_factory=list)
    carried: list[Carried] = field(default_factory=list)
    as_given: Point | None = None
    best_as_given: Point | None = None
    chosen: Point | None = None
    best: Point | None = None
    cliff: float = 0.0
    num_simulations: int = 0


def make_plan(question: Question, workload: Workload, setup: Setup, progress: Progress) -> Plan:
    """Simulate what the question needs; the same inputs give the same plan. Raises ConfigError if nothing can be
    served.
    """
    return _Planner(question, workload, setup, progress).run()


class _Planner:
    """Runs simulations one after the other; each is asked for once."""

    def __init__(self, question: Question, workload: Workload, setup: Setup, progress: Progress) -> None:
        self._question = question
        self._workload = workload
        self._progress = progress
        self._replicas = sorted(set(question.replicas))
        self._num_ahead = len(self._replicas)
        self._cliffs: dict[Setup, float] = {}
        rate = question.rate if question.rate is not None else _short(workload.rate)
        self.plan = Plan(question, workload, setup, setup, rate, [])

    def run(self) -> Plan:
        plan = self.plan
        cliffs = {num: self._cliff(replace(plan.setup, num_replicas=num)) for num in self._replicas}
        plan.rates = sorted({*(self._question.rates or default_rates(list(cliffs.values()))), plan.rate})
        below = {num: [rate for rate in plan.rates if rate < cliffs[num]] for num in self._replicas}
        self._num_ahead = sum(map(len, below.values())) + 6 * len(self._replicas)
        for num, cliff in cliffs.items():
            row = [self._point(num, rate, cliff) for rate in plan.rates]
            plan.points += row
            plan.carried.append(self._carried(num, cliff, row))
        self._choose()
        return plan

    def _cliff(self, setup: Setup) -> float:
        """The rate from which on the queue grows without bound; found once for each set-up."""
        if setup not in self._cliffs:
            self._announce(f"{_replicas(setup.num_replicas)}: the most that can be served")
            self._cliffs[setup] = saturation(setup, self._workload, self._num_requests(setup.num_replicas))
        return self._cliffs[setup]

    def _point(self, num_replicas: int, rate: float, cliff: float) -> Point:
        """A point of the grid; from the cliff on nothing needs to be simulated."""
        if rate >= cliff:
            reason = f"{rate:.4g} requests/s arrive, at most {cliff:.4g} can be served"
            return Point(rate=rate, num_replicas=num_replicas, missed=("overload",), reason=reason)
        return self._measure(replace(self.plan.setup, num_replicas=num_replicas), rate)

    def _measure(self, setup: Setup, rate: float, *, is_hasty: bool = False) -> Point:
        self._announce(f"{_replicas(setup.num_replicas)}, {rate:.4g} requests/s")
        return measure(
            setup,
            self._workload,
            rate=rate,
            num_requests=self._num_requests(setup.num_replicas),
            target=self._question.target,
            is_hasty=is_hasty,
        )

    def _carried(self, num_replicas: int, cliff: float, row: Sequence[Point]) -> Carried:
        """The highest rate within the targets, between the last of the grid that meets them and the first that does
        not, or the cliff.
        """
        carried = Carried(num_replicas, cliff, limit=("overload",))
        too_high = cliff
        for point in row:
            if point.missed:
                carried.limit = point.missed
                too_high = min(cliff, point.rate)
                break
            carried.rate, carried.point = point.rate, point
        if carried.point is None:
            setup = replace(self.plan.setup, num_replicas=num_replicas)
            carried.nearly_idle = self._measure(setup, _short(min(too_high, cliff * NEARLY_IDLE)))
            if carried.nearly_idle.missed:
                carried.limit = carried.nearly_idle.missed
            else:
                carried.rate, carried.point = carried.nearly_idle.rate, carried.nearly_idle
        while carried.point is not None and too_high > carried.rate * TOLERANCE:
            middle = _short(math.sqrt(carried.rate * too_high))
            if not carried.rate < middle < too_high:
                break
            if not self._try(carried, middle):
                too_high = middle
        return carried

    def _try(self, carried: Carried, rate: float) -> bool:
        """Whether this rate is within the targets too; then it is the highest known."""
        point = self._measure(replace(self.plan.setup, num_replicas=carried.num_replicas), rate, is_hasty=True)
        if point.missed:
            carried.limit = point.missed
            return False
        carried.rate, carried.point = rate, point
        return True

    def _choose(self) -> None:
        """The fewest replicas for the wanted rate, as the flags are, and then with others."""
        plan = self.plan
        wanted = [point for point in plan.points if point.rate == plan.rate]
        plan.as_given = plan.chosen = next((point for point in wanted if not point.missed), None)
        stable = [point for point in wanted if point.is_stable]
        plan.best = plan.best_as_given = plan.chosen or min(stable, key=self.strain, default=None)
        if self._question.is_searching:
            self._search()
        if plan.best is not None:
            plan.tuned = replace(plan.tuned, num_replicas=plan.best.num_replicas)
            plan.cliff = self._cliff(plan.tuned)

    def _search(self) -> None:
        """Other flags: first where the flags as given lead, then with fewer and fewer replicas, as long as it helps."""
        plan = self.plan
        start = plan.best.num_replicas if plan.best is not None else self._replicas[-1]
        setup, best = self._tune(replace(plan.setup, num_replicas=start), plan.best)
        for num in reversed([num for num in self._replicas if num < start]):
            if best is None or best.missed:
                break
            fewer_setup, fewer = self._tune(replace(setup, num_replicas=num), None)
            if fewer is None or fewer.missed:
                break
            setup, best = fewer_setup, fewer
        if best is not None:
            plan.tuned, plan.best = setup, best
            plan.chosen = None if best.missed else best

    def _tune(self, setup: Setup, known: Point | None) -> tuple[Setup, Point | None]:
        """The flags that strain the targets least at the wanted rate, one flag after the other; they are changed only
        where that gains a twentieth. None if the queue grows whatever is tried.
        """
        best_setup, best = setup, known if known is not None else self._better_point(setup, None)
        for alternatives in (_token_budgets, _slots):
            for other in alternatives(best_setup):
                point = self._better_point(other, best)
                if point is not None:
                    best_setup, best = other, point
        return best_setup, best

    def _better_point(self, setup: Setup, best: Point | None) -> Point | None:
        """The point of the wanted rate under these flags; None if it is no better or the queue grows without bound."""
        point = self._measure(setup, self.plan.rate, is_hasty=best is not None and not best.missed)
        if not point.ttft_ms or (best is not None and self.strain(point) >= WORTH_IT * self.strain(best)):
            return None
        return point if self._cliff(setup) > self.plan.rate else None

    def strain(self, point: Point) -> float:
        """How much of the target the worse of the two percentiles takes up; above 1 it is missed."""
        target = self._question.target
        return max(point.ttft_ms["p95"] / target.ttft_p95_ms, point.itl_ms["p95"] / target.itl_p95_ms)

    def _num_requests(self, num_replicas: int) -> int:
        return self._workload.whole_laps(self._question.num_requests * num_replicas)

    def _announce(self, what: str) -> None:
        self._progress(what, max(1, self._num_ahead))
        self._num_ahead -= 1
        self.plan.num_simulations += 1


def default_rates(cliffs: Sequence[float]) -> list[float]:
    """Rates in equal ratios from half of what the fewest replicas can serve to what the most can."""
    low, high = min(cliffs) / 2, max(cliffs)
    ratio = (high / low) ** (1 / (NUM_RATES - 1))
    return [_short(low * ratio**i) for i in range(NUM_RATES)]


def _token_budgets(setup: Setup) -> Iterator[Setup]:
    """Other token budgets, by factors of two, within what `serve` takes."""
    limits = setup.limits
    for factor in (0.25, 0.5, 2, 4, 8):
        num = int(limits.max_num_batched_tokens * factor)
        if limits.max_num_seqs <= num <= MOST_BATCHED_TOKENS:
            yield replace(setup, limits=replace(limits, max_num_batched_tokens=num))


def _slots(setup: Setup) -> Iterator[Setup]:
    """Other numbers of slots, by factors of two, within what `serve` takes beside the token budget."""
    limits = setup.limits
    for factor in (0.25, 0.5, 2, 4):
        num = int(limits.max_num_seqs * factor)
        if 1 <= num <= min(MOST_SEQS, limits.max_num_batched_tokens):
            yield replace(setup, limits=replace(limits, max_num_seqs=num))


def _short(rate: float) -> float:
    """The rate to four digits, rounded down, so that what is printed is what was simulated.

    Example: 12.3456 becomes 12.34.
    """
    unit = 10.0 ** (math.floor(math.log10(rate)) - 3)
    return float(f"{math.floor(rate / unit) * unit:.4g}")


def _replicas(num: int) -> str:
    return f"{num} replica{'' if num == 1 else 's'}"
