"""Every metric of random runs, counted a second time by slow and obvious means from what the clients got."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

import pytest
from tests.core.fuzz import ABORT_RATES, Episode

from everystop.core.events import AdmitEvent, ArrivalEvent, Event, FinishEvent, PreemptEvent, RefuseEvent, StepEvent
from everystop.core.policy import POLICIES
from everystop.core.request import FinishReason
from everystop.observe.catalogue import FAMILIES
from everystop.observe.families import Kind
from everystop.observe.histogram import Histogram
from everystop.observe.metrics import Metrics

NUM_STEPS = 120


class Watched:
    """An episode whose events go to metrics, as many at a time as the loop has given."""

    def __init__(self, seed: str, policy: str, depth: int) -> None:
        self.episode = Episode(seed, policy, depth, abort_rate=ABORT_RATES[-1])
        harness, scheduler = self.episode.harness, self.episode.harness.scheduler
        self.events: list[Event] = harness.events
        self.num_slots = self.episode.max_num_seqs
        self.metrics = Metrics(
            self.episode.num_blocks,
            block_size=scheduler.kv.block_size,
            num_slots=self.num_slots,
            max_model_len=self.episode.context,
        )
        self._counters: dict[tuple[str, ...], float] = {}
        take = harness._take

        def take_and_count(events: list[Event]) -> None:
            take(events)
            self.metrics.receive(list(events))
            self.metrics.catch_up()
            self.check_monotone()

        harness._take = take_and_count  # type: ignore[method-assign]

    def check_monotone(self) -> None:
        """No counter has fallen, and no gauge is below 0."""
        now = {
            (family.name, *labels): value
            for family in FAMILIES
            for labels, value in family.read(self.metrics)
            if not isinstance(value, Histogram)
        }
        gauges = {family.name for family in FAMILIES if family.kind is Kind.GAUGE}
        for key, value in now.items():
            assert isinstance(value, int | float)
            assert value >= (0 if key[0] in gauges else self._counters.get(key, 0)), key
        self._counters = {key: float(value) for key, value in now.items() if isinstance(value, int | float)}

    def of(self, kind: type[Event]) -> list[Event]:
        """The events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]


def same(histogram: Histogram, values: Iterable[int], scale: int = 1) -> None:
    """It holds these values and no others, as far as its buckets tell."""
    listed = list(values)
    assert histogram.sum == sum(listed)
    for bound, count in histogram.cumulative():
        assert count == sum(value <= float(bound) * scale for value in listed), bound


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_metrics_agree_with_a_second_count(policy: str, depth: int) -> None:
    watched = Watched(f"metrics:{policy}:{depth}", policy, depth)
    watched.episode.run(NUM_STEPS)
    metrics, requests = watched.metrics, watched.metrics.requests
    arrivals = {e.request_id: e for e in watched.events if isinstance(e, ArrivalEvent)}
    ends = {e.request_id: e for e in watched.events if isinstance(e, FinishEvent)}
    first_admits: dict[int, AdmitEvent] = {}
    for event in watched.events:
        if isinstance(event, AdmitEvent):
            first_admits.setdefault(event.request_id, event)
    token_ns: dict[int, list[int]] = defaultdict(list)
    for event in watched.events:
        if isinstance(event, StepEvent):
            for row, tokens in zip(event.plan.rows, event.tokens, strict=True):
                token_ns[row.request_id] += [event.now_ns] * len(tokens)
    token_ns = {i: times for i, times in token_ns.items() if times}
    complete = {i: e for i, e in ends.items() if e.reason in (FinishReason.STOP, FinishReason.LENGTH)}
    with_token = [i for i in complete if i in token_ns]

    assert ends.keys() == arrivals.keys()
    assert (metrics.num_running, metrics.num_waiting, metrics.kv_usage, metrics.occupancy) == (0, 0, 0, 0)
    assert metrics.finished == {**dict.fromkeys(FinishReason, 0), **Counter(e.reason for e in ends.values())}
    assert metrics.refused == Counter(e.code for e in watched.events if isinstance(e, RefuseEvent))
    assert metrics.num_prompt_tokens == sum(e.num_prompt_tokens for e in arrivals.values() if e.choice_index == 0)
    assert metrics.num_generation_tokens == sum(map(len, token_ns.values()))
    assert metrics.num_preemptions == sum(isinstance(e, PreemptEvent) for e in watched.events)
    assert metrics.num_prefix_hits == sum(
        max(first_admits[i].num_cached_tokens, end.num_cached_tokens) for i, end in ends.items() if i in first_admits
    )

    same(requests.ttft, [times[0] - arrivals[i].now_ns for i, times in token_ns.items()], 10**9)
    same(requests.itl, [b - a for times in token_ns.values() for a, b in pairwise(times)], 10**9)
    same(requests.e2e, [end.now_ns - arrivals[i].now_ns for i, end in complete.items()], 10**9)
    same(requests.queue_time, [e.now_ns - arrivals[i].now_ns for i, e in first_admits.items()], 10**9)
    same(requests.prefill_time, [token_ns[i][0] - first_admits[i].now_ns for i in with_token], 10**9)
    same(requests.decode_time, [token_ns[i][-1] - token_ns[i][0] for i in with_token], 10**9)
    same(requests.generation_tokens, [end.num_output_tokens for end in ends.values()])
    same(requests.num_preemptions, [end.num_preemptions for end in ends.values()])
    same(requests.prompt_tokens, [e.num_prompt_tokens for e in arrivals.values() if e.choice_index == 0])
    same(requests.num_choices, Counter(e.group_id for e in arrivals.values()).values())
    assert requests.generation_tokens.sum == metrics.num_generation_tokens
    assert requests.prompt_tokens.sum == metrics.num_prompt_tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_slots_and_tokens_of_steps_agree_with_a_second_count(policy: str) -> None:
    watched = Watched(f"slots:{policy}", policy, 0)
    watched.episode.run(NUM_STEPS)
    prompts = {e.request_id: e.num_prompt_tokens for e in watched.events if isinstance(e, ArrivalEvent)}
    steps: list[StepEvent] = []
    states: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    left: set[int] = set()
    for event in watched.events:
        if isinstance(event, FinishEvent) and event.reason is FinishReason.ABORT:
            left.add(event.request_id)
        if not isinstance(event, StepEvent) or not event.plan.rows:
            continue
        steps.append(event)
        for row in list(event.plan.rows)[: len(event.plan.rows) - event.plan.num_padded_rows]:
            phase = "decode" if row.num_tokens == 1 and row.start >= prompts[row.request_id] else "prefill"
            is_wasted = row.request_id in left
            states["wasted" if is_wasted else phase] += 1
            tokens[phase] += 0 if is_wasted else row.num_tokens
        states["padding"] += event.plan.num_padded_rows
    counts = watched.metrics.steps
    assert counts.num_steps == counts.execute_time.num == len(steps)
    assert sum(counts.slots.values()) == len(steps) * watched.num_slots
    assert {state: counts.slots[state] for state in states} == dict(states)
    assert (counts.prefill_tokens.sum, counts.decode_tokens.sum) == (tokens["prefill"], tokens["decode"])
    assert counts.tokens.sum == sum(step.plan.num_tokens for step in steps)
    assert watched.metrics.num_recomputed_tokens == watched.episode.harness.counts["recomputed tokens"]
