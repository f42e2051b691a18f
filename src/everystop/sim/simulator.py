"""Runs a trace through replicas in virtual time: the scheduler, KV cache, step loop and policies of the server, with a
cost model in place of the model.

It owns virtual time and the order of replicas; it must not decide anything that the scheduler or a policy decides.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush
from typing import Any, Protocol

from everystop.core.errors import ConfigError, RequestError
from everystop.core.events import Event
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.policy import PolicySettings, Share, Work, make_policy
from everystop.core.request import Request, SamplingParams
from everystop.core.scheduler import Scheduler
from everystop.core.step_time import StepTimeModel
from everystop.engine.loop import StepLoop
from everystop.runner.calibration import Room, measure_step_times
from everystop.runner.simulated import SimulatedRunner
from everystop.sim.clock import Clock
from everystop.sim.cost import StepCost
from everystop.sim.endings import STOP_TOKEN, Endings
from everystop.sim.fairness import WINDOW_NS, FairnessIndex
from everystop.sim.routing import Sending, make_router
from everystop.sim.tally import NEVER_NS, Slo, Tally
from everystop.sim.traces import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is simulated: `num_replicas` equal servers behind a router, and what is demanded of them.

    Every request asks for `max_tokens` (None: as many as fit) and ends by a stop token where the trace says. How long
    its output becomes nobody knows beforehand, but for the policy `shortest` with `oracle`.
    """

    limits: Limits
    num_blocks: int
    block_size: int
    cost: StepCost
    enable_prefix_caching: bool = True
    policy: str = "continuous"
    policy_settings: PolicySettings = field(default_factory=PolicySettings)
    oracle: bool = False
    max_tokens: int | None = None
    num_replicas: int = 1
    router: str = "round-robin"
    slo: Slo = field(default_factory=Slo)
    check: bool = False

    def __post_init__(self) -> None:
        if self.num_replicas < 1 or self.num_blocks < 1:
            raise ConfigError(f"--replicas is {self.num_replicas}, --num-blocks {self.num_blocks}; at least 1 of each")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"--max-tokens is {self.max_tokens}; it must be at least 1")
        if self.num_replicas == 1 and self.router in ("least-loaded", "prefix-affinity"):
            raise ConfigError(
                f"--router {self.router} has no choice with one replica; raise --replicas or leave it out"
            )

    @property
    def shares(self) -> Mapping[str, Share]:
        """What tenants may use, by name."""
        return self.policy_settings.shares

    def measured_step_times(self) -> StepTimeModel:
        """What a server that plans its steps by time knows of them at its start."""
        room = Room(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.limits.max_num_seqs,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
        )
        return measure_step_times(SimulatedRunner(self.cost.plan_ns, lambda ns: None), room)

    def as_data(self) -> dict[str, Any]:
        """All of it as plain data."""
        return asdict(self) | {"policy_settings": self.policy_settings.as_data()}


class Witness(Protocol):
    """Who hears of everything that happens on the replicas; what it raises ends the run."""

    def note(self, events: Iterable[Event]) -> int:
        """Take in the events of one turn of a replica; returns how many requests ended in it."""
        ...

    def hold(self, request_id: int, arrival_ns: int) -> None:
        """A request that is about to be added has been at the router since it arrived."""
        ...


