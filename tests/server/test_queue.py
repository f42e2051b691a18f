"""The edge's account of who waits: it equals the scheduler's, says who is taken, and when there will be room."""

from __future__ import annotations

import random

import pytest
from tests.core.harness import Harness, make_scheduler

from everystop.core.errors import RequestError
from everystop.core.events import AdmitEvent, Event, PreemptEvent, StepEvent
from everystop.core.plan import StepPlan
from everystop.core.request import FinishReason
from everystop.server.errors import Overloaded
from everystop.server.queue import QueueAccount, QueueLimits, TokensInBytes
from everystop.server.service_rate import MAX_RETRY_AFTER_S, ServiceRate

S = 10**9


def make_queue(max_num_reqs: int = 4, max_num_tokens: int = 100, num_places: int = 2) -> QueueAccount:
    return QueueAccount(QueueLimits(max_num_reqs, max_num_tokens), num_places)


def admit(request_id: int, now_ns: int = 0) -> AdmitEvent:
    return AdmitEvent(now_ns, 0, request_id, 0, 1, 0, False, -1)


def preempt(request_id: int, now_ns: int = 0) -> PreemptEvent:
    return PreemptEvent(now_ns, 0, request_id, 0, 1)


def step(num_waiting: int, now_ns: int = 0) -> StepEvent:
    return StepEvent(now_ns, now_ns, 0, StepPlan(0), (), 0, num_waiting, 0, 1, 0, 0, 0)


def fill(queue: QueueAccount, num_running: int, num_waiting: int, tokens: int = 1) -> None:
    """Sequences from 0 on, the first of which run; the last step left somebody waiting if anybody does."""
    queue.enter(dict.fromkeys(range(num_running + num_waiting), tokens), 0)
    queue.receive([*map(admit, range(num_running)), step(num_waiting)])
    queue.catch_up()
    assert (queue.num_reqs, queue.num_held) == (num_waiting, num_running + num_waiting)


# ------------------------------------------------------------------ the account


@pytest.mark.parametrize("policy", ["continuous", "static", "priority", "fair"])
@pytest.mark.parametrize("seed", range(4))
def test_the_account_is_the_schedulers_own_whatever_happens(policy: str, seed: int) -> None:
    """Events come late and in lumps; in between ids leave by the other road. Whenever all has come, it is exact."""
    dice = random.Random(f"{policy} {seed}")
    harness = Harness(make_scheduler(policy=policy, num_blocks=12, max_num_seqs=4, max_model_len=96))
    queue = QueueAccount(QueueLimits(1024, 1 << 20), 4)
    sizes: dict[int, int] = {}
    next_id, num_taken, told = 0, 0, 0
    for _ in range(300):
        if dice.random() < 0.4 and len(harness.scheduler.requests) < 12:
            n, length = dice.choice((1, 1, 1, 3)), dice.randrange(1, 60)
            harness.add_group(next_id, length, n, max_tokens=dice.randrange(1, 30), seed=1)
            entered = {next_id + k: 1 if k else length for k in range(n)}
            queue.enter(entered, harness.now_ns)
            sizes |= entered
            next_id += n
        if dice.random() < 0.1 and harness.scheduler.requests:
            gone = dice.choice(list(harness.scheduler.requests))
            queue.leave((gone,))  # at once: the engine hears of it later
            harness.abort(gone)
        harness.turn()
        for request_id in list(harness.finished)[num_taken:]:
            queue.leave((request_id,))
        num_taken = len(harness.finished)
        if dice.random() < 0.5:
            queue.receive(harness.events[told:])
            told = len(harness.events)
            queue.catch_up()
            waiting = [key for key in harness.scheduler.requests if key not in harness.scheduler.running]
            assert queue.num_reqs == harness.scheduler.num_waiting == len(waiting)
            assert queue.num_tokens == sum(sizes[key] for key in waiting)
            assert queue.num_held == len(harness.scheduler.requests)
    assert harness.counts["preemptions"] > 0
    assert harness.counts[f"finished by {FinishReason.ABORT}"] > 0
    for request_id in list(harness.scheduler.requests):
        queue.leave((request_id, request_id))
    queue.receive(harness.events[told:])
    queue.catch_up()
    assert (queue.num_reqs, queue.num_tokens, queue.num_held) == (0, 0, 0)


