"""Small runs in virtual time with steps that last as long as what they compute, for explanations by hand."""

from __future__ import annotations

from typing import Any

from tests.core.harness import make_request, make_scheduler

from everystop.core.plan import StepPlan, StepResult
from everystop.core.step_time import StepFeatures, StepTimeModel
from everystop.engine.loop import StepLoop, Turn
from everystop.observe.explain import Explanation, explain
from everystop.observe.history import History
from everystop.observe.wording import NameOf, number_name

MS = 1_000_000
STEP_TIMES = StepTimeModel(step_ns=2.0 * MS, token_ns=0.1 * MS)  # 2 ms a step and 0.1 ms a token


class Run:
    """A scheduler and a runner that computes nothing; `host_ns` passes between two turns, sampling takes `sample_ns`.

    The history knows the step times from the start, so shares can be told in advance.
    """

    def __init__(
        self, *, host_ns: int = 0, sample_ns: int = 0, history: History | None = None, **settings: Any
    ) -> None:
        self.now_ns = 0
        self.history = History(step_times=STEP_TIMES) if history is None else history
        self.scheduler = make_scheduler(**settings)
        self.loop = StepLoop(self.scheduler, self, lambda: self.now_ns)
        self.host_ns = host_ns
        self.sample_ns = sample_ns

    def execute(self, plan: StepPlan) -> StepResult:
        """One token for each row that samples."""
        duration_ns = round(STEP_TIMES.execute_ns(StepFeatures.of(plan))) + self.sample_ns
        self.now_ns += duration_ns
        rows: list[tuple[int, ...] | str] = [(1,) if row.logits_from < row.num_tokens else () for row in plan.rows]
        return StepResult(rows, execute_ns=duration_ns, sample_ns=self.sample_ns)

    def close(self) -> None:
        """Nothing to release."""

    def add(
        self,
        request_id: int,
        prompt: int = 8,
        max_tokens: int = 10,
        n: int = 1,
        *,
        topic: int | None = None,
        **fields: Any,
    ) -> None:
        """A request arrives now, or the n choices of one; prompts of one topic, by default the id, begin alike."""
        first = 1000 * (request_id if topic is None else topic)
        tokens = range(first, first + prompt)
        for k in range(n):
            request = make_request(
                request_id + k, tokens, max_tokens=max_tokens, n=n, group_id=request_id, choice_index=k, **fields
            )
            self.scheduler.add(request, self.now_ns)

    def turn(self, num: int = 1) -> None:
        """So many turns."""
        for _ in range(num):
            self.tell(self.loop.turn())
            self.now_ns += self.host_ns

    def tell(self, turn: Turn) -> None:
        """Hand a turn's events to the history; a turn that waits lets time pass."""
        if turn.is_idle and turn.wake_at_ns is not None:
            self.now_ns = max(self.now_ns, turn.wake_at_ns)
        self.history.receive(turn.events)
        self.history.catch_up()

    def finish(self) -> None:
        """Until nobody is left."""
        while self.scheduler.has_work:
            self.turn()

    def explain(self, *request_ids: int, name_of: NameOf = number_name) -> Explanation:
        """Why it took so long."""
        return explain(self.history, request_ids, now_ns=self.now_ns, name_of=name_of)


def ms(explanation: Explanation) -> dict[str, float]:
    """Milliseconds by cause."""
    return {cause.value: ns / MS for cause, ns in explanation.ns_by_cause.items()}
