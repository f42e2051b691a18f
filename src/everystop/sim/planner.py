"""Plans capacity: which arrival rates so many replicas carry within latency targets, what that costs, and which flags
serve best.

Every figure is a simulation of the server's own scheduler; the planner only decides which ones to run, and reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, takewhile
from typing import Any, TypeVar

from everystop.core.durations import NS_PER_MS
from everystop.core.errors import ConfigError
from everystop.core.limits import Limits
from everystop.sim.parallel import Workers
from everystop.sim.probe import LEAST_REQUESTS, Point, Target, Traffic, measure, saturation
from everystop.sim.report import several
from everystop.sim.simulator import Setup

NUM_RATES = 8
NEARLY_IDLE = 0.01
TOLERANCE = 1.05
WORTH_IT = 0.95
MOST_BATCHED_TOKENS, MOST_SEQS = 8192, 1024
TARGET_SHARES, LEAST_TARGET_MS = (0.5, 0.8), 0.1
SECONDS_PER_HOUR, TOKENS_PER_PRICE = 3600, 10**6

Progress = Callable[[str, int, int], None]  # what is being found, how many more of it are, and how many there are
T = TypeVar("T")
_Key = tuple[Limits, int]


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
    `num_requests` for each replica of the largest number.
    """

    target: Target
    replicas: Sequence[int]
    rate: float | None = None
    rates: Sequence[float] | None = None
    num_requests: int = 250
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What so many replicas carry. `rate` is the highest within the targets (0: none), `point` what was measured there,
    `limit` what the next higher rate misses ("ttft", "itl", "overload"), `cliff` the rate from which on the queue grows
    without bound. `nearly_idle` was measured where even the lowest rate of the grid was too high.
    """

    num_replicas: int
    cliff: float
    rate: float = 0.0
    limit: tuple[str, ...] = ("overload",)
    point: Point | None = None
    nearly_idle: Point | None = None


@dataclass(slots=True)
class Plan:
    """The answer. `chosen` is the point of the fewest replicas that carry the wanted rate, under `tuned`; None if no
    number of replicas does, and then `best` is the one that comes nearest. `best_as_given` is that with the flags that
    were given, before any were changed; `carried` and `points` hold for those too.
    """

    question: Question
    workload: Traffic
    setup: Setup
    tuned: Setup
    rate: float
    rates: list[float]
    points: list[Point] = field(default_factory=list)
    carried: list[Carried] = field(default_factory=list)
    best_as_given: Point | None = None
    best: Point | None = None
    cliff: float = 0.0

    @property
    def chosen(self) -> Point | None:
        """The best point, if it is within the targets."""
        return self.best if self.best is not None and not self.best.missed else None


def make_plan(question: Question, workload: Traffic, setup: Setup, workers: Workers, progress: Progress) -> Plan:
    """Simulate what the question needs; the same inputs give the same plan, however many workers there are. Raises
    ConfigError if nothing can be served.
    """
    return _Planner(Scout(question, workload), setup, workers, progress).run()


@dataclass(frozen=True, slots=True)
class Scout:
    """Answers for one set-up at a time; it can be sent to a worker."""

    question: Question
    workload: Traffic

    def cliff(self, setup: Setup) -> float:
        """The rate from which on the queue grows without bound."""
        return saturation(setup, self.workload, self.num_requests)

    def point(self, setup: Setup, rate: float, is_hasty: bool = False) -> Point:
        """What this rate comes to."""
        return measure(
            setup,
            self.workload,
            rate=rate,
            num_requests=self.num_requests,
            target=self.question.target,
            is_hasty=is_hasty,
        )

    def carried(self, setup: Setup, cliff: float, row: Sequence[Point]) -> Carried:
        """The highest rate within the targets, between the last of the grid that meets them and the first that does
        not, or the cliff.
        """
        carried = Carried(num_replicas=setup.num_replicas, cliff=cliff)
        met = list(takewhile(lambda point: not point.missed, row))
        too_high = cliff
        if len(met) < len(row):
            carried = replace(carried, limit=row[len(met)].missed)
            too_high = min(cliff, row[len(met)].rate)
        if met:
            carried = replace(carried, rate=met[-1].rate, point=met[-1])
        else:
            idle = self.point(setup, short(min(too_high, cliff) * NEARLY_IDLE))
            carried = replace(carried, nearly_idle=idle)
            carried = (
                replace(carried, limit=idle.missed) if idle.missed else replace(carried, rate=idle.rate, point=idle)
            )
        return self._bisect(setup, carried, too_high) if carried.point is not None else carried

    def _bisect(self, setup: Setup, carried: Carried, too_high: float) -> Carried:
        while too_high > carried.rate * TOLERANCE:
            middle = short(math.sqrt(carried.rate * too_high))
            if not carried.rate < middle < too_high:
                break
            point = self.point(setup, middle, is_hasty=True)
            if point.missed:
                carried, too_high = replace(carried, limit=point.missed), middle
            else:
                carried = replace(carried, rate=middle, point=point)
        return carried

    def strain(self, point: Point) -> float:
        """How much of the target the worse of the two percentiles takes up; above 1 it is missed."""
        if not point.ttft_ms:
            return math.inf
        target = self.question.target
        return max(point.ttft_ms["p95"] / target.ttft_p95_ms, point.itl_ms["p95"] / target.itl_p95_ms)

    @property
    def num_requests(self) -> int:
        """Requests in every simulation: always the same ones, so that numbers of replicas can be compared."""
        return self.workload.whole_laps(self.question.num_requests * max(self.question.replicas))


class _Planner:
    """Decides what is simulated next, and gathers the answers."""

    def __init__(self, scout: Scout, setup: Setup, workers: Workers, progress: Progress) -> None:
        self._scout = scout
        self._workers = workers
        self._progress = progress
        self._replicas = sorted(set(scout.question.replicas))
        wanted = scout.question.rate if scout.question.rate is not None else short(scout.workload.rate)
        self.plan = Plan(scout.question, scout.workload, setup, setup, wanted, [])
        self._cliffs: dict[_Key, float] = {}

    def run(self) -> Plan:
        plan, setups = self.plan, [with_replicas(self.plan.setup, num) for num in self._replicas]
        self._find_cliffs(setups)
        cliffs = [self._cliffs[_key(setup)] for setup in setups]
        given = self._scout.question.rates
        plan.rates = sorted({*(default_rates(cliffs, plan.rate) if given is None else given), plan.rate})
        self._fill_grid(setups)
        rows = [[point for point in plan.points if point.num_replicas == num] for num in self._replicas]
        plan.carried = self._run("the highest rates", self._scout.carried, list(zip(setups, cliffs, rows, strict=True)))
        self._choose()
        return plan

    def _run(self, what: str, function: Callable[..., T], calls: Sequence[tuple[Any, ...]]) -> list[T]:
        self._progress(what, 0, len(calls))
        return self._workers.run(function, calls, lambda num: self._progress(what, num, len(calls)))

    def _find_cliffs(self, setups: Sequence[Setup]) -> None:
        unknown = [(setup,) for setup in setups if _key(setup) not in self._cliffs]
        found = self._run("the most that can be served", self._scout.cliff, unknown)
        self._cliffs |= {_key(setup): cliff for (setup,), cliff in zip(unknown, found, strict=True)}

    def _fill_grid(self, setups: Sequence[Setup]) -> None:
        """Points from the cliff on are not simulated."""
        pairs = [(setup, rate) for setup in setups for rate in self.plan.rates]
        is_below = [rate < self._cliffs[_key(setup)] for setup, rate in pairs]
        measured = iter(self._run("the grid", self._scout.point, list(compress(pairs, is_below))))
        for (setup, rate), is_stable in zip(pairs, is_below, strict=True):
            self.plan.points.append(next(measured) if is_stable else _beyond(setup, rate, self._cliffs[_key(setup)]))

    def _choose(self) -> None:
        """The fewest replicas for the wanted rate, as the flags are, and then with others."""
        plan = self.plan
        wanted = [point for point in plan.points if point.rate == plan.rate and point.is_stable]
        met = [point for point in wanted if not point.missed]
        plan.best = plan.best_as_given = met[0] if met else min(wanted, key=self._scout.strain, default=None)
        if self._scout.question.is_searching:
            self._search()
        if plan.best is not None:
            plan.tuned = with_replicas(plan.tuned, plan.best.num_replicas)
            plan.cliff = self._cliffs[_key(plan.tuned)]

    def _search(self) -> None:
        """Other flags: first where the flags as given lead, then with fewer and fewer replicas, as long as it helps."""
        plan = self.plan
        start = plan.best.num_replicas if plan.best is not None else self._replicas[-1]
        setup, best = self._tune(with_replicas(plan.setup, start), plan.best)
        for num in reversed([num for num in self._replicas if num < start]):
            if best is None or best.missed:
                break
            fewer_setup, fewer = self._tune(with_replicas(setup, num), None)
            if fewer is None or fewer.missed:
                break
            setup, best = fewer_setup, fewer
        plan.tuned, plan.best = setup, best

    def _tune(self, setup: Setup, best: Point | None) -> tuple[Setup, Point | None]:
        """The flags that strain the targets least at the wanted rate, one flag after the other; they are changed only
        where that gains a twentieth. None if the queue grows whatever is tried.
        """
        if best is None:
            setup, best = self._best_of([setup], setup, None)
        for alternatives in (_token_budgets, _slots, self._time_budgets):
            setup, best = self._best_of(list(alternatives(setup)), setup, best)
        return setup, best

    def _best_of(self, others: Sequence[Setup], setup: Setup, best: Point | None) -> tuple[Setup, Point | None]:
        """The best of these set-ups that the wanted rate does not overload, or the one so far."""
        is_hasty = best is not None and not best.missed
        calls = [(other, self.plan.rate, is_hasty) for other in others]
        what = f"other flags for {several(setup.num_replicas, 'replica')}"
        points = self._run(what, self._scout.point, calls)
        enough = math.inf if best is None else WORTH_IT * self._scout.strain(best)
        ranked = sorted(zip(points, others, strict=True), key=lambda pair: self._scout.strain(pair[0]))
        for point, other in ranked:
            if self._scout.strain(point) >= enough:
                break
            self._find_cliffs([other])
            if self._cliffs[_key(other)] > self.plan.rate:
                return other, point
        return setup, best

    def _time_budgets(self, setup: Setup) -> Iterator[Setup]:
        """Steps planned by time below the target of ITL, with the token budget as it is and with a wide one."""
        limits, target_ns = setup.limits, self._scout.question.target.itl_p95_ms * NS_PER_MS
        for share in TARGET_SHARES:
            for num in (limits.max_num_batched_tokens, 4 * limits.max_num_batched_tokens):
                if num <= MOST_BATCHED_TOKENS and target_ns * share >= LEAST_TARGET_MS * NS_PER_MS:
                    changed = replace(limits, max_num_batched_tokens=num, target_itl_ns=round(target_ns * share))
                    yield replace(setup, limits=changed)


def with_replicas(setup: Setup, num_replicas: int) -> Setup:
    """The same for so many replicas; where there is one, a router has no choice."""
    router = setup.router if num_replicas > 1 or setup.router == "fair" else "round-robin"
    return replace(setup, num_replicas=num_replicas, router=router)


def _key(setup: Setup) -> _Key:
    """What tells the set-ups of one plan apart."""
    return setup.limits, setup.num_replicas


def _beyond(setup: Setup, rate: float, cliff: float) -> Point:
    reason = f"{rate:.4g} requests/s arrive, at most {cliff:.4g} can be served"
    return Point(rate=rate, num_replicas=setup.num_replicas, missed=("overload",), reason=reason)


def default_rates(cliffs: Sequence[float], wanted: float) -> list[float]:
    """Eight rates in equal ratios from half of what the fewest replicas can serve to what the most can; one that is
    near the wanted rate gives way to it.
    """
    rates = equal_ratios(min(cliffs) / 2, max(cliffs))
    nearest = math.log(rates[-1] / rates[0]) / (2 * (NUM_RATES - 1))
    return [rate for rate in rates if abs(math.log(rate / wanted)) > nearest]


def equal_ratios(low: float, high: float) -> list[float]:
    """Eight rates from `low` to `high`, each so many times the one before. Example: 1 and 128 give 1, 2, 4 to 128."""
    return [short(low * (high / low) ** (i / (NUM_RATES - 1))) for i in range(NUM_RATES)]


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


def short(rate: float) -> float:
    """The rate to four digits, so that what is printed is what was simulated. Example: 12.3456 becomes 12.35."""
    return float(f"{rate:.4g}")
