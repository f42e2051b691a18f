"""A trace says what the history says: slices nest, times grow, flows join, and every stay and wait is there."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
from tests.core.fuzz import ABORT_RATES, STEPS_PER_EPISODE, Episode
from tests.core.harness import Harness, make_request, make_scheduler
from tests.observe.trace.decoded import Decoded, Slice

from everystop.core.events import WaitEvent, WaitReason
from everystop.core.policy import POLICIES
from everystop.observe.history import Client, History
from everystop.observe.trace.chrome import chrome_chunks
from everystop.observe.trace.perfetto import perfetto_chunks
from everystop.observe.trace.picture import picture_of

ORIGIN_NS = 5_000_000_000


class TracedEpisode(Episode):
    """An episode of the fuzz, remembered as a live server does; as on a real clock, no two looks at it are the same."""

    def __init__(self, name: str, policy: str, depth: int, abort_rate: float) -> None:
        super().__init__(name, policy, depth, abort_rate)
        self.harness.now_ns = ORIGIN_NS
        self.harness.loop._now = self._look
        self.history = History(num_finished=1 << 30)

    def _look(self) -> int:
        self.harness.now_ns += 1_000
        return self.harness.now_ns

    def run(self, num_steps: int) -> None:
        super().run(num_steps)
        self.history.receive(self.harness.events + self.harness.scheduler.take_events())
        self.history.catch_up()


def decode(history: History) -> Decoded:
    return Decoded(b"".join(perfetto_chunks(picture_of(history))))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_trace_says_what_the_history_says(policy: str, depth: int) -> None:
    episode = TracedEpisode(f"trace:{policy}:{depth}", policy, depth, ABORT_RATES[1])
    episode.run(STEPS_PER_EPISODE)
    decoded = decode(episode.history)
    check_stays(episode.history, decoded)
    check_rows(episode.history, decoded)
    check_waits(episode.history, decoded)
    check_forks(episode.history, decoded)
    check_flows(decoded)
    check_counts(episode.history, decoded)


def stays(decoded: Decoded) -> Iterator[Slice]:
    return (s for s in decoded.slices if s.track.startswith("slot ") and not s.around and s.name != "held")


def check_stays(history: History, decoded: Decoded) -> None:
    """Every boarding is a slice in its slot, until the request lost it or ended."""
    expected = []
    for trail in history.trails.values():
        exits = [(event.now_ns, "preempted") for event in trail.preemptions]
        if trail.finish is not None and trail.finish.slot >= 0:
            exits.append((trail.finish.now_ns, trail.finish.reason.value))
        for admit, (end_ns, end) in zip(trail.admits, exits, strict=True):
            expected.append((f"slot {admit.slot}", admit.now_ns, end_ns, f"r{trail.request_id}", end))
    origin_ns = first_ns(history)
    found = [
        (s.track, s.start_ns + origin_ns, s.end_ns + origin_ns, s.name, s.arguments["end"]) for s in stays(decoded)
    ]
    assert sorted(found) == sorted(expected)


def first_ns(history: History) -> int:
    """The time that a trace calls 0."""
    return min(history.acts[history.acts.start].now_ns, history.steps[history.steps.start].scheduled_ns)


def check_rows(history: History, decoded: Decoded) -> None:
    """The slices in a stay have the tokens of all its rows, but for those that came back when it was over."""
    origin_ns, records = first_ns(history), history.steps.since(0)
    began_ns = [max(r.scheduled_ns, records[i - 1].now_ns if i else 0) for i, r in enumerate(records)]
    found: Counter[tuple[str, int]] = Counter()
    for inner in decoded.slices:
        if inner.track.startswith("slot ") and inner.around:
            assert inner.around[1:] == ()
            assert (inner.name == "padding") == (inner.around[0] == "held")
            assert inner.name != "decode" or inner.arguments["tokens"] == inner.arguments.get("steps", 1)
            assert inner.name in ("prefill", "recompute", "decode", "padding")
    for stay in stays(decoded):
        inside = [s for s in decoded.slices if s.track == stay.track and s.around == (stay.name,)]
        tokens = [s.arguments["tokens"] for s in inside if stay.start_ns <= s.start_ns and s.end_ns <= stay.end_ns]
        found[stay.name, stay.start_ns + origin_ns] = sum(tokens)
    for trail in history.trails.values():
        ends = [*((event.now_ns, event.step_id) for event in trail.preemptions), (trail.finish or trail.refusal).now_ns]
        for admit, end in zip(trail.admits, ends, strict=False):
            end_ns, end_step = end if isinstance(end, tuple) else (end, records[-1].step_id + 1)
            expected = sum(
                record.nums[record.row_of(trail.request_id)]
                for record, start_ns in zip(records, began_ns, strict=True)
                if admit.step_id <= record.step_id < end_step and start_ns < end_ns
                if record.row_of(trail.request_id) >= 0
            )
            assert found[f"r{trail.request_id}", admit.now_ns] == expected
    padded = sum(sum(r.nums[r.num_rows - r.num_padded_rows :]) for r in records)
    assert padded == sum(s.arguments["tokens"] for s in decoded.slices if s.name == "padding")


def check_waits(history: History, decoded: Decoded) -> None:
    """Every wait is a slice, and the reasons in it follow each other without a gap; the head's is its own."""
    expected = []
    for trail in history.trails.values():
        if trail.arrival is not None:
            begins = [event.now_ns for event in (trail.arrival, *trail.preemptions)]
            ends = [event.now_ns for event in trail.admits]
            if len(begins) > len(ends):
                ends.append(trail.finish.now_ns)
            expected += [(f"r{trail.request_id}", *pair) for pair in zip(begins, ends, strict=True)]
    origin_ns = first_ns(history)
    waits = decoded.on("waiting", 0)
    assert sorted((s.name, s.start_ns + origin_ns, s.end_ns + origin_ns) for s in waits) == sorted(expected)
    reasons: dict[str, list[Slice]] = defaultdict(list)
    for reason in decoded.on("waiting", 1):
        reasons[reason.around[0]].append(reason)
    for wait in waits:
        inside = [s for s in reasons[wait.name] if wait.start_ns <= s.start_ns and s.end_ns <= wait.end_ns]
        assert sum(s.end_ns - s.start_ns for s in inside) == wait.end_ns - wait.start_ns
    acts = history.acts.since(0)
    for i, act in enumerate(acts):
        if isinstance(act, WaitEvent) and act.reason is not WaitReason.BEHIND:
            overridden = any(
                isinstance(later, WaitEvent) and later.now_ns == act.now_ns and later.request_id in (act.request_id, -1)
                for later in acts[i + 1 : i + 50]
            )
            now_ns = act.now_ns - origin_ns
            said = {s.name for s in reasons[f"r{act.request_id}"] if s.start_ns <= now_ns < s.end_ns}
            assert overridden or not said or said == {act.reason.value}


