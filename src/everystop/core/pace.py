"""Plans steps by time: how long the next one may take, and what is known of how long steps take."""

from __future__ import annotations

from collections.abc import Iterable

from everystop.core.batch import Outstanding
from everystop.core.budget import TimeBudget
from everystop.core.request import Request
from everystop.core.step_time import StepFeatures, StepTimeModel
from everystop.core.step_time_fit import StepTimeFit


class Pace:
    """The step-time model that a scheduler plans by, and learns from every step that comes back."""

    def __init__(self, prior: StepTimeModel) -> None:
        self._fit = StepTimeFit(prior)
        self._last_landed = (-2, 0)  # step id and time of the last update

    @property
    def model(self) -> StepTimeModel:
        """What is known now."""
        return self._fit.model

    def budget(self, targets: Iterable[int | None], decoders: list[Request], num_padded: int) -> TimeBudget | None:
        """What the strictest target, in nanoseconds, leaves to prompts beside these decoders; None without a target."""
        target_ns = min((target for target in targets if target is not None), default=None)
        if target_ns is None:
            return None
        context = 0
        for request in decoders:
            context += request.num_scheduled_through + 1
        num_rows = len(decoders) + num_padded
        return TimeBudget(self.model, target_ns, StepFeatures(num_rows, context, 0, num_rows), self._fit.deviation)

    def learn(self, landed: Outstanding, execute_ns: int, now_ns: int, *, is_overlapped: bool) -> None:
        """A step took from the last update to this one, or from its own planning if it was waited for in between.

        Where the next one is on its way already, the host's work is hidden behind it: the runner's own time counts.
        Steps that score prompts teach nothing: the model knows nothing of the logits that they compute.
        """
        last_step_id, last_ns = self._last_landed
        self._last_landed = (landed.plan.step_id, now_ns)
        if not landed.plan.rows or landed.plan.prompt_logits:
            return
        began_ns = last_ns if landed.plan.step_id == last_step_id + 1 else landed.scheduled_ns
        time_ns = execute_ns if is_overlapped and execute_ns > 0 else now_ns - began_ns
        self._fit.observe(StepFeatures.of(landed.plan), max(1, time_ns))
