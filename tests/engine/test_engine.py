"""The engine thread: messages in, outputs out, and what happens when somebody fails."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.core.hash_model import HashModelRunner

from everystop.core.errors import EngineDead
from everystop.core.events import Event, LedgerEvent, StepEvent
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.plan import StepPlan, StepResult, TokenLogprobs
from everystop.core.policy import PolicySettings, make_policy
from everystop.core.request import SamplingParams
from everystop.core.scheduler import Scheduler
from everystop.engine.engine import Engine
from everystop.engine.messages import Abort, StepOutput, Submit

EOS = 1
WAIT_S = 60


class CountingRunner:
    """Samples 100, 101, 102 … for each request; `fail` may raise or spoil a result."""

    def __init__(self, fail: Callable[[StepPlan, StepResult], None] | None = None) -> None:
        self.fail = fail
        self.closed = False

    def execute(self, plan: StepPlan) -> StepResult:
        rows: list[tuple[int, ...] | str] = []
        for row in plan.rows:
            samples = row.logits_from < row.num_tokens
            rows.append((100 + row.start + row.num_tokens - 3,) if samples else ())
        result = StepResult(rows=rows)
        if self.fail is not None:
            self.fail(plan, result)
        return result

    def close(self) -> None:
        self.closed = True


class LetterDecoder:
    """Token 100 is "a", 101 "b", and so on; 200 is a control token."""

    def __init__(self, *, skip_special_tokens: bool) -> None:
        self._control = "" if skip_special_tokens else "<control>"

    def feed(self, token_id: int) -> str:
        return self._control if token_id == 200 else chr(ord("a") + token_id - 100)


class Client:
    """Collects outputs by request until they end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outputs: queue.Queue[StepOutput] = queue.Queue()
        self.failures: queue.Queue[BaseException] = queue.Queue()
        engine.on_outputs = lambda outputs: [self.outputs.put(output) for output in outputs] and None
        engine.on_failure = self.failures.put

    def submit(self, num_prompt: int = 3, **params: object) -> int:
        params = {"max_tokens": 5, **params}
        sampling = SamplingParams(**params)  # type: ignore[arg-type]
        first = self.engine.allocate_ids(sampling.n)
        self.engine.submit(Submit(first, tuple(range(2, 2 + num_prompt)), sampling))
        return first

    def collect(self, num_finished: int) -> dict[int, list[StepOutput]]:
        collected: dict[int, list[StepOutput]] = {}
        while num_finished:
            output = self.outputs.get(timeout=WAIT_S)
            collected.setdefault(output.request_id, []).append(output)
            num_finished -= output.finish_reason is not None or output.refused
        return collected


@contextmanager
def running_engine(
    runner: CountingRunner, *, policy: str = "continuous", batch_wait_ns: int = 1_000_000, seed: int | None = None
) -> Iterator[Client]:
    kv = KVCache(num_blocks=64, block_size=16, enable_prefix_caching=True)
    made = make_policy(policy, PolicySettings(batch_wait_ns=batch_wait_ns))
    scheduler = Scheduler(Limits(max_num_seqs=4, max_model_len=512), kv, made)
    engine = Engine(scheduler, runner, eos_token_ids=[EOS], make_text_decoder=LetterDecoder, seed=seed)
    client = Client(engine)
    engine.start()
    try:
        yield client
    finally:
        engine.stop()
        if engine.error is None:
            scheduler.check_integrity()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.002)