def check_forks(history: History, decoded: Decoded) -> None:
    """Nobody waits for a sibling's prompt longer than until that is computed, all but the last token."""
    origin_ns = first_ns(history)
    for reason in decoded.on("waiting", 1):
        if reason.name == "fork":
            leader = int(reason.arguments["behind"].removeprefix("r"))
            num_prompt = history.trails[leader].arrival.num_prompt_tokens
            computed_ns = [
                record.now_ns - origin_ns
                for record in history.steps.since(0)
                if (row := record.row_of(leader)) >= 0 and record.starts[row] + record.nums[row] >= num_prompt - 1
            ]
            assert reason.end_ns <= min((ns for ns in computed_ns if ns > reason.start_ns), default=reason.end_ns)


def check_flows(decoded: Decoded) -> None:
    """The slices of a flow are waits and boardings in turn, and it ends with the last boarding."""
    flows: dict[int, list[Slice]] = defaultdict(list)
    for each in decoded.slices:
        for flow in each.flows:
            flows[flow].append(each)
    assert {f"r{flow - 1}" for flow in flows} == {s.name for s in stays(decoded)}
    for flow, slices in flows.items():
        slices.sort(key=lambda s: (s.start_ns, s.end_ns, s.track != "waiting"))
        assert {s.name for s in slices} == {f"r{flow - 1}"}
        assert [s.track == "waiting" for s in slices] == [True, False] * (len(slices) // 2)
        assert [s.ends_flow for s in slices] == [False] * (len(slices) - 1) + [True]


def check_counts(history: History, decoded: Decoded) -> None:
    """Counters hold what is counted after each step; as many slots are drawn held as are counted."""
    origin_ns = first_ns(history)
    held = [s for s in decoded.slices if s.track.startswith("slot ") and s.name == "held"]
    steps = decoded.on("steps", 0)
    for record, step in zip(history.steps.since(0), steps, strict=True):
        now_ns = record.now_ns - origin_ns
        assert step.end_ns == now_ns
        assert step.arguments["step"] == record.step_id
        assert step.arguments.get("tokens", 0) == sum(record.nums)
        for name, value in (("running", record.num_running), ("free blocks", record.num_free_blocks)):
            assert [count for at_ns, count in decoded.counts[name] if at_ns <= now_ns][-1] == value
        is_last = record.step_id == history.steps[history.steps.end - 1].step_id
        assert record.num_held == sum(s.start_ns <= now_ns < s.end_ns + (is_last and s.end_ns == now_ns) for s in held)


def small_history() -> History:
    """A few requests, three of them at once, and clients of two; the clock of a machine that has run for long."""
    harness = Harness(make_scheduler(max_num_seqs=2, num_blocks=12, block_size=4))
    harness.now_ns = 10**16
    history = History()
    history.add_client(Client("cmpl-µ", "", 0, 2, harness.now_ns - 9_000, harness.now_ns, 10**16 + 10, 10**16 + 30))
    history.add_client(Client("cmpl-b", "", 2, 1, harness.now_ns - 8_000, harness.now_ns - 100))
    for i in range(5):
        harness.add(make_request(i, 9, max_tokens=4))
    harness.run()
    history.receive(harness.events)
    history.catch_up()
    return history


def test_times_of_clients_are_drawn_over_their_requests() -> None:
    decoded = decode(small_history())
    clients = decoded.on("HTTP requests", 0)
    assert [(s.name, s.start_ns, s.arguments["requests"]) for s in clients] == [
        ("cmpl-µ", 0, "r0 to r1"),
        ("cmpl-b", 1_000, "r2"),
    ]
    parts = [(s.around[0], s.name, s.start_ns, s.end_ns) for s in decoded.on("HTTP requests", 1)]
    assert parts[0] == ("cmpl-µ", "receive", 0, 9_000)
    assert parts[2:] == [
        ("cmpl-b", "to the first byte", 8_900, clients[1].end_ns),
        ("cmpl-µ", "to the first byte", 9_000, 9_010),
        ("cmpl-µ", "to the last byte", 9_010, 9_030),
    ]
    boarding = next(s for s in stays(decoded) if s.name == "r1")
    assert boarding.arguments["id"] == "cmpl-µ"


def test_tracks_are_a_tree_with_lanes_of_one_rank() -> None:
    decoded = decode(small_history())
    (root,) = (track for track in decoded.tracks.values() if not track.parent_uuid)
    assert root.process.process_name == "everystop"
    names = [track.name for track in decoded.tracks.values() if track.parent_uuid == root.uuid]
    assert names == ["steps", "slots", "queue", "clients", "counters"]
    lanes = [track for track in decoded.tracks.values() if track.name == "waiting" and not track.HasField("counter")]
    assert len(lanes) == 3  # two board at once
    assert len({lane.sibling_order_rank for lane in lanes}) == 1
    slots = [track for track in decoded.tracks.values() if track.name.startswith("slot ")]
    assert sorted(slots, key=lambda track: track.sibling_order_rank) == sorted(slots, key=lambda track: track.name)


def test_history_without_anything_is_a_trace_without_events() -> None:
    assert not decode(History()).slices
    assert json.loads(b"".join(chrome_chunks(picture_of(History()))))["traceEvents"]


def test_chrome_format_says_the_same() -> None:
    episode = TracedEpisode("chrome", "static-padded", 0, 0.1)
    episode.run(STEPS_PER_EPISODE)
    history = episode.history
    decoded = decode(history)
    events = json.loads(b"".join(chrome_chunks(picture_of(history))))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    found, stacks = [], defaultdict(list)
    for event in events:
        if event["ph"] == "B":
            stacks[event["tid"]].append(event)
        elif event["ph"] == "E":
            begin = stacks[event["tid"]].pop()
            arguments = begin.get("args", {}) | event.get("args", {})
            found.append(
                (names[event["tid"]], round(begin["ts"] * 1e3), round(event["ts"] * 1e3), begin["name"], arguments)
            )
    assert not any(stacks.values())
    assert sorted(found, key=str) == sorted((tuple(s[:5]) for s in decoded.slices), key=str)
    flows = Counter(event["ph"] for event in events if event["ph"] in "stf")
    assert flows["f"] == flows["s"] == len({flow for s in decoded.slices for flow in s.flows})
    assert sum(flows.values()) == sum(len(s.flows) for s in decoded.slices)
    counts = Counter(event["name"] for event in events if event["ph"] == "C")
    assert counts == {name: len(values) for name, values in decoded.counts.items()}
