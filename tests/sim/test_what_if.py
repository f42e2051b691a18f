"""What a recorded request would have taken otherwise: sums by hand, and the simulator fed with the same arrivals."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.core.harness import make_request

from everystop.core.errors import RecordError, RequestError
from everystop.core.events import Event, FinishEvent
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.policy import PolicySettings, make_policy
from everystop.core.recording import RecordingScheduler
from everystop.core.request import Request
from everystop.core.step_time import StepFeatures, StepTimeModel, num_pairs
from everystop.engine.loop import StepLoop
from everystop.observe.history import Client
from everystop.observe.recorder import Recorder
from everystop.runner.simulated import FILLER_TOKEN, SimulatedRunner
from everystop.sim.clock import Clock
from everystop.sim.cost import CostModel
from everystop.sim.fit import fit_line
from everystop.sim.replay import PastRun, Timeline, past_run, replay
from everystop.sim.simulator import Setup, Simulation
from everystop.sim.traces import TraceRequest
from everystop.sim.what_if import Change, Estimate, Times, WhatIf, what_if

MS = 10**6
STEP_TIMES = StepTimeModel(
    step_ns=4_000_000, token_ns=100_000, decode_context_ns=2_000, prefill_pair_ns=400, row_ns=30_000
)
SETTINGS = PolicySettings(batch_wait_ns=20 * MS)
BLOCK_SIZE = 16
EOS = 7


def record_run(
    path: Path,
    requests: Iterable[Request],
    *,
    policy: str = "continuous",
    num_blocks: int = 200,
    clients: Sequence[Client] = (),
    ends: Mapping[int, int] | None = None,
    aborts: Mapping[int, int] | None = None,
    **limits: Any,
) -> PastRun:
    """A recorded run in virtual time whose steps take exactly what `STEP_TIMES` says.

    Requests come at their `arrival_ns` and are taken between steps. `ends` has the number of output tokens after which
    one samples its end token, `aborts` when a client leaves. Answers of `clients` that do not say otherwise are
    delivered at their ends in the engine.
    """
    recorder = Recorder(path, policy, SETTINGS)
    kv = KVCache(num_blocks=num_blocks, block_size=BLOCK_SIZE, enable_prefix_caching=True)
    scheduler = RecordingScheduler(
        Limits(**{"max_num_seqs": 4, "max_num_batched_tokens": 64} | limits),
        kv,
        make_policy(policy, SETTINGS),
        recorder,
        STEP_TIMES,
    )
    clock, waiting = Clock(), deque(sorted(requests, key=lambda request: request.arrival_ns))
    finished: dict[int, int] = {}
    leaving = deque(sorted((now_ns, i) for i, now_ns in (aborts or {}).items()))
    last = {request.request_id: request.num_tokens + (ends or {}).get(request.request_id, 0) for request in waiting}

    def token_of(request_id: int, num_tokens: int) -> int:
        return EOS if request_id in (ends or {}) and num_tokens == last[request_id] - 1 else FILLER_TOKEN

    cost = CostModel(**{name: getattr(STEP_TIMES, name) for name in STEP_TIMES.__slots__})
    loop = StepLoop(scheduler, SimulatedRunner(cost.plan_ns, clock.advance, token_of), lambda: clock.now_ns)
    while waiting or leaving or scheduler.has_work:
        while waiting and waiting[0].arrival_ns <= clock.now_ns:
            with suppress(RequestError):
                scheduler.add(waiting.popleft(), clock.now_ns)
        while leaving and leaving[0][0] <= clock.now_ns:
            scheduler.abort(leaving.popleft()[1], clock.now_ns)
        turn = loop.turn()
        finished |= {event.request_id: event.now_ns for event in turn.events if isinstance(event, FinishEvent)}
        if turn.is_idle:
            wakes = [turn.wake_at_ns or 0, *(each.arrival_ns for each in waiting), *(now_ns for now_ns, _ in leaving)]
            clock.advance_to(min((when for when in wakes if when), default=0))
    for client in clients:
        if client.delivered_ns is None:
            client.delivered_ns = max((finished[i] for i in client.request_ids if i in finished), default=None)
        recorder.client(client)
    recorder.close()
    return past_run(path)


def crowd(num_requests: int = 12, *, gap_ms: int = 9) -> list[Request]:
    """Requests of different lengths that come faster than they can be served."""
    return [
        make_request(i, 20 + 37 * (i % 5), max_tokens=6 + 11 * (i % 4), arrival_ns=i * gap_ms * MS + 1)
        for i in range(num_requests)
    ]


def clients_of(requests: Iterable[Request]) -> list[Client]:
    """Each was submitted when it arrived, 2 ms after it had been read; its answer is delivered when it ends."""
    return [
        Client(f"cmpl-{request.request_id}", "", request.request_id, 1, request.arrival_ns - 2 * MS, request.arrival_ns)
        for request in requests
    ]


def estimate_of(found: WhatIf, what: str, tried: str | int | None = None) -> Estimate:
    """The one estimate of that change."""
    [estimate] = [each for each in found.estimates if each.change.what == what and tried in (None, each.change.tried)]
    return estimate


def step_ns(run: PastRun, *rows: tuple[int, int]) -> int:
    """What the fitted model says of a step with these rows of one request: (start, number of tokens)."""
    features = StepFeatures(
        sum(n for _, n in rows),
        sum(start + 1 for start, n in rows if n == 1),
        sum(num_pairs(start, n) for start, n in rows if n > 1),
        len(rows),
    )
    cost = fit_line(run.steps, run.record.step_times)
    return round(cost.execute_ns(features) + cost.between_ns(features))


def test_alone_a_request_takes_the_sum_of_its_own_steps(tmp_path: Path) -> None:
    """A prompt of 131 tokens in steps of 64, 64 and 3, then one step a token."""
    run = record_run(tmp_path / "run.gz", crowd())
    alone = estimate_of(what_if(run, [8]), "alone")
    assert run.history.trails[8].arrival is not None
    assert run.history.trails[8].arrival.num_prompt_tokens == 20 + 37 * 3
    ttft_ns = step_ns(run, (0, 64)) + step_ns(run, (64, 64)) + step_ns(run, (128, 3))
    decode_ns = sum(step_ns(run, (131 + k, 1)) for k in range(5))
    assert alone.times == Times(ttft_ns, ttft_ns + decode_ns)
    true_ns = 3 * 4_030_000 + 131 * 100_000 + num_pairs(0, 131) * 400
    assert ttft_ns == pytest.approx(true_ns, rel=1e-3), "the fit finds the step times of the record"


class Heard:
    """Notes what happens in a simulation."""

    def __init__(self) -> None:
        self.timeline = Timeline()

    def note(self, events: Iterable[Event]) -> int:
        listed = list(events)
        self.timeline.note(listed)
        return sum(isinstance(event, FinishEvent) for event in listed)

    def hold(self, request_id: int, arrival_ns: int) -> None:
        raise AssertionError("no router keeps anything back")


def simulated_times(run: PastRun, requests: Sequence[Request], request_id: int, **changes: Any) -> Times:
    """The simulator's own answer for arrivals at their true times, with changes of limits or set-up."""
    limits = {name: changes.pop(name) for name in ("max_num_seqs", "max_num_batched_tokens") if name in changes}
    setup = Setup(
        limits=replace(run.record.limits, **limits),
        num_blocks=changes.pop("num_blocks", run.record.kv["num_blocks"]),
        block_size=BLOCK_SIZE,
        cost=fit_line(run.steps, run.record.step_times),
        policy_settings=SETTINGS,
        **changes,
    )
    heard = Heard()
    Simulation(setup, heard).run(
        TraceRequest(
            arrival_ns=request.arrival_ns,
            num_prompt_tokens=20 + 37 * (request.request_id % 5),
            num_output_tokens=request.params.max_tokens or 0,
        )
        for request in requests
    )
    arrival_ns = heard.timeline.arrival_ns[request_id] - 2 * MS
    return Times(
        heard.timeline.first_token_ns[request_id] - arrival_ns, heard.timeline.finish_ns[request_id] - arrival_ns
    )


