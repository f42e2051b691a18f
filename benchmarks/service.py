"""What tenants were served: as their clients saw it, and how far it drifts apart in the scheduler's own events, which
is what the virtual token counter bounds (theorem 4.4 of Sheng et al., arXiv 2401.00588).

Service is in weighted tokens: 1 for each token of a prompt, 2 for each token of an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from benchmarks.trial import Stage, read_options
from everystop.core.events import AdmitEvent, ArrivalEvent, Event, FinishEvent, PreemptEvent, StepEvent
from everystop.sim.workloads import Dice, Kind, burst, in_order_of_time
from everystop.trial.http_load import LoadRun

LEAST_BURST, BURST_TIMES = 128, 3


def served(run: LoadRun, until_s: float) -> dict[str, int]:
    """Weighted tokens that each group's clients had got by then; a prompt counts with the first token of its answer."""
    total = dict.fromkeys(run.groups, 0)
    for record in run.records:
        num_events = sum(when <= until_s for when in record.event_s)
        if num_events:
            is_whole = 0 <= record.end_s <= until_s and record.usage is not None
            num_tokens = record.usage.completion_tokens if is_whole and record.usage else num_events
            total[record.group] += record.num_prompt + 2 * num_tokens
    return total


def measure_capacity(stage: Stage, kind: Kind, options: Sequence[str]) -> float:
    """Weighted tokens a second of requests of this kind, as long as somebody waits: many more than can run come at
    once, and it is counted until the last of them has its first token.
    """
    num = max(LEAST_BURST, BURST_TIMES * read_options(options).max_num_seqs)
    trial = stage.play(in_order_of_time("burst", burst(Dice("burst", 1), kind, "all", num)), options)
    firsts = [record.event_s[0] for record in trial.run.records if record.event_s]
    if len(firsts) < num:
        raise SystemExit(f"only {len(firsts)} of {num} requests were served: {trial.run.records[-1].error}")
    return sum(served(trial.run, max(firsts)).values()) / max(firsts)


class _Pair:
    """Two tenants: the difference of their service over weight since both began to wait, and its extremes."""

    def __init__(self) -> None:
        self.widest = 0.0
        self._restart()

    def _restart(self) -> None:
        self._gap = self._least = self._most = 0.0

    def serve(self, amount: float, both_wait: bool) -> None:
        """The first tenant got that much more, or the second if it is negative."""
        if both_wait:
            self._gap += amount
            self._least, self._most = min(self._least, self._gap), max(self._most, self._gap)
            self.widest = max(self.widest, self._most - self._least)

    def waiting_changed(self, both_wait: bool) -> None:
        """A window ends where one of them no longer waits."""
        if not both_wait:
            self._restart()


class Gaps:
    """The widest difference of service over weight of each pair of tenants, over all windows in which both of them wait
    all the time.

    Service is 1 for each prompt token that is to be computed, when its request boards first, and 2 for each output
    token; the boarding that ends somebody's waiting still counts.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._pairs = {pair: _Pair() for pair in combinations(weights, 2)}
        self._tenants: dict[int, ArrivalEvent] = {}
        self._waiting: dict[str, set[int]] = {name: set() for name in weights}
        self._boarded: set[int] = set()
        self.served = dict.fromkeys(weights, 0)

    @property
    def widest(self) -> float:
        """Over all pairs."""
        return max((pair.widest for pair in self._pairs.values()), default=0.0)

    def note(self, events: Iterable[Event]) -> None:
        """Take in events, in their order."""
        for event in events:
            if isinstance(event, ArrivalEvent):
                if event.tenant in self._weights:
                    self._tenants[event.request_id] = event
                    self._waiting[event.tenant].add(event.request_id)
            elif isinstance(event, StepEvent):
                for request_id, tokens in zip(event.plan.rows.request_ids, event.tokens, strict=True):
                    self._serve(request_id, 2 * len(tokens))
            elif isinstance(event, AdmitEvent):
                self._board(event)
            elif isinstance(event, PreemptEvent):
                self._wait(event.request_id, True)
            elif isinstance(event, FinishEvent):
                self._wait(event.request_id, False)

    def _board(self, event: AdmitEvent) -> None:
        if event.request_id not in self._boarded and event.request_id in self._tenants:
            self._boarded.add(event.request_id)
            num_prompt = self._tenants[event.request_id].num_prompt_tokens
            self._serve(event.request_id, num_prompt - event.num_cached_tokens)
        self._wait(event.request_id, False)

    def _wait(self, request_id: int, waits: bool) -> None:
        arrival = self._tenants.get(request_id)
        if arrival is None:
            return
        waiting = self._waiting[arrival.tenant]
        (waiting.add if waits else waiting.discard)(request_id)
        for pair, state in self._pairs.items():
            if arrival.tenant in pair:
                state.waiting_changed(self._both_wait(pair))

    def _serve(self, request_id: int, cost: int) -> None:
        arrival = self._tenants.get(request_id)
        if arrival is None or not cost:
            return
        self.served[arrival.tenant] += cost
        amount = cost / self._weights[arrival.tenant]
        for pair, state in self._pairs.items():
            if arrival.tenant in pair:
                state.serve(amount if arrival.tenant == pair[0] else -amount, self._both_wait(pair))

    def _both_wait(self, pair: tuple[str, str]) -> bool:
        return bool(self._waiting[pair[0]] and self._waiting[pair[1]])


def widest_gap(events: Iterable[Event], weights: Mapping[str, float]) -> float:
    """The widest difference of service over weight between tenants that both waited."""
    gaps = Gaps(weights)
    gaps.note(events)
    return gaps.widest


def bound(longest_prompt: int, num_kv_tokens: int, weights: Mapping[str, float]) -> float:
    """What the theorem allows: 2 · max(longest prompt, 2 · tokens in the KV cache), over the lesser weight."""
    return 2 * max(longest_prompt, 2 * num_kv_tokens) / min(weights.values())
