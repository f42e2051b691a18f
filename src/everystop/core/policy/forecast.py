"""How long prompts will take, as a policy can know it before they board: from the step-time model and the counts."""

from __future__ import annotations

from everystop.core.budget import MIN_PREFILL_TOKENS
from everystop.core.policy.base import View
from everystop.core.step_time import StepFeatures, num_pairs


def prefill_ns(num_tokens: int, view: View) -> int:
    """Time of one step with a new prompt of so many tokens, and nothing else."""
    return round(view.step_times.execute_ns(StepFeatures(num_tokens, 0, num_pairs(0, num_tokens), 1)))


def prompt_tokens_a_step(num_decoders: int, step_target_ns: int | None, view: View) -> int:
    """Tokens that a step has for prompts beside so many decoders, by its limits and by its time; at least 1.

    The contexts of decoders do not count.
    """
    num_tokens = view.max_num_batched_tokens - num_decoders
    if view.max_num_prefill_tokens is not None:
        num_tokens = min(num_tokens, view.max_num_prefill_tokens)
    targets = [target for target in (view.target_itl_ns, step_target_ns) if target is not None]
    if targets:
        left_ns = min(targets) - view.step_times.execute_ns(StepFeatures(num_decoders, 0, 0, num_decoders))
        num_tokens = min(num_tokens, max(MIN_PREFILL_TOKENS, view.step_times.largest_chunk(0, left_ns)))
    return max(1, num_tokens)


def prefill_beside_ns(num_tokens: int, longest: int, *, num_decoders: int, num_a_step: int, view: View) -> int:
    """Time of as many steps as these prompt tokens need beside decoders; the longest prompt has `longest` of them."""
    num_steps = -(-num_tokens // num_a_step)
    num_decodes = num_steps * num_decoders
    work = StepFeatures(num_tokens + num_decodes, 0, num_pairs(0, longest), num_steps + num_decodes)
    return round(view.step_times.execute_ns(work) + (num_steps - 1) * view.step_times.step_ns)
