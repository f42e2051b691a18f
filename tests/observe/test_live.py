"""The live messages, put together again by a reader, against the events themselves."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.core.fuzz import ROTATION, Episode
from tests.core.harness import Harness, make_request, make_scheduler
from tests.observe.turns import after_each_turn

from everystop.core.events import AdmitEvent, ArrivalEvent, Event, FinishEvent, PreemptEvent, RefuseEvent, StepEvent
from everystop.core.request import RequestState
from everystop.observe import live, live_past, live_state
from everystop.observe.blame import Blame
from everystop.observe.causes import LABELS
from everystop.observe.explain import explain
from everystop.observe.history import History
from everystop.observe.live import LiveReader
from everystop.observe.live_state import LiveState
from everystop.observe.live_teller import Strangers, Teller
from everystop.observe.thread_share import free

NameOf = Callable[[int], str | None]


def name_all(request_id: int) -> str:
    return f"name-{request_id}"


class Watch:
    """A harness with a history, a live state and one reader; `page` is what that reader knows."""

    def __init__(
        self, harness: Harness, *, name_of: NameOf = name_all, sees_all: bool = True, begins: bool = True
    ) -> None:
        self.harness = harness
        self.history = History()
        self.name_of, self.sees_all = name_of, sees_all
        self.num_asked = 0
        self._num_told = 0
        self.messages: list[dict[str, Any]] = []
        self.steps: list[list[Any]] = []
        self.requests: dict[int, dict[str, Any]] = {}
        self.acts: list[tuple[int, int, str]] = []
        if begins:
            self.begin()
        after_each_turn(harness, lambda _: self.tell())

    def begin(self) -> None:
        self.tell()
        scheduler = self.harness.scheduler
        self.state = LiveState(
            self.history,
            now_ns=self.harness.now_ns,
            since_ns=0,
            num_slots=scheduler.limits.max_num_seqs,
            num_blocks=scheduler.kv.pool.num_blocks,
            ask_blocks=self._answer_blocks,
            ask_line=self._answer_line,
        )
        self.reader = LiveReader(self.state, name_of=self.name_of, sees_all=self.sees_all, server={"model": "hash"})

    def _answer_line(self) -> None:
        self.history.receive([self.harness.scheduler.line_event(100, self.harness.now_ns)])

    def _answer_blocks(self) -> None:
        self.num_asked += 1
        self.history.receive([self.harness.scheduler.block_event(self.harness.now_ns)])

    def tell(self) -> None:
        """Hand all new events over."""
        events = self.harness.events
        self.history.receive(events[self._num_told :])
        self._num_told = len(events)

    def read(self) -> dict[str, Any]:
        """One message."""
        self.tell()
        self.state.catch_up(self.harness.now_ns)
        message = json.loads(msgspec.json.encode(self.reader.message(self.harness.now_ns)))
        self.messages.append(message)
        self.steps += message["steps"]
        self.requests |= {one["id"]: one for one in message["requests"]}
        self.acts += message["acts"]
        return message

    def read_all(self) -> dict[str, Any]:
        """Messages until nothing is new."""
        while True:
            message = self.read()
            if not self.reader.is_behind and not self.state.catch_up(self.harness.now_ns):
                return message


def rows_of(steps: list[list[Any]]) -> list[tuple[int, int, int, int, int]]:
    """(step id, slot, request, tokens, outputs) of each row of steps as they are sent."""
    return [(step[0], *step[-1][i : i + 4]) for step in steps for i in range(0, len(step[-1]), 4)]


def rows_by_events(events: list[Event]) -> list[tuple[int, int, int, int, int]]:
    """The same from the events; a row's slot is that of its request's last boarding up to the row's own step."""
    admits = [event for event in events if isinstance(event, AdmitEvent)]
    rows = []
    for event in events:
        if isinstance(event, StepEvent):
            step_id = event.plan.step_id
            for row, tokens in zip(event.plan.rows, event.tokens, strict=True):
                slots = [a.slot for a in admits if a.request_id == row.request_id and a.step_id <= step_id]
                rows.append((step_id, slots[-1], row.request_id, row.num_tokens, len(tokens)))
    return rows


