"""Runs a trace through replicas in virtual time: the scheduler, KV cache, step loop and policies of the server, with a
cost model in place of the model.

It owns virtual time and the order of replicas; it must not decide anything that the scheduler or a policy decides.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from everystop.core.errors import ConfigError, RequestError
from everystop.core.kv_cache import KVCache
from everystop.core.plan import StepPlan, StepResult
from everystop.core.policy import AGEING_NS, DEFAULT_TARGETS, Targets, make_policy
from everystop.core.request import Request, SamplingParams
from everystop.core.scheduler import Limits, Scheduler
from everystop.engine.loop import StepLoop
from everystop.sim.clock import Clock
from everystop.sim.cost import StepCost
from everystop.sim.routing import make_router
from everystop.sim.tally import Tally
from everystop.sim.traces import TraceRequest

NEVER_NS = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is simulated: `num_replicas` equal servers behind a router."""

    limits: Limits
    num_blocks: int
    block_size: int
    cost: StepCost
    enable_prefix_caching: bool = True
    policy: str = "continuous"
    batch_wait_ns: int = 0
    ageing_ns: int = AGEING_NS
    targets: Targets = DEFAULT_TARGETS
    num_replicas: int = 1
    router: str = "round-robin"
    check: bool = False

    def __post_init__(self) -> None:
        if self.num_replicas < 1 or self.num_blocks < 1:
            raise ConfigError(f"--replicas is {self.num_replicas}, --num-blocks {self.num_blocks}; at least 1 of each")


class VirtualRunner:
    """Computes nothing: a step takes what the cost model says, and each row that samples gets its request's id as
    token, so that no two requests' outputs are taken for the same.
    """

    def __init__(self, cost: StepCost, clock: Clock) -> None:
        self._cost = cost
        self._clock = clock
        self.busy_ns = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """One token for each row that samples, after the step's time has passed."""
        duration_ns = self._cost.plan_ns(plan)
        self._clock.advance(duration_ns)
        self.busy_ns += duration_ns
        return StepResult([(row[0],) if row[4] < row[2] else () for row in plan.rows], execute_ns=duration_ns)

    def close(self) -> None:
        """Nothing to release."""


class Replica:
    """One server in virtual time.

    A turn is one whole step, so the clock may be past the time of an arrival; `num_present` and the order of calls see
    to it that an arrival meets the state of its own time.
    """

    def __init__(self, setup: Setup, tally: Tally) -> None:
        self.clock = Clock()
        self.ready_ns = NEVER_NS
        self.runner = VirtualRunner(setup.cost, self.clock)
        self._kv = KVCache(
            num_blocks=setup.num_blocks,
            block_size=setup.block_size,
            enable_prefix_caching=setup.enable_prefix_caching,
        )
        policy = make_policy(
            setup.policy, batch_wait_ns=setup.batch_wait_ns, ageing_ns=setup.ageing_ns, targets=setup.targets
        )
        self._scheduler = Scheduler(setup.limits, self._kv, policy)
        self._loop = StepLoop(self._scheduler, self.runner, lambda: self.clock.now_ns)
        self._tally = tally
        self._check = setup.check
        self._num_just_ended = 0

    def num_present(self, now_ns: int) -> int:
        """Requests here at that time; those that end with the step that is under way then still are."""
        under_way = self._num_just_ended if self.clock.now_ns > now_ns else 0
        return len(self._scheduler.requests) + under_way

    def num_matched(self, keys: Sequence[bytes]) -> int:
        """How many of these block keys, from the first on, the prefix cache holds."""
        find = self._kv.pool.find
        for i, key in enumerate(keys):
            if find(key) is None:
                return i
        return len(keys)

    def add(self, request: Request) -> None:
        """A request arrives; a refused one is counted. An idle replica can start at once."""
        try:
            self._scheduler.add(request, request.arrival_ns)
        except RequestError:
            self._tally.note(self._scheduler.take_events())
        self.ready_ns = max(self.clock.now_ns, request.arrival_ns)

    def run_until(self, end_ns: int) -> None:
        """Take every turn that begins before `end_ns`; `ready_ns` is when the next one can begin."""
        clock, loop = self.clock, self._loop
        while self.ready_ns < end_ns:
            clock.advance_to(self.ready_ns)
            turn = loop.turn()
            self._num_just_ended = self._tally.note(turn.events)
            if self._check:
                self._scheduler.check_integrity()
            if not turn.is_idle:
                self.ready_ns = clock.now_ns
            elif turn.wake_at_ns is not None:
                assert turn.wake_at_ns > clock.now_ns
                self.ready_ns = turn.wake_at_ns
            else:
                assert not self._scheduler.has_work, "an idle scheduler has work and waits for nothing"
                self.ready_ns = NEVER_NS


class Simulation:
    """Replicas behind a router, fed by a trace. The same set-up and trace give the same results, byte for byte."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.tally = Tally(round(setup.cost.request_ns))
        self.replicas = [Replica(setup, self.tally) for _ in range(setup.num_replicas)]
        self._router = make_router(setup.router)
        self._num_sent = [0] * setup.num_replicas
        self._queue: list[tuple[int, int]] = []  # a heap of (when a replica is ready, its index), some outdated

    def run(self, trace: Iterable[TraceRequest]) -> dict[str, Any]:
        """Send every request of the trace at its time, and go on until all have ended; returns the results."""
        for request_id, traced in enumerate(trace):
            self._advance(traced.arrival_ns)
            keys = traced.block_keys(self.setup.block_size) if self.setup.enable_prefix_caching else []
            index = 0
            if len(self.replicas) > 1:
                index = self._router(self.replicas, keys, traced.arrival_ns)
            self.replicas[index].add(_make_request(request_id, traced, keys))
            self._num_sent[index] += 1
            heappush(self._queue, (self.replicas[index].ready_ns, index))
        self._advance(NEVER_NS)
        return self.results()

    def _advance(self, now_ns: int) -> None:
        """Run every replica up to that time, or past it by a step that begins before; only one with work costs time."""
        queue = self._queue
        while queue and queue[0][0] < now_ns:
            ready_ns, index = heappop(queue)
            replica = self.replicas[index]
            if replica.ready_ns != ready_ns:
                continue
            replica.run_until(now_ns)
            if replica.ready_ns < NEVER_NS:
                heappush(queue, (replica.ready_ns, index))

    def results(self) -> dict[str, Any]:
        """Figures of all replicas together, and how much each had to do."""
        end_ns = max(1, self.tally.end_ns)
        replicas = [
            {"num_requests": num, "busy_share": round(replica.runner.busy_ns / end_ns, 6)}
            for num, replica in zip(self._num_sent, self.replicas, strict=True)
        ]
        return {**self.tally.figures(), "replicas": replicas}


def _make_request(request_id: int, traced: TraceRequest, keys: list[bytes]) -> Request:
    """A request whose prompt repeats its own id: what no prefix id covers is like no other request's."""
    return Request(
        request_id,
        array("i", [request_id]) * traced.num_prompt_tokens,
        SamplingParams(max_tokens=traced.num_output_tokens),
        arrival_ns=traced.arrival_ns,
        tenant=traced.tenant,
        ttft_target_ns=traced.ttft_target_ns,
        itl_target_ns=traced.itl_target_ns,
        block_keys=keys,
    )
