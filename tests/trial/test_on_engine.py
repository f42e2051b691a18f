"""Workloads on engines: what is noted of each request, and that a run leaves nothing behind."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.core.hash_model import HashModelRunner, solo
from tests.interrupts import interruptible
from tests.trial.stand import make_engine, make_runner, stragglers

from everystop.core.errors import EngineDead, RequestError
from everystop.core.plan import StepPlan, StepResult
from everystop.observe.comparison import Comparison, RequestLine, Run
from everystop.sim.workloads import Job, Workload
from everystop.trial.on_engine import EngineRun, Sampling, check_workload
from everystop.trial.repeats import WarmUpFailed, compare, warm_up_workload

POLICIES = ("static", "static-padded", "continuous", "shortest")


def play(
    workload: Workload, policy: str = "continuous", runner: HashModelRunner | None = None, **sampling: float
) -> Run:
    engine = make_engine(runner or make_runner(), policy)
    return EngineRun(workload, engine, Sampling(**sampling)).play(policy, 0, 4, lambda num, num_all: None)  # type: ignore[arg-type]


class Silent:
    """Watches nothing."""

    def begin(self, policy: str, repeat: int | None) -> None: ...

    def advance(self, num_over: int, num_all: int) -> None: ...


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_has_its_tokens_times_and_trail(policy: str) -> None:
    workload = stragglers()
    run = play(workload, policy)
    assert run.history is not None
    assert [line.index for line in run.requests] == list(range(8))
    for line, job in zip(run.requests, workload.jobs, strict=True):
        assert (line.error, line.group, line.num_prompt_tokens) == (None, job.group, len(job.prompt))
        assert line.num_output_tokens == len(line.token_s) == job.max_tokens
        assert 0 <= line.sent_s <= line.token_s[0] <= line.token_s[-1] == line.end_s <= run.duration_s
        assert line.request_id is not None
        trail = run.history.trails[line.request_id]
        assert trail.arrival is not None
        assert trail.finish is not None
        assert run.seconds(trail.arrival.now_ns) >= line.sent_s
        assert run.seconds(trail.finish.now_ns) <= line.end_s
        assert trail.finish.num_output_tokens == line.num_output_tokens


def test_clients_without_a_request_to_send_cost_no_time() -> None:
    run = play(replace(stragglers(), num_clients=10**15))
    assert all(line.error is None for line in run.requests)


def test_a_digest_is_of_the_tokens_that_a_request_yields_alone() -> None:
    digests = {play(stragglers(), policy).requests[3].digest for policy in POLICIES}
    assert len(digests) == 1
    other = stragglers()
    changed = replace(other.jobs[3], prompt=(5, *other.jobs[3].prompt))
    assert play(Workload("x", 8, (*other.jobs[:3], changed, *other.jobs[4:]))).requests[3].digest not in digests


def test_drawn_outputs_are_the_same_under_every_policy_and_other_under_another_seed() -> None:
    drawn = [[line.digest for line in play(stragglers(), p, temperature=1.0, seed=3).requests] for p in POLICIES]
    assert all(digests == drawn[0] for digests in drawn)
    assert drawn[0] != [line.digest for line in play(stragglers(), temperature=1.0, seed=4).requests]
    twins = Workload("twins", 2, (Job(prompt=(1, 2), max_tokens=20),) * 2)
    one, other = play(twins, temperature=1.0).requests
    assert one.digest != other.digest


def test_a_closed_loop_has_as_many_requests_under_way_as_clients_and_none_waits_for_another_step() -> None:
    workload = replace(stragglers(), num_clients=3)
    run = play(workload)
    assert run.history is not None
    steps = run.history.steps.since(0)
    assert max(step.num_running for step in steps) == 3
    assert [line.request_id for line in run.requests] == list(range(8))  # taken in order
    ends = sorted(line.end_s for line in run.requests)
    for line in run.requests[3:]:
        before = max(end for end in ends if end <= line.sent_s)
        trail = run.history.trails[line.request_id or 0]
        admitted = trail.admits[0].now_ns
        steps_between = [s for s in steps if s.num_rows and before < run.seconds(s.now_ns) and s.now_ns <= admitted]
        assert not steps_between


def test_timed_requests_are_sent_at_their_times_and_their_ids_follow_the_order_of_sending() -> None:
    timed = tuple(Job(prompt=(i,), max_tokens=2, at_s=at_s) for i, at_s in enumerate((0.12, 0.0, 0.06)))
    run = play(Workload("timed", 1, (*timed, Job(prompt=(9,), max_tokens=2))))
    lags = [line.sent_s - line.scheduled_s for line in run.requests if line.scheduled_s is not None]
    assert len(lags) == 3
    assert all(lag >= 0 for lag in lags)
    by_sending = sorted(run.requests, key=lambda line: line.sent_s)
    assert [line.index for line in by_sending] == [3, 1, 2, 0]
    assert [line.request_id for line in by_sending] == [0, 1, 2, 3]


def test_refused_requests_are_errors_and_their_client_goes_on() -> None:
    jobs = (Job(prompt=tuple(range(600)), max_tokens=1), Job(prompt=(1,), max_tokens=3))
    run = play(Workload("refused", 1, jobs))
    assert "600" in (run.requests[0].error or "")
    assert (run.requests[0].num_output_tokens, run.requests[1].num_output_tokens) == (0, 3)
    assert run.good == [run.requests[1]]


def test_a_run_leaves_nothing_on_board_and_no_prefix_for_the_next() -> None:
    runner = make_runner()
    shared = Workload("shared", 1, (Job(prompt=tuple(range(64)), max_tokens=4),) * 2)
    for _ in range(2):
        run = play(shared, runner=runner)
        assert run.history is not None
        cached = [trail.admits[0].num_cached_tokens for trail in run.history.trails.values()]
        assert cached == [0, 48]
        assert not runner.known_requests


def test_an_engine_that_fails_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(HashModelRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            if self.num_steps == 3:
                raise RuntimeError("out of order")
            return super().execute(plan)

    runner = Failing(num_blocks=256, block_size=16)
    with pytest.raises(EngineDead, match="out of order"):
        play(stragglers(), runner=runner)


def test_what_is_on_board_of_a_lent_runner_is_put_off_when_it_is_given_back() -> None:
    runner = HashModelRunner(num_blocks=256, block_size=16, before_execute=lambda plan: time.sleep(0.005))
    run = EngineRun(stragglers(long=200), make_engine(runner), Sampling())

    def interrupt(num_over: int, num_all: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.play("continuous", 0, 4, interrupt)
    assert not runner.known_requests


def comparing(play_one: Callable[[int], None] = lambda number: None, repeats: int = 2) -> Comparison:
    runner, numbers = make_runner(), iter(range(100))

    def play_run(workload: Workload, policy: str, repeat: int, progress: Callable[[int, int], None]) -> Run:
        play_one(next(numbers))
        engine = make_engine(runner, policy)
        return EngineRun(workload, engine, Sampling()).play(policy, repeat, 4, progress)

    return compare(
        stragglers(), ["static", "continuous"], repeats, play_run, Silent(), num_warm_up_jobs=3, settings={"a": 1}
    )


def test_policies_take_turns_after_a_warm_up_that_is_not_counted() -> None:
    seen: list[int] = []
    comparison = comparing(seen.append)
    assert seen == [0, 1, 2, 3, 4]
    order = [(run.policy, run.repeat) for run in comparison.runs]
    assert order == [("static", 0), ("continuous", 0), ("continuous", 1), ("static", 1)]
    assert comparison.is_complete
    assert comparison.equality().num_equal == 8
    assert comparison.equality().holds


def interrupt_at(number: int) -> Callable[[int], None]:
    def check(now: int) -> None:
        if now == number:
            raise KeyboardInterrupt

    return check


def test_an_interrupted_comparison_keeps_the_runs_that_are_whole() -> None:
    comparison = comparing(interrupt_at(4))
    assert [(run.policy, run.repeat) for run in comparison.runs] == [
        ("static", 0),
        ("continuous", 0),
        ("continuous", 1),
    ]
    assert not comparison.is_complete
    assert len(list(comparison.pairs("continuous", "static"))) == 1


def test_a_warm_up_that_fails_whole_ends_the_comparison_before_it_begins() -> None:
    played = []

    def play_run(workload: Workload, policy: str, repeat: int, progress: Callable[[int, int], None]) -> Run:
        played.append(policy)
        lines = tuple(
            RequestLine(
                index=i,
                group="",
                num_prompt_tokens=1,
                num_output_tokens=0,
                scheduled_s=None,
                sent_s=0.0,
                token_s=(),
                end_s=0.1,
                error="HTTP 401: a valid API key is needed",
                digest="",
                request_id=None,
            )
            for i in range(len(workload.jobs))
        )
        return Run(
            policy=policy, repeat=repeat, duration_s=0.1, requests=lines, start_ns=0, max_num_seqs=4, history=None
        )

    with pytest.raises(WarmUpFailed, match=r"all 3 requests of the warm-up failed.*HTTP 401"):
        compare(stragglers(), ["server"], 5, play_run, Silent(), num_warm_up_jobs=3, settings={})
    assert played == ["server"]


@pytest.mark.parametrize("number", [0, 1])
def test_without_a_whole_run_there_is_nothing_to_keep(number: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        comparing(interrupt_at(number))


def test_a_signal_in_the_middle_of_a_run_ends_it() -> None:
    runner, numbers = make_runner(), iter(range(10))
    main_id = threading.main_thread().ident
    assert main_id is not None
    timer = threading.Timer(0.05, signal.pthread_kill, (main_id, signal.SIGINT))

    def play_run(workload: Workload, policy: str, repeat: int, progress: Callable[[int, int], None]) -> Run:
        if next(numbers) < 2:
            return EngineRun(workload, make_engine(runner, policy), Sampling()).play(policy, repeat, 4, progress)
        late = Workload("late", 0, (Job(prompt=(1,), max_tokens=1, at_s=60.0),))
        run = EngineRun(late, make_engine(runner, policy), Sampling())
        return run.play(policy, repeat, 4, lambda num_over, num_all: None if timer.ident else timer.start())

    with interruptible():
        comparison = compare(
            stragglers(), ["static", "continuous"], 2, play_run, Silent(), num_warm_up_jobs=1, settings={}
        )
    timer.join()
    assert [run.policy for run in comparison.runs] == ["static"]
    assert not runner.known_requests


def test_the_warm_up_is_short_and_has_no_times_and_no_prompt_of_the_workload() -> None:
    workload = Workload("w", 0, tuple(Job(prompt=(i, 9), max_tokens=500, at_s=float(i)) for i in range(5)))
    warm = warm_up_workload(workload, 3)
    assert (warm.num_clients, len(warm.jobs)) == (3, 3)
    assert {(job.at_s, job.max_tokens) for job in warm.jobs} == {(None, 32)}
    assert [job.prompt for job in warm.jobs] == [(9, 0), (9, 1), (9, 2)]


def test_prompts_of_another_vocabulary_are_named() -> None:
    workload = Workload("w", 1, (Job(prompt=(1, 99), max_tokens=1), Job(prompt=(1, 100), max_tokens=1)))
    assert check_workload(workload, 100) == ["request 1 has token id 100, and the model has 0 to 99"]


def test_the_outputs_are_those_of_the_oracle() -> None:
    run = play(stragglers())
    workload = stragglers()
    params = Sampling().params(0, workload.jobs[0])
    expected = solo(workload.jobs[0].prompt, params, limit_tokens=256).token_ids
    assert len(expected) == run.requests[0].num_output_tokens


def test_what_no_engine_would_take_is_found_before_a_run() -> None:
    workload = Workload("w", 1, (Job(prompt=(1,), max_tokens=1), Job(prompt=(1,), max_tokens=1 << 40)))
    with pytest.raises(RequestError, match="max_tokens"):
        EngineRun(workload, make_engine(make_runner()), Sampling())


def test_a_run_that_cannot_go_on_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    run = EngineRun(replace(stragglers(), num_clients=1), make_engine(make_runner()), Sampling())
    usual = run._send

    def send(index: int) -> None:
        if index == 3:
            raise RuntimeError("nobody can send this")
        usual(index)

    monkeypatch.setattr(run, "_send", send)
    with pytest.raises(EngineDead, match="nobody can send this"):
        run.play("continuous", 0, 4, lambda num_over, num_all: None)