@pytest.mark.parametrize(
    ("what", "tried", "flags"),
    [
        ("policy", "static", ()),
        ("max_num_batched_tokens", 32, ()),
        ("max_num_batched_tokens", 128, ("--max-num-batched-tokens",)),
        ("max_num_seqs", 8, ("--max-num-seqs",)),
        ("num_blocks", 56, ("--kv-cache-memory",)),
    ],
)
def test_each_change_is_what_the_simulator_makes_of_the_same_arrivals(
    what: str, tried: str | int, flags: Collection[str], tmp_path: Path
) -> None:
    requests = crowd()
    num_blocks = 28 if what == "num_blocks" else 200
    run = record_run(tmp_path / "run.gz", requests, clients=clients_of(requests), num_blocks=num_blocks)
    num_different = 0
    for i in (3, 7, 11):
        found = what_if(run, [i], advised=flags)
        assert found.simulated == simulated_times(run, requests, i)
        estimate = estimate_of(found, what, tried)
        assert estimate.times == simulated_times(run, requests, i, **{what: tried})
        num_different += estimate.times != found.simulated
    assert num_different, "a change that changes nothing tests nothing"


def test_another_policy_is_what_a_replay_under_it_says(tmp_path: Path) -> None:
    run = record_run(tmp_path / "run.gz", crowd())
    other = replay(tmp_path / "run.gz", policy="static").replayed
    for i in range(12):
        times = estimate_of(what_if(run, [i]), "policy", "static").times
        assert times == Times(other.ttft_by_request()[i], other.finish_ns[i] - other.arrival_ns[i])