def check_requests(watch: Watch) -> None:
    """What the reader knows of each request that has boarded or ended, against its events."""
    events, now = watch.harness.events, watch.harness
    for request_id, shown in watch.requests.items():
        own = [event for event in events if getattr(event, "request_id", None) == request_id]
        request = now.requests[request_id]
        arrivals = [event for event in own if isinstance(event, ArrivalEvent)]
        ends = [event for event in own if isinstance(event, FinishEvent)]
        admits = [event for event in own if isinstance(event, AdmitEvent)]
        assert shown["name"] == name_all(request_id)
        if isinstance(own[0], RefuseEvent):
            assert (shown["state"], shown["finish_reason"]) == ("refused", own[0].code)
            continue
        assert shown["arrival_ns"] == arrivals[0].now_ns
        assert shown["num_prompt_tokens"] == request.num_prompt_tokens
        assert shown["admit_ns"] == (admits[0].now_ns if admits else None)
        assert shown["num_preemptions"] == sum(isinstance(event, PreemptEvent) for event in own)
        firsts = [
            event.now_ns
            for event in events
            if isinstance(event, StepEvent)
            for row, tokens in zip(event.plan.rows, event.tokens, strict=True)
            if row.request_id == request_id and tokens
        ]
        assert shown["first_token_ns"] == (firsts[0] if firsts else None)
        if ends:
            word = {"abort": "aborted", "error": "failed"}.get(ends[0].reason, "finished")
            assert (shown["state"], shown["finish_reason"]) == (word, ends[0].reason)
            assert shown["finish_ns"] == ends[0].now_ns
            assert shown["num_output_tokens"] == ends[0].num_output_tokens
            assert shown["num_cached_tokens"] == ends[0].num_cached_tokens
            assert shown["blame"] is None or shown["blame"] in (*LABELS.values(), "≈ queued", "≈ prefill", "≈ decode")
        else:
            assert shown["state"] == ("running" if request.state is RequestState.RUNNING else "waiting")
            assert shown["finish_ns"] is None
            assert shown["blame"] is None
    met = {e.request_id for e in events if isinstance(e, AdmitEvent | RefuseEvent | FinishEvent)}
    assert watch.requests.keys() == met


def check_now(watch: Watch, message: dict[str, Any]) -> None:
    """The counts of a message against the scheduler as it stands."""
    scheduler = watch.harness.scheduler
    waiting = [r.request_id for r in scheduler.requests.values() if r.state is not RequestState.RUNNING]
    assert message["num_waiting"] == len(waiting)
    if "waiting" in message:
        assert sorted(one["id"] for one in message["waiting"]) == sorted(waiting)
    tiles = message["tiles"]
    assert tiles["slots_busy"] == scheduler.num_running
    assert tiles["num_waiting"] == len(waiting)
    assert message["dropped"] == 0
    if "kv" in message:
        assert sum(num for _, num, _ in message["kv"]["runs"]) == scheduler.kv.pool.num_blocks


@pytest.mark.parametrize("depth", [0, 1])
def test_messages_put_together_are_the_events_of_fuzzed_schedules(depth: int) -> None:
    for index, policy in enumerate(ROTATION):
        rng = random.Random(f"live:{index}:{depth}")
        episode = Episode(f"live:{index}:{depth}", policy, depth, abort_rate=0.1)
        watch = Watch(episode.harness)

        def look(_: Harness, watch: Watch = watch, rng: random.Random = rng) -> None:
            if rng.random() < 0.3:
                check_now(watch, watch.read_all())

        after_each_turn(episode.harness, look)
        episode.run(60)
        check_now(watch, watch.read_all())
        assert rows_of(watch.steps) == rows_by_events(episode.harness.events)
        for step in watch.steps:
            num_decode, num_prefill, num_padded = step[4:7]
            assert num_decode + num_prefill + num_padded == sum(step[-1][2::4])
        check_requests(watch)
        assert [message["full"] for message in watch.messages] == [True] + [False] * (len(watch.messages) - 1)
        ids = [step_id for _, step_id, _ in watch.acts if step_id >= 0]
        assert ids == sorted(set(ids))