def test_news_of_somebody_who_has_left_changes_nothing() -> None:
    queue = make_queue()
    queue.enter({7: 30}, 0)
    queue.leave((7,))
    queue.receive([admit(7), preempt(7), admit(8), step(3)])
    queue.catch_up()
    assert (queue.num_reqs, queue.num_tokens, queue.num_held) == (0, 0, 0)
    queue.check(6, 90, 0)  # nor does that step's word that somebody waits


# ------------------------------------------------------------------ who is taken


def test_requests_are_capped_beside_the_places_that_are_free() -> None:
    queue = make_queue(max_num_reqs=4, num_places=2)
    for request_id in range(6):  # all in one turn of the loop: two of them will run
        queue.check(1, 1, 0)
        queue.enter({request_id: 1}, 0)
    with pytest.raises(Overloaded, match=r"waiting 4 of at most 4 requests .*, beside 2 for whom places are free,"):
        queue.check(1, 1, 0)
    queue.receive([admit(0), admit(1), step(4)])
    with pytest.raises(Overloaded, match="waiting 4 of at most 4 requests"):
        queue.check(1, 1, 0)
    queue.leave((5,))
    queue.check(1, 1, 0)


def test_places_that_nobody_can_take_are_not_free() -> None:
    """Blocks are short: two places are empty, and whoever waits has been left waiting by a step."""
    queue = make_queue(max_num_reqs=4, num_places=3)
    fill(queue, num_running=1, num_waiting=4)
    with pytest.raises(Overloaded):
        queue.check(1, 1, 0)
    queue.receive([admit(1), step(0)])
    queue.check(1, 1, 0)


def test_each_choice_counts() -> None:
    queue = make_queue(max_num_reqs=4)
    fill(queue, num_running=2, num_waiting=1)
    queue.check(3, 3, 0)
    with pytest.raises(Overloaded, match="so 4 more"):
        queue.check(4, 4, 0)
    with pytest.raises(Overloaded):
        queue.check_num(4)


def test_tokens_are_capped_once_somebody_must_wait() -> None:
    queue = make_queue(max_num_tokens=100, num_places=1)
    queue.check(1, 5000, 0)  # has a place: it does not queue
    queue.enter({0: 5000}, 0)
    with pytest.raises(Overloaded):
        queue.check(1, 1, 0)
    queue.receive([admit(0), step(0)])
    queue.check(1, 100, 0)
    with pytest.raises(Overloaded, match="about 101 cannot be taken"):
        queue.check(1, 101, 0)
    queue.enter({1: 60}, 0)
    queue.check(1, 40, 0)
    with pytest.raises(Overloaded, match="60 of at most 100 prompt tokens"):
        queue.check(1, 41, 0)


def test_what_could_never_be_taken_is_no_matter_of_time() -> None:
    queue = make_queue(max_num_reqs=4, max_num_tokens=100, num_places=2)
    queue.check(6, 50, 0)
    with pytest.raises(RequestError, match=r"7 sequences .* at most 6 .* 2 .* 4"):
        queue.check(7, 7, 0)
    with pytest.raises(RequestError, match="101 tokens, but at most 100"):
        queue.check(3, 101, 0)
    queue.check(2, 10**6, 0)  # both have a place


def test_a_preempted_request_waits_again() -> None:
    queue = make_queue()
    fill(queue, num_running=2, num_waiting=3, tokens=10)
    queue.receive([preempt(1), step(4)])
    queue.catch_up()
    assert (queue.num_reqs, queue.num_tokens) == (4, 40)
    with pytest.raises(Overloaded):
        queue.check(1, 1, 0)


def test_bytes_stand_in_for_tokens_until_they_are_counted() -> None:
    queue = make_queue(max_num_reqs=50, max_num_tokens=1000, num_places=1)
    fill(queue, num_running=1, num_waiting=3, tokens=300)
    queue.check_bytes(0, 0)
    queue.check_bytes(400, 0)  # a quarter of its bytes, as long as nothing else is known
    with pytest.raises(Overloaded):
        queue.check_bytes(404, 0)
    for _ in range(1000):
        queue.note_counted(1000, 50)
    queue.check_bytes(1900, 0)
    with pytest.raises(Overloaded):
        queue.check_bytes(2200, 0)