def tokens_of(outputs: list[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("policy", ["continuous", "static", "static-padded"])
def test_each_request_gets_its_tokens_and_one_end(policy: str) -> None:
    with running_engine(CountingRunner(), policy=policy) as client:
        ids = [client.submit(max_tokens=k) for k in range(1, 8)]
        collected = client.collect(len(ids))
    for k, request_id in enumerate(ids, start=1):
        outputs = collected[request_id]
        assert tokens_of(outputs) == [100 + i for i in range(k)]
        assert [o.finish_reason for o in outputs] == [None] * (k - 1) + ["length"]


def test_choices_have_consecutive_ids() -> None:
    with running_engine(CountingRunner()) as client:
        first = client.submit(n=3)
        collected = client.collect(3)
    assert sorted(collected) == [first, first + 1, first + 2]


def test_stop_string_across_tokens_ends_the_request_in_the_step_that_completes_it() -> None:
    with running_engine(CountingRunner()) as client:
        request_id = client.submit(stop=("cd",), max_tokens=20)
        outputs = client.collect(1)[request_id]
    assert tokens_of(outputs) == [100, 101, 102, 103]
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].stop_reason == "cd"


def test_stop_string_that_reads_like_a_token_id_is_still_a_string() -> None:
    class DigitDecoder:
        def __init__(self, *, skip_special_tokens: bool) -> None:
            pass

        def feed(self, token_id: int) -> str:
            return str(token_id)

    with running_engine(CountingRunner()) as client:
        client.engine._make_text_decoder = DigitDecoder
        request_id = client.submit(stop=("102",), max_tokens=20)
        outputs = client.collect(1)[request_id]
    assert outputs[-1].stop_reason == "102"


def test_stop_token_is_named_as_the_reason() -> None:
    with running_engine(CountingRunner()) as client:
        request_id = client.submit(stop_token_ids=(102,), max_tokens=20)
        outputs = client.collect(1)[request_id]
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].stop_reason == 102


def test_refused_request_is_answered_and_leaves_others_alone() -> None:
    with running_engine(CountingRunner()) as client:
        too_long = client.submit(num_prompt=600)
        never_fits = client.submit(max_tokens=600)
        fine = client.submit()
        collected = client.collect(3)
    assert collected[too_long][0].refused
    assert "600 tokens" in str(collected[too_long][0].error)
    assert collected[never_fits][0].error_code == "context_length_exceeded"
    assert len(tokens_of(collected[fine])) == 5


def test_abort_ends_a_request_and_unknown_ids_are_ignored() -> None:
    is_aborted = threading.Event()

    def hold(plan: StepPlan, result: StepResult) -> None:
        assert is_aborted.wait(WAIT_S)

    with running_engine(CountingRunner(hold)) as client:
        request_id = client.submit(max_tokens=450)
        client.engine.abort(Abort((12345, request_id)))
        is_aborted.set()
        outputs = client.collect(1)[request_id]
        assert outputs[-1].finish_reason == "abort"
        other = client.submit()
        assert len(tokens_of(client.collect(1)[other])) == 5


def test_failed_row_fails_its_request_alone() -> None:
    def spoil(plan: StepPlan, result: StepResult) -> None:
        for i, row in enumerate(plan.rows):
            if row.request_id == 0 and row.start >= 4:
                result.rows[i] = "non-finite logits"

    with running_engine(CountingRunner(spoil)) as client:
        bad, good = client.submit(), client.submit()
        collected = client.collect(2)
    assert collected[bad][-1].finish_reason == "error"
    assert "non-finite logits" in str(collected[bad][-1].error)
    assert tokens_of(collected[good]) == [100, 101, 102, 103, 104]


def test_runner_failure_is_reported_and_later_requests_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    def fail(plan: StepPlan, result: StepResult) -> None:
        raise RuntimeError("the device is on fire")

    with running_engine(CountingRunner(fail)) as client:
        client.submit()
        failure = client.failures.get(timeout=WAIT_S)
        assert "on fire" in str(failure)
        assert client.engine.error is failure
        with pytest.raises(EngineDead, match="on fire"):
            client.submit()


def test_failing_observer_does_not_end_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    def explode(events: object) -> None:
        raise ValueError("metrics went below zero")

    with running_engine(CountingRunner()) as client:
        client.engine.on_events = explode
        request_id = client.submit()
        assert len(tokens_of(client.collect(1)[request_id])) == 5
    assert "a callback of the engine failed" in caplog.text


def seeds_seen(seed: int | None) -> list[int | None]:
    seen: list[int | None] = []
    runner = CountingRunner(lambda plan, result: seen.extend(a.params.seed for a in plan.admitted))
    with running_engine(runner, seed=seed) as client:
        client.submit()
        client.submit()
        client.submit(seed=7)
        client.collect(3)
    return seen


def test_seeds_are_random_unless_the_server_has_one_and_a_clients_own_wins() -> None:
    first, again, unseeded = seeds_seen(5), seeds_seen(5), seeds_seen(None)
    assert first == again
    assert first[0] != first[1]
    assert first[2] == unseeded[2] == 7
    assert unseeded[:2] != first[:2]