@pytest.mark.parametrize("depth", [0, 1])
def test_a_late_reader_gets_the_window_and_the_requests_as_they_are(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_state, "WINDOW_NS", 25_000_000)  # of the harness's time, in which a step takes 1 ms
    for index, policy in enumerate(ROTATION):
        episode = Episode(f"late:{index}:{depth}", policy, depth, abort_rate=0.05)
        harness = episode.harness
        watch = Watch(harness, begins=False)
        num_turns = 0

        def look(harness: Harness, watch: Watch = watch) -> None:
            nonlocal num_turns
            num_turns += 1
            if num_turns < 70:
                return
            if num_turns == 70:
                watch.begin()
            message = watch.read_all()
            check_now(watch, message)
            running = {i for i, one in watch.requests.items() if one["state"] == "running"}
            assert running == set(harness.scheduler.running)
            for request_id in running & {i for i, one in watch.requests.items() if one["first_token_ns"]}:
                assert watch.requests[request_id]["first_token_ns"] == first_token_ns(harness, request_id)

        after_each_turn(harness, look)
        episode.run(90)
        sent = rows_of(watch.steps)
        assert sent == rows_by_events(harness.events)[-len(sent) :]
        assert len({row[0] for row in sent}) >= min(20, harness.counts["steps"])


def first_token_ns(harness: Harness, request_id: int) -> int:
    return next(
        event.now_ns
        for event in harness.events
        if isinstance(event, StepEvent)
        for row, tokens in zip(event.plan.rows, event.tokens, strict=True)
        if row.request_id == request_id and tokens
    )


def test_a_reader_that_sees_some_gets_the_others_without_anything_of_theirs() -> None:
    for index, policy in enumerate(ROTATION):
        rng = random.Random(f"strangers:{index}")
        episode = Episode(f"strangers:{index}", policy, index % 2, abort_rate=0.1)
        watch = Watch(episode.harness, name_of=lambda i: f"mine-{i}" if i % 3 == 0 else None, sees_all=False)

        def look(_: Harness, watch: Watch = watch, rng: random.Random = rng) -> None:
            if rng.random() < 0.3:
                watch.read_all()

        after_each_turn(episode.harness, look)
        episode.run(60)
        watch.read_all()
        own = {i for i in episode.harness.requests if i % 3 == 0}
        for message in watch.messages:
            for one in message.get("waiting", []) + message["requests"]:
                assert (one["id"] >= 0) == (one["name"] is not None) == (one["id"] in own)
                if one["name"] is None:
                    told = {key for key, value in one.items() if value is not None}
                    assert told <= {"id", "state", "slot", "admit_ns", "first_token_ns", "finish_ns", "sentence"}
                    assert one.get("sentence", "another request") == "another request"
                    assert one.get("state", "waiting") in ("waiting", "running", "finished")
                else:
                    assert one["name"] == f"mine-{one['id']}"
            for _, _, owner, *sharing in message.get("kv", {"runs": []})["runs"]:
                assert all(each < 0 or each in own for each in (owner, *sharing[1:]))
            for _, _, text in message["acts"]:
                assert all(int(number) in own for number in re.findall(r"\br(\d+)", text)), text
            assert all(
                one["behind"] is None or one["behind"] < 0 or one["behind"] in own for one in message.get("waiting", [])
            )
        real = rows_by_events(episode.harness.events)
        shown = rows_of(watch.steps)
        ids = {}
        for (*sent, num, outputs), (*was, was_num, was_outputs) in zip(shown, real, strict=True):
            assert (sent[:2], num, outputs) == (was[:2], was_num, was_outputs)
            assert (sent[2] == was[2]) == (was[2] in own)
            assert ids.setdefault(was[2], sent[2]) == sent[2], "an id changed within the stream"
        assert len(set(ids.values())) == len(ids)


