"""The status line: what the server did since the last one."""

from __future__ import annotations

from everystop.observe.metrics import Metrics


class StatusLine:
    """Compares `Metrics` with what it saw the time before."""

    def __init__(self, metrics: Metrics, now_s: float) -> None:
        self._metrics = metrics
        self._last = self._counts()
        self._last_s = now_s

    def _counts(self) -> tuple[int, ...]:
        m = self._metrics
        return (
            m.num_computed_prompt_tokens,
            m.num_generation_tokens,
            m.num_prefix_queries,
            m.num_prefix_hits,
            m.num_preemptions,
            m.num_recomputed_tokens,
            m.num_steps,
            m.steps.num_over_target,
        )

    def next(self, now_s: float) -> str | None:
        """One line for the time since the last call; None when nothing ran or waited."""
        self._metrics.catch_up()
        counts, seconds = self._counts(), max(now_s - self._last_s, 1e-9)
        prompt, output, queries, hits, preemptions, recomputed, steps, over = (
            new - old for new, old in zip(counts, self._last, strict=True)
        )
        self._last, self._last_s = counts, now_s
        num_running, num_waiting = self._metrics.num_running, self._metrics.num_waiting
        if not (steps or num_running or num_waiting):
            return None
        hit_rate = f"{min(1.0, hits / queries):.0%}" if queries else "–"
        cost = f" ({recomputed:,} tokens recomputed)" if preemptions or recomputed else ""
        return (
            f"running {num_running}  waiting {num_waiting}  KV {self._metrics.kv_usage:.0%}  "
            f"in {prompt / seconds:,.0f} tok/s  out {output / seconds:,.0f} tok/s  steps {steps / seconds:,.0f}/s  "
            f"prefix hits {hit_rate}  preemptions {preemptions}{cost}{self._target_text(steps, over)}"
        )

    def _target_text(self, steps: int, over: int) -> str:
        """How often the target on a step's time was out of reach, if it was."""
        if not over:
            return ""
        return f"  target {self._metrics.steps.target_s * 1e3:g} ms out of reach in {over / steps:.0%} of steps"