def test_a_guess_alone_keeps_nobody_out_for_ever() -> None:
    queue = make_queue(max_num_tokens=1000, num_places=1)
    queue.enter({0: 1}, 0)
    queue.receive([admit(0), step(0)])
    queue.check_bytes(30_000_000, 0)
    queue.enter({1: 1}, 0)
    with pytest.raises(Overloaded):
        queue.check_bytes(30_000_000, 0)


def test_what_is_being_prepared_has_its_place_in_the_queue() -> None:
    queue = make_queue(max_num_reqs=2, max_num_tokens=1000, num_places=1)
    fill(queue, num_running=1, num_waiting=0)
    with queue.reserved(400), queue.reserved(400):
        assert (queue.num_reqs, queue.num_tokens) == (2, 200)
        with pytest.raises(Overloaded, match="waiting 2 of at most 2"):
            queue.check_bytes(1, 0)
        queue.check_num(1, num_reserved=1)  # it is one of those two
        with pytest.raises(Overloaded):
            queue.check_num(2, num_reserved=1)
    assert (queue.num_reqs, queue.num_tokens) == (0, 0)
    with pytest.raises(ValueError, match="refused"), queue.reserved(400):
        raise ValueError("refused")
    assert queue.num_reqs == 0


# ------------------------------------------------------------------ when there will be room


def refusal(queue: QueueAccount, now_ns: int) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        queue.check(1, 1, now_ns)
    return caught.value


def test_retry_after_is_the_queue_by_the_measured_rate() -> None:
    """20 tokens a second got places while others waited, 400 are ahead."""
    queue = make_queue(max_num_reqs=40, max_num_tokens=10_000, num_places=2)
    queue.enter(dict.fromkeys(range(42), 10), 0)
    events: list[Event] = [admit(0, S // 2), admit(1, S), step(40, S)]
    queue.receive(events)
    error = refusal(queue, S)
    assert error.retry_after_s == 20
    assert "20 prompt tokens a second" in str(error)
    assert "try again in 20 s" in str(error)


def test_retry_after_grows_while_nothing_moves() -> None:
    queue = make_queue(max_num_reqs=4, num_places=2)
    fill(queue, num_running=0, num_waiting=4)
    assert refusal(queue, 0).retry_after_s == 1
    assert refusal(queue, 7 * S).retry_after_s == 7
    assert refusal(queue, 500 * S).retry_after_s == MAX_RETRY_AFTER_S


def test_time_in_which_nobody_waited_is_no_part_of_the_rate() -> None:
    queue = make_queue(max_num_reqs=4, num_places=2)
    for second in range(100):  # one request in ten seconds, each served within 0.1 s
        queue.enter({second: 10}, second * 10 * S)
        queue.receive([admit(second, second * 10 * S + S // 10), step(0)])
        queue.catch_up()
        queue.leave((second,))
    assert queue._rate.tokens_per_s == pytest.approx(100)


def test_the_rate_is_that_of_the_last_seconds() -> None:
    rate = ServiceRate()
    assert rate.tokens_per_s == 0
    for _ in range(100):
        rate.board(1000)
        rate.wait(S)
    for _ in range(20):
        rate.board(10)
        rate.wait(S)
    assert rate.tokens_per_s == pytest.approx(10)
    assert rate.seconds_for(0) == 1


def test_events_that_come_late_take_no_time_back() -> None:
    queue = make_queue(max_num_reqs=4, num_places=2)
    queue.enter({0: 10}, 5 * S)
    queue.enter({1: 10}, 6 * S)
    queue.receive([admit(0, 4 * S), admit(1, 5 * S)])
    queue.catch_up()
    assert queue._rate.tokens_per_s == pytest.approx(20)


def test_tokens_in_bytes_are_at_least_one() -> None:
    ratio = TokensInBytes()
    assert (ratio.guess(0), ratio.guess(3), ratio.guess(4096)) == (1, 1, 1024)
    ratio.note(10**6, 0)
    assert ratio.guess(100) == 1