def busy(**limits: Any) -> Watch:
    """Four long requests on board, and as many that wait."""
    harness = Harness(make_scheduler(num_blocks=64, block_size=16, max_num_seqs=4, max_model_len=1000, **limits))
    watch = Watch(harness)
    for request_id in range(8):
        harness.add(make_request(request_id, 20, max_tokens=100))
    return watch


def test_a_reader_that_falls_behind_loses_steps_but_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "STEPS_BEHIND", 20)
    monkeypatch.setattr(live, "STEPS_A_MESSAGE", 5)
    monkeypatch.setattr(live, "DECISIONS_A_MESSAGE", 2)
    watch = busy()
    harness = watch.harness
    for _ in range(3):
        harness.turn()
    watch.read_all()
    assert watch.messages[-1]["dropped"] == 0
    harness.run()
    num_seen = len(watch.steps)
    message = watch.read_all()
    steps = [event for event in harness.events if isinstance(event, StepEvent)]
    num_missed = len(steps) - len(watch.steps)
    assert len(watch.steps) == num_seen + 5
    assert watch.steps[-1][0] == steps[-1].plan.step_id
    assert message["dropped"] >= num_missed > 0
    check_requests(watch)
    assert message["tiles"]["itl_p50_ns"] == pytest.approx(1_000_000, rel=0.02)
    total = sum(len(tokens) for event in steps for tokens in event.tokens)
    assert message["tiles"]["output_tokens_per_s"] == pytest.approx(total / 1.0)


def test_the_first_messages_come_in_pieces_and_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "STEPS_A_MESSAGE", 5)
    monkeypatch.setattr(live, "STEPS_BEHIND", 20)
    watch = busy()
    watch.harness.run()
    message = watch.read()
    assert message["full"]
    assert len(message["steps"]) == 5
    message = watch.read_all()
    assert rows_of(watch.steps) == rows_by_events(watch.harness.events)
    assert message["dropped"] == 0


def test_who_waits_is_told_with_the_reason() -> None:
    watch = busy()
    watch.harness.turn()
    message = watch.read_all()
    assert [one["id"] for one in message["waiting"]] == [4, 5, 6, 7]
    first, second = message["waiting"][:2]
    assert (first["reason"], first["sentence"], first["behind"]) == ("no_slot", "no slot is free", None)
    assert (second["reason"], second["sentence"]) == ("no_slot", "behind r4, for which no slot is free")
    assert second["behind"] == 4
    assert first["num_prompt_tokens"] == 20
    assert message["tiles"]["oldest_wait_ns"] == watch.harness.now_ns - first["since_ns"]
    assert watch.acts[0][2] == (
        "step 0: admitted r0 (20 of 20 prompt tokens), admitted r1 (20 of 20 prompt tokens), "
        "admitted r2 (20 of 20 prompt tokens), admitted r3 (20 of 20 prompt tokens); r4 waits: no slot is free"
    )


def test_missing_blocks_and_preemptions_are_told_in_words() -> None:
    harness = Harness(make_scheduler(num_blocks=4, block_size=16, max_num_seqs=4, admission="greedy"))
    watch = Watch(harness)
    harness.add(make_request(0, 30, max_tokens=30))
    harness.add(make_request(1, 30, max_tokens=30))
    harness.add(make_request(2, 30, max_tokens=4))
    harness.turn()
    message = watch.read_all()
    assert message["waiting"][0]["sentence"] == "2 KV blocks are needed and 0 free"
    harness.run()
    watch.read_all()
    texts = " ".join(text for _, _, text in watch.acts)
    assert "kept 1 decode; preempted r1, which loses 32 computed tokens; nobody boards: somebody has just lost" in texts
    assert "took back r1" in texts
    assert "r0 finished (length, 30 tokens)" in texts


