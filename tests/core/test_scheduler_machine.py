"""Scheduler, cache, loop and hash model under whatever sequence of calls hypothesis can think of, and shrink."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.core.harness import Harness, eos, make_request, make_scheduler

from everystop.core.admission import ADMISSIONS
from everystop.core.errors import RequestError
from everystop.core.policy import POLICIES
from everystop.core.step_time import StepTimeModel


class SchedulerMachine(RuleBasedStateMachine):
    """Each rule is a call; the harness asserts invariants and oracle after every step, and the drain."""

    harness: Harness | None = None

    @initialize(
        policy=st.sampled_from(POLICIES),
        depth=st.integers(0, 1),
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(3, 14),
        prefix_caching=st.booleans(),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.integers(1, 20),
        max_num_prefill_tokens=st.none() | st.integers(1, 8),
        max_preemptions=st.integers(0, 3),
        admission=st.sampled_from(ADMISSIONS),
        batch_wait_ns=st.sampled_from([0, 2_500_000]),
        ageing_ns=st.sampled_from([1, 4_000_000, 10**12]),
        target_itl_ns=st.sampled_from([None, 400_000, 1_500_000]),
        step_times=st.just(StepTimeModel(step_ns=300_000, token_ns=50_000)),
    )
    def start(self, depth: int, **settings: object) -> None:
        self.harness = Harness(make_scheduler(**settings), depth=depth)  # type: ignore[arg-type]
        self.next_id = 0

    @rule(
        prefix=st.integers(0, 12),
        num_own_tokens=st.integers(0, 8),
        n=st.integers(1, 3),
        priority=st.integers(0, 2),
        ttft_target_ns=st.sampled_from([None, 2_000_000, 60_000_000]),
        itl_target_ns=st.sampled_from([None, 400_000, 5_000_000]),
        tenant=st.sampled_from("abc"),
        max_tokens=st.none() | st.integers(0, 12),
        prompt_logprobs=st.sampled_from([None, 0]),
        min_tokens=st.integers(0, 2),
        temperature=st.sampled_from([0.0, 1.0]),
        stop=st.sampled_from([(), ("stop",)]),
        cache_salt=st.sampled_from(["", "a"]),
    )
    def add(self, prefix: int, num_own_tokens: int, n: int, **fields: object) -> None:
        """A request or a group whose prompt begins like others'; it may be refused."""
        assert self.harness is not None
        first, self.next_id = self.next_id, self.next_id + n
        prompt = [*range(prefix), *([30 + first % 2] * num_own_tokens)]
        for k in range(n):
            request = make_request(
                first + k, prompt, n=n, group_id=first, choice_index=k, eos_token_ids=eos(), seed=1, **fields
            )
            try:
                self.harness.add(request)
            except RequestError:
                assert first + k in self.harness.refused

    @rule(num=st.integers(1, 6))
    def turn(self, num: int) -> None:
        assert self.harness is not None
        for _ in range(num):
            self.harness.turn()

    @rule(request_id=st.integers(0, 20))
    def abort(self, request_id: int) -> None:
        """Of any request: waiting, running, ended, unknown."""
        assert self.harness is not None
        self.harness.abort(request_id)

    @rule(request_id=st.integers(0, 20))
    def abort_between_planning_and_execution(self, request_id: int) -> None:
        assert self.harness is not None
        self.harness.abort_before_execution.append(request_id)
        self.harness.turn()

    @precondition(lambda self: self.harness is not None and self.harness.scheduler.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        assert self.harness is not None
        self.harness.runner.fail[data.draw(st.sampled_from(sorted(self.harness.scheduler.running)))] = "nan_logits"

    def teardown(self) -> None:
        """Whatever happened, everything ends, and leaves nothing behind."""
        if self.harness is not None:
            self.harness.run(max_turns=3_000)


SchedulerMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=25, deadline=None, derandomize=True)
TestSchedulerMachine = SchedulerMachine.TestCase