def test_idle_engine_sleeps_and_wakes() -> None:
    with running_engine(CountingRunner()) as client:
        client.submit()
        client.collect(1)
        wait_until(lambda: client.engine._is_at_rest)
        request_id = client.submit()
        assert len(tokens_of(client.collect(1)[request_id])) == 5


def test_stopping_closes_the_runner() -> None:
    runner = CountingRunner()
    with running_engine(runner) as client:
        client.submit()
        client.collect(1)
    assert runner.closed


def test_stop_between_two_turns_is_not_slept_through() -> None:
    class StoppedWhileCleared(threading.Event):
        def clear(self) -> None:
            engine._stopping = True
            super().clear()

    with running_engine(CountingRunner()) as client:
        engine = client.engine
        before, engine._wake = engine._wake, StoppedWhileCleared()
        for event in (before, engine._wake):  # the thread may sleep on either
            event.set()
        engine._thread.join(WAIT_S)
        assert not engine._thread.is_alive()


def test_engine_that_waits_for_a_batch_to_fill_sleeps() -> None:
    with running_engine(CountingRunner(), policy="static", batch_wait_ns=60_000_000_000) as client:
        client.submit()
        wait_until(lambda: client.engine._wake_at_ns > 0 and client.engine._scheduler.num_waiting == 1)


@pytest.mark.parametrize(("skips", "num_tokens"), [(False, 4), (True, 6)])
def test_a_stop_string_is_looked_for_in_the_text_that_is_shown(skips: bool, num_tokens: int) -> None:
    """Token 200 stands at place 3, and its text in what is shown if it is asked for."""

    def write_control(plan: StepPlan, result: StepResult) -> None:
        result.rows = [(200,) if tokens == (103,) else tokens for tokens in result.rows]

    with running_engine(CountingRunner(write_control)) as client:
        request_id = client.submit(stop=("c<con",), max_tokens=6, skip_special_tokens=skips)
        outputs = client.collect(1)[request_id]
    assert len(tokens_of(outputs)) == num_tokens