@pytest.mark.parametrize("policy", ["static", "priority"])
def test_other_policies_are_held_against_continuous(policy: str, tmp_path: Path) -> None:
    found = what_if(record_run(tmp_path / "run.gz", crowd(), policy=policy), [9])
    assert estimate_of(found, "policy").change == Change("policy", policy, "continuous")


def test_the_model_says_how_far_it_is_off_for_this_request(tmp_path: Path) -> None:
    """Here steps took what a line says, so it is hardly off; then the measured times are made longer by a tenth."""
    requests = crowd()
    run = record_run(tmp_path / "run.gz", requests, clients=clients_of(requests))
    for i in range(12):
        errors = what_if(run, [i]).errors
        assert all(abs(error or 1.0) < 2e-3 or error == 0 for error in errors.values()), errors
    found = what_if(run, [9])
    longer = replace(found, measured=Times((found.simulated.ttft_ns or 0) * 10 // 9, found.simulated.e2e_ns * 2))
    data = json.loads(json.dumps(longer.as_data()))
    assert data["simulated"]["ttft_error"] == pytest.approx(-0.1, rel=1e-6)
    assert {(each["ttft_error"], each["e2e_error"]) for each in data["estimates"]} == {
        (data["simulated"]["ttft_error"], -0.5)
    }


def test_reading_and_delivering_are_taken_as_measured(tmp_path: Path) -> None:
    """2 ms before the engine was told, 3 ms after the end in the engine; and the step under way is waited for."""
    requests = crowd()
    run = record_run(tmp_path / "plain.gz", requests)
    plain = what_if(run, [8])
    end_ns = run.timeline.finish_ns[8]
    client = replace(clients_of(requests)[8], delivered_ns=end_ns + 3 * MS)
    found = what_if(record_run(tmp_path / "run.gz", crowd(), clients=[client]), [8])
    arrival_ns = requests[8].arrival_ns
    assert found.measured == Times(
        run.timeline.first_token_ns[8] - arrival_ns + 2 * MS, end_ns - arrival_ns + 2 * MS + 3 * MS
    )
    assert run.timeline.arrival_ns[8] > arrival_ns, "a step was under way"
    times, bare = estimate_of(found, "alone").times, estimate_of(plain, "alone").times
    assert times is not None
    assert bare is not None
    assert times == Times((bare.ttft_ns or 0) + 2 * MS, bare.e2e_ns + 5 * MS)


def test_what_was_cached_of_a_prompt_is_cached_also_alone(tmp_path: Path) -> None:
    """Four of its six blocks were there, from a request that is not simulated then."""
    head = list(range(64))
    requests = [
        make_request(0, head, max_tokens=30, arrival_ns=1),
        make_request(1, [*head, *range(900, 932)], max_tokens=4, arrival_ns=60 * MS),
    ]
    run = record_run(tmp_path / "run.gz", requests, max_num_batched_tokens=128)
    found = what_if(run, [1])
    assert found.num_cached_tokens == 64
    alone = estimate_of(found, "alone").times
    assert alone is not None
    assert alone.ttft_ns == step_ns(run, (64, 32))
    assert alone.e2e_ns == step_ns(run, (64, 32)) + sum(step_ns(run, (96 + k, 1)) for k in range(3))


def test_choices_count_by_the_one_that_ends_last(tmp_path: Path) -> None:
    prompt = list(range(40))
    choices = [
        make_request(i, prompt, n=3, group_id=0, choice_index=i, max_tokens=20, arrival_ns=1, eos_token_ids=(EOS,))
        for i in range(3)
    ]
    others = [make_request(i, 30, max_tokens=25, arrival_ns=1) for i in range(3, 6)]
    client = Client("cmpl-x", "", 0, 3, 1, 1)
    run = record_run(tmp_path / "run.gz", choices + others, clients=[client], ends={0: 5, 2: 9}, max_num_seqs=8)
    found = what_if(run, [0, 1, 2])
    assert [run.timeline.num_tokens[i] for i in range(3)] == [5, 20, 9]
    assert found.measured == Times(run.timeline.first_token_ns[1] - 1, run.timeline.finish_ns[1] - 1)
    assert abs(found.errors["e2e_error"] or 0) < 1e-3
    alone = estimate_of(found, "alone").times
    assert alone is not None
    assert alone.e2e_ns < found.measured.e2e_ns


def test_client_that_leaves_after_the_end_makes_nothing_longer(tmp_path: Path) -> None:
    """Its request ended by a token, long before what it asked for."""
    requests = [
        make_request(0, 30, max_tokens=90, arrival_ns=1, eos_token_ids=(EOS,)),
        make_request(1, 30, max_tokens=80, arrival_ns=1),
    ]
    run = record_run(tmp_path / "run.gz", requests, ends={0: 10}, aborts={0: 300 * MS})
    assert run.timeline.num_tokens[0] == 10
    found = what_if(run, [0])
    assert found.simulated.e2e_ns == pytest.approx(found.measured.e2e_ns, rel=1e-3)
    assert replay(tmp_path / "run.gz", policy="static").replayed.num_tokens[0] == 10


def test_a_request_without_output_has_no_first_token(tmp_path: Path) -> None:
    run = record_run(tmp_path / "run.gz", [*crowd(), make_request(12, 50, max_tokens=0, arrival_ns=30 * MS)])
    data = what_if(run, [12]).as_data()
    assert data["measured"]["ttft_ns"] is data["simulated"]["ttft_error"] is None
    assert data["measured"]["e2e_ns"] > data["estimates"][0]["e2e_ns"] > 0


def test_steps_unlike_all_recorded_ones_are_marked(tmp_path: Path) -> None:
    """With four slots in use all the time, eight rows and a lone one are both unheard of."""
    requests = [make_request(i, 8, max_tokens=30, arrival_ns=1) for i in range(16)]
    found = what_if(record_run(tmp_path / "run.gz", requests), [13], advised=["--max-num-seqs"])
    assert {each.change.what: each.is_beyond for each in found.estimates} == {
        "alone": True,
        "policy": False,
        "max_num_batched_tokens": False,
        "max_num_seqs": True,
    }


def test_limits_that_no_server_takes_are_not_tried(tmp_path: Path) -> None:
    run = record_run(tmp_path / "run.gz", crowd(), max_num_seqs=16, max_num_batched_tokens=20)
    found = what_if(run, [5], advised=["--max-num-seqs", "--tenants"])
    why = {(each.change.what, each.change.tried): each.why_not for each in found.estimates if each.times is None}
    assert why == {("max_num_batched_tokens", 10): "below_slots", ("max_num_seqs", 32): "below_slots"}


def test_a_request_without_an_end_of_its_own_is_refused(tmp_path: Path) -> None:
    requests = [*crowd(), make_request(12, 90_000, max_tokens=5, arrival_ns=40 * MS)]
    run = record_run(tmp_path / "run.gz", requests, aborts={7: 100 * MS})
    for request_id, why in ((7, "its client left"), (12, "it was refused")):
        with pytest.raises(RecordError, match=f"no end of its own \\({why}\\)"):
            what_if(run, [request_id])


def test_a_request_at_the_end_of_a_cut_record_is_refused(tmp_path: Path) -> None:
    record_run(tmp_path / "run.gz", crowd(200))
    whole = (tmp_path / "run.gz").read_bytes()
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) * 2 // 3])
    run = past_run(tmp_path / "cut.gz")
    with pytest.raises(RecordError, match="the record ends before it"):
        what_if(run, [max(run.timeline.arrival_ns)])
    assert what_if(run, [3]).estimates


def test_a_record_of_a_few_steps_is_refused(tmp_path: Path) -> None:
    run = record_run(tmp_path / "run.gz", [make_request(0, 8, max_tokens=19, arrival_ns=1)])
    with pytest.raises(RecordError, match="has 19 steps, too few to fit step times to; record at least 20"):
        what_if(run, [0])