class Replica:
    """One server in virtual time.

    A turn is one whole step, so the clock may be past the time of an arrival; `num_present` and the order of calls see
    to it that an arrival meets the state of its own time.
    """

    def __init__(self, setup: Setup, witness: Witness, endings: Endings, step_times: StepTimeModel) -> None:
        self.clock = Clock()
        self.ready_ns = NEVER_NS
        self.heard: list[Event] = []  # of its latest step, for a router that hears of it
        self.runner = SimulatedRunner(setup.cost.plan_ns, self.clock.advance, endings.token_of)
        self._kv = KVCache(
            num_blocks=setup.num_blocks,
            block_size=setup.block_size,
            enable_prefix_caching=setup.enable_prefix_caching,
        )
        work: Work | None = endings.num_left if setup.oracle else None
        policy = make_policy(setup.policy, setup.policy_settings, work=work)
        self._scheduler = Scheduler(setup.limits, self._kv, policy, step_times)
        self._loop = StepLoop(self._scheduler, self.runner, lambda: self.clock.now_ns)
        self._witness = witness
        self._check = setup.check
        self._endings = endings
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

    def waiting_tenants(self) -> set[str]:
        """Whose requests wait here."""
        running = self._scheduler.running
        return {request.tenant for i, request in self._scheduler.requests.items() if i not in running}

    @property
    def limit_tokens(self) -> int:
        """The longest that a sequence may become."""
        return self._scheduler.limit_tokens

    def add(self, request: Request, now_ns: int) -> bool:
        """A request comes in; False for a refused one, which is counted. An idle replica can start at once."""
        if request.arrival_ns < now_ns:
            self._witness.hold(request.request_id, request.arrival_ns)
        is_taken = True
        try:
            self._scheduler.add(request, now_ns)
        except RequestError:
            self._endings.forget(request.request_id)
            self._witness.note(self._scheduler.take_events())
            is_taken = False
        self.ready_ns = max(self.clock.now_ns, now_ns)
        return is_taken

    def run_until(self, end_ns: int) -> None:
        """Take every turn that begins before `end_ns`; `ready_ns` is when the next one can begin."""
        clock, loop = self.clock, self._loop
        while self.ready_ns < end_ns:
            clock.advance_to(self.ready_ns)
            turn = loop.turn()
            self.heard = turn.events
            self._num_just_ended = self._witness.note(turn.events)
            if self._num_just_ended:
                self._endings.note(turn.events)
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
    """Replicas behind a router, fed by a trace. The same set-up and trace give the same results, byte for byte.

    A `witness` hears what happens in place of the tally, which then stays empty.
    """

    def __init__(self, setup: Setup, witness: Witness | None = None) -> None:
        self.setup = setup
        self.tally = Tally(setup.slo, request_ns=round(setup.cost.request_ns))
        self._endings = Endings()
        step_times = setup.measured_step_times()
        self.replicas = [
            Replica(setup, witness or self.tally, self._endings, step_times) for _ in range(setup.num_replicas)
        ]
        self._router = make_router(setup.router, limits=setup.limits, block_size=setup.block_size, shares=setup.shares)
        self._fairness = FairnessIndex({name: share.weight for name, share in setup.shares.items()})
        self._border_ns = WINDOW_NS
        self._num_sent = [0] * setup.num_replicas
        self._has_targets = make_policy(setup.policy, setup.policy_settings).has_targets
        self.num_targets_without_effect = 0  # requests with targets that the policy does not know
        self._queue: list[tuple[int, int]] = []  # a heap of (when a replica is ready, its index), some outdated

    def run(self, trace: Iterable[TraceRequest]) -> dict[str, Any]:
        """Send every request of the trace at its time, and go on until all have ended; returns the results.

        A request's id is its place in the trace.
        """
        for request_id, traced in enumerate(trace):
            now_ns = traced.arrival_ns
            self._advance(now_ns)
            keys = traced.block_keys(self.setup.block_size) if self.setup.enable_prefix_caching else []
            self._endings.expect(request_id, traced.num_prompt_tokens + traced.num_output_tokens)
            request = self._make_request(request_id, traced, keys)
            if not self._has_targets and (traced.ttft_target_ns or traced.itl_target_ns):
                self.num_targets_without_effect += 1
            self._send(self._router.take(request, self.replicas, now_ns), now_ns)
        self._advance(NEVER_NS)
        return self.results()

    def _make_request(self, request_id: int, traced: TraceRequest, keys: list[bytes]) -> Request:
        """A request whose prompt repeats its own id: what no prefix id covers is like no other request's.

        Of a prompt that is too long only as much is made as shows it, since a trace may bring one that fills memory.
        """
        num_made = min(traced.num_prompt_tokens, self.replicas[0].limit_tokens)
        return Request(
            request_id,
            array("i", [request_id]) * num_made,
            SamplingParams(max_tokens=self._max_tokens(traced), stop_token_ids=(STOP_TOKEN,)),
            arrival_ns=traced.arrival_ns,
            tenant=traced.tenant,
            ttft_target_ns=traced.ttft_target_ns,
            itl_target_ns=traced.itl_target_ns,
            block_keys=keys[: num_made // self.setup.block_size],
        )

    def _max_tokens(self, traced: TraceRequest) -> int:
        """What the request asks for: no less than it brings, so that one that cannot fit is refused, and no more than
        fits with its prompt.
        """
        most = self.replicas[0].limit_tokens - traced.num_prompt_tokens
        wanted = self.setup.max_tokens
        return max(traced.num_output_tokens, most if wanted is None else min(wanted, most))

    def _send(self, sendings: Iterable[Sending], now_ns: int) -> None:
        for index, request in sendings:
            replica = self.replicas[index]
            if replica.add(request, now_ns):
                self._num_sent[index] += 1
            else:
                self._router.refused(index, request)
            heappush(self._queue, (replica.ready_ns, index))

    def _advance(self, now_ns: int) -> None:
        """Run every replica up to that time, stopping at the borders of the windows of the fairness index."""
        while self._queue and self._border_ns <= now_ns:
            self._run_replicas(self._border_ns)
            self._note_border()
            self._border_ns += WINDOW_NS
        self._run_replicas(now_ns)
        if not self._queue and self._border_ns <= now_ns < NEVER_NS:
            self._fairness.pause()
            self._border_ns = (now_ns // WINDOW_NS + 1) * WINDOW_NS

    def _note_border(self) -> None:
        waiting = set(self._router.waiting_tenants()).union(*(r.waiting_tenants() for r in self.replicas))
        self._fairness.border(waiting, {name: totals.service for name, totals in self.tally.tenants.items()})

    def _run_replicas(self, now_ns: int) -> None:
        """Up to that time, or past it by a step that begins before; only a replica with work costs time."""
        queue, is_late = self._queue, self._router.is_late
        while queue and queue[0][0] < now_ns:
            ready_ns, index = heappop(queue)
            replica = self.replicas[index]
            if replica.ready_ns != ready_ns:
                continue
            if is_late:  # what a step brought is heard at its end, in the order of time over all replicas
                heard, replica.heard = replica.heard, []
                self._send(self._router.hear(index, heard, self.replicas, ready_ns), ready_ns)
                replica.run_until(ready_ns + 1)
            else:
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
        return {**self.tally.figures(), "fairness_index": self._fairness.figures(), "replicas": replicas}