class ScoringRunner(CountingRunner):
    """Scores the prompt token at position p with -p."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        for request_id, start, num_tokens in plan.prompt_logits:
            scores = [TokenLogprobs(-float(start + i + 1), 1, ()) for i in range(num_tokens)]
            result.prompt_logprobs[request_id] = scores
        return result


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_prompt_scores_come_in_order_before_the_tokens(max_tokens: int) -> None:
    """A prompt of several steps, in outputs of their own; the last one tells the end."""
    with running_engine(ScoringRunner()) as client:
        request_id = client.submit(num_prompt=400, max_tokens=max_tokens, prompt_logprobs=0)
        outputs = client.collect(1)[request_id]
    scored = [output for output in outputs if output.prompt_logprobs]
    assert outputs[: len(scored)] == scored
    assert len(scored) == 2
    logprobs = [entry.logprob for output in scored for entry in output.prompt_logprobs]
    assert logprobs == [-float(position) for position in range(1, 400)]
    assert all(not output.token_ids and output.finish_reason is None for output in scored)
    assert sum(len(output.token_ids) for output in outputs) == max_tokens
    assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"allowed_token_ids": (5, 6), "bad_word_ids": ((5,), (6,))}, "bad_words"),
        ({"allowed_token_ids": (EOS, 6), "bad_word_ids": ((6,),), "min_tokens": 1}, "bad_words"),
        ({"allowed_token_ids": (EOS,), "min_tokens": 1}, "min_tokens"),
    ],
)
def test_settings_that_let_no_token_begin_are_refused(params: dict[str, Any], param: str) -> None:
    with running_engine(CountingRunner()) as client:
        request_id = client.submit(**params)
        [refusal] = client.collect(1)[request_id]
    assert refusal.refused
    assert refusal.error_param == param
    assert "allowed_token_ids" in (refusal.error or "")


def test_settings_that_leave_a_token_are_taken() -> None:
    """A word of two tokens, and one that is not allowed anyway."""
    with running_engine(CountingRunner()) as client:
        client.submit(allowed_token_ids=(5, 6), bad_word_ids=((5,), (6, 6), (7,)), max_tokens=1)
        [[output]] = client.collect(1).values()
    assert output.finish_reason == "length"


def test_stop_string_waits_for_min_tokens() -> None:
    """The tokens spell "abcdefgh"."""
    with running_engine(CountingRunner()) as client:
        for stop, min_tokens, num_tokens in (("b", 0, 2), ("b", 1, 2), ("b", 2, 8), ("bc", 2, 3), ("f", 2, 6)):
            request_id = client.submit(stop=(stop,), min_tokens=min_tokens, max_tokens=8)
            outputs = client.collect(1)[request_id]
            assert sum(len(output.token_ids) for output in outputs) == num_tokens, (stop, min_tokens)


class LedgerReader:
    """Keeps what an engine's events say of its thread's time."""

    def __init__(self, engine: Engine) -> None:
        self.ledgers: list[LedgerEvent] = []
        self.steps: list[StepEvent] = []
        engine.on_events = self._read

    def _read(self, events: list[Event]) -> None:
        self.steps += [event for event in events if isinstance(event, StepEvent) and event.plan.rows]
        self.ledgers += [event for event in events if isinstance(event, LedgerEvent)]


@pytest.mark.parametrize("depth", [0, 1])
def test_the_ledger_of_every_step_sums_to_its_time(depth: int) -> None:
    """From one step's end to the next's, to the nanosecond; but for the first one, before which the thread slept. Under
    preemption, too, in a pool that holds half of what is asked for.
    """
    runner = HashModelRunner(num_blocks=12, block_size=16)
    kv = KVCache(num_blocks=12, block_size=16, enable_prefix_caching=True)
    scheduler = Scheduler(Limits(max_num_seqs=8, max_model_len=192), kv, make_policy("continuous", PolicySettings()))
    engine = Engine(scheduler, runner, eos_token_ids=[EOS], depth=depth)
    client, reader = Client(engine), LedgerReader(engine)
    ids = [client.submit(num_prompt=20, max_tokens=30, ignore_eos=True) for _ in range(8)]
    began_ns = time.monotonic_ns()
    engine.start()
    try:
        client.collect(len(ids))
    finally:
        engine.stop()
    ledgers = reader.ledgers
    assert [ledger.step_id for ledger in ledgers] == [step.plan.step_id for step in reader.steps]
    assert scheduler.num_preemptions > 0
    assert 0 < ledgers[0].whole_ns <= ledgers[0].now_ns - began_ns
    for before, after in itertools.pairwise(ledgers):
        assert after.whole_ns == after.now_ns - before.now_ns
    assert all(min(ledger[2:]) >= 0 for ledger in ledgers)
    assert all(ledger.native_ns > 0 and ledger.schedule_ns > 0 for ledger in ledgers)


def test_the_ledger_leaves_sleep_out() -> None:
    """Between two requests the thread sleeps for 50 ms, which is no part of the second one's first step."""
    with running_engine(CountingRunner()) as client:
        engine, reader, is_asleep = client.engine, LedgerReader(client.engine), threading.Event()
        sleep = engine._sleep

        def watched_sleep(wake_at_ns: int | None) -> None:
            if len(reader.steps) == 2:
                is_asleep.set()
            sleep(wake_at_ns)

        engine._sleep = watched_sleep  # type: ignore[method-assign]
        client.submit(max_tokens=2)
        client.collect(1)
        assert is_asleep.wait(WAIT_S)
        time.sleep(0.05)
        client.submit(max_tokens=1)
        client.collect(1)
    first, second, third = reader.ledgers
    assert second.whole_ns == second.now_ns - first.now_ns
    assert third.whole_ns <= third.now_ns - second.now_ns - 50_000_000


def test_looking_for_stop_strings_is_a_part_of_its_own() -> None:
    class SlowDecoder(LetterDecoder):
        def feed(self, token_id: int) -> str:
            time.sleep(0.002)
            return super().feed(token_id)

    with running_engine(CountingRunner()) as client:
        client.engine._make_text_decoder = SlowDecoder
        reader = LedgerReader(client.engine)
        client.submit(max_tokens=3, stop=("never",))
        client.collect(1)
    assert all(ledger.detokenise_ns >= 2_000_000 for ledger in reader.ledgers)
    assert len(reader.ledgers) == 3