def test_who_shares_a_block_is_counted_and_strangers_are_not_named() -> None:
    harness = Harness(make_scheduler(num_blocks=64, block_size=4, max_num_seqs=8))
    watch = Watch(harness, name_of=lambda i: f"mine-{i}" if i == 2 else None, sees_all=False)
    harness.add(make_request(0, list(range(9)), max_tokens=20))
    harness.turn()
    for request_id in range(1, 6):
        harness.add(make_request(request_id, list(range(9)), max_tokens=20))
    harness.turn()
    harness.now_ns += live_state.BLOCKS_EVERY_NS
    watch.read_all()
    kind, num, first, num_owners, *others = watch.read()["kv"]["runs"][0]
    assert (kind, num, num_owners) == ("s", 2, 6)
    assert first < -1, "a stranger"
    assert others[0] < -1
    assert others[1] == 2


def test_blocks_are_asked_for_when_something_has_happened_only() -> None:
    watch = busy()
    harness = watch.harness
    harness.turn()
    harness.now_ns += live_state.BLOCKS_EVERY_NS
    watch.read_all()
    assert watch.num_asked == 1
    message = watch.read()
    assert message["kv"]["runs"][0] == ["p", 2, 0]
    for _ in range(5):
        harness.now_ns += live_state.BLOCKS_EVERY_NS
        assert "kv" not in watch.read()
    assert watch.num_asked == 1
    assert not watch.reader.has_news
    harness.turn()
    assert "kv" not in watch.read(), "the answer comes with the next events"
    assert watch.num_asked == 2


def test_what_is_over_for_a_minute_is_forgotten() -> None:
    watch = busy()
    watch.harness.run()
    watch.read_all()
    assert len(watch.state.requests) == 8
    watch.harness.now_ns += 2 * live_state.WINDOW_NS
    message = watch.read_all()
    assert not watch.state.requests
    assert not watch.state.changed
    assert message["tiles"]["output_tokens_per_s"] == 0
    assert message["tiles"]["ttft_p50_ns"] is None
    assert len(watch.state.steps) == len(watch.state.decisions) == 0


def test_a_padded_row_stays_known_however_long_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_state, "WINDOW_NS", 10_000_000)
    harness = Harness(make_scheduler(policy="static-padded", max_num_seqs=2, num_blocks=64))
    watch = Watch(harness)
    harness.add(make_request(0, 4, max_tokens=2))
    harness.add(make_request(1, 4, max_tokens=80))
    while harness.scheduler.has_work:
        harness.turn()
        watch.read_all()
    assert rows_of(watch.steps) == rows_by_events(harness.events)
    harness.now_ns += 100_000_000
    watch.read_all()
    assert not watch.state.requests


def test_requests_that_the_history_forgets_at_once_are_still_shown() -> None:
    harness = Harness(make_scheduler(max_num_seqs=4))
    watch = Watch(harness)
    watch.history.num_finished = 0
    for request_id in range(6):
        harness.add(make_request(request_id, 4, max_tokens=2))
    harness.run()
    watch.read_all()
    assert rows_of(watch.steps) == rows_by_events(harness.events)
    assert {one["state"] for one in watch.requests.values()} == {"finished"}


def test_the_main_cause_of_what_is_over_is_told_as_explained() -> None:
    watch = busy()
    watch.state._blame = Blame(watch.history, free())
    watch.harness.run()
    watch.read_all()
    watch.harness.now_ns += 1_000_000
    watch.read_all()
    for request_id, shown in watch.requests.items():
        told = explain(watch.history, [request_id], now_ns=watch.harness.now_ns, name_of=name_all)
        main = max(told.as_data()["causes"], key=lambda cause: cause["ns"])
        assert shown["blame"] == main["label"]
    assert {shown["blame"] for shown in watch.requests.values()} >= {"queued: no free slot"}


def test_what_a_stranger_needs_is_not_told_to_those_behind_it() -> None:
    harness = Harness(make_scheduler(num_blocks=4, block_size=16, max_num_seqs=4, admission="greedy"))
    watch = Watch(harness, name_of=lambda i: "mine" if i in (0, 3) else None, sees_all=False)
    for request_id in range(4):
        harness.add(make_request(request_id, 30, max_tokens=30))
    harness.turn()
    message = watch.read_all()
    assert [one["id"] for one in message["waiting"]] == [-3, 3]
    own = message["waiting"][1]
    assert (own["sentence"], own["need"], own["have"], own["behind"]) == (
        "behind another request, for which too few KV blocks are free",
        0,
        0,
        -3,
    )
    assert message["acts"][0][2] == (
        "step 0: admitted r0 (30 of 30 prompt tokens), admitted another request; another request waits"
    )


def test_many_who_wait_are_listed_twice_a_second_and_always_counted() -> None:
    watch = busy()
    for request_id in range(8, 150):
        watch.harness.add(make_request(request_id, 20, max_tokens=100))
    watch.harness.turn()
    message = watch.read_all()
    assert (len(message["waiting"]), message["num_waiting"]) == (100, 146)
    watch.harness.turn()
    message = watch.read_all()
    assert "waiting" not in message
    assert message["num_waiting"] == message["tiles"]["num_waiting"] == 146
    watch.harness.now_ns += live.MANY_WAITING_EVERY_NS
    assert len(watch.read_all()["waiting"]) == 100


@pytest.mark.parametrize("seed", range(3))
def test_the_past_in_stretches_is_what_a_stream_would_have_told(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_past, "STEPS_A_STRETCH", 7)
    monkeypatch.setattr(live_past, "STEPS_A_TURN", 3)
    harness = Harness(make_scheduler())
    watch = Watch(harness)
    rng = random.Random(seed)
    for number in range(30):
        harness.add(make_request(number, rng.randrange(1, 30), max_tokens=rng.randrange(1, 12)))
        for _ in range(rng.randrange(1, 6)):
            harness.turn()
        watch.read_all()
    watch.read_all()
    steps: list[list[Any]] = []
    acts: list[tuple[int, int, str]] = []
    requests: dict[int, dict[str, Any]] = {}
    before_ns = watch.steps[-1][2] + 1
    while True:
        past = live_past.LivePast(watch.history, before_ns=before_ns, since_ns=0)
        while past.go_on():
            pass
        message = json.loads(msgspec.json.encode(past.message(Teller(Strangers(name_all), sees_all=True))))
        steps, acts = message["steps"] + steps, message["acts"] + acts
        requests = {one["id"]: one for one in message["requests"]} | requests
        if not message["more"]:
            break
        before_ns = message["steps"][0][2]
    assert steps == watch.steps
    assert acts == [act for act in watch.acts if act[1] >= 0]
    without_blame = [{**one, "blame": None} for one in watch.requests.values()]
    same = ("id", "name", "slot", "admit_ns", "finish_ns", "finish_reason", "first_token_ns", "num_preemptions")
    assert [[requests[one["id"]][key] for key in same] for one in without_blame if one["finish_ns"]] == [
        [one[key] for key in same] for one in without_blame if one["finish_ns"]
    ]


def test_a_stranger_has_one_id_in_the_stream_and_in_the_past() -> None:
    strangers = Strangers(lambda _: None)
    shown = Teller(strangers, sees_all=False).steps([[0, [0, 41, 1, 1, 1, 42, 1, 1]]])
    assert shown == [[0, [0, -2, 1, 1, 1, -3, 1, 1]]]
    assert strangers.id(41) == -2
