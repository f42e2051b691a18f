"""The two objects in which an answer tells its own times: vLLM's `metrics` and llama.cpp's `timings`."""

from __future__ import annotations

from typing import Any

from everystop.core.durations import NS_PER_MS
from everystop.observe.request_clock import RequestTimes

MS_DIGITS = 3


def metrics_object(times: RequestTimes | None) -> dict[str, Any] | None:
    """`metrics`; null for a request whose times nobody kept.

    First token from arrival; generation from the first token to the last, to which the gap between tokens and the
    tokens a second belong. What has not been, or is not known any more, is null.
    """
    if times is None:
        return None
    generation_ms = _ms(times.first_token_ns, times.last_token_ns)
    num_gaps = max(0, times.num_output_tokens - 1)
    mean_itl_ms = generation_ms / num_gaps if generation_ms is not None and num_gaps else None
    return {
        "time_to_first_token_ms": _rounded(_ms(times.received_ns, times.first_token_ns)),
        "generation_time_ms": _rounded(generation_ms),
        "queue_time_ms": _rounded(_ms(times.submitted_ns, times.boarded_ns)),
        "mean_itl_ms": _rounded(mean_itl_ms),
        "tokens_per_second": _per_second(1, mean_itl_ms),
    }


def timings_object(times: RequestTimes | None) -> dict[str, Any] | None:
    """`timings`; null for a request whose times nobody kept, or that has no token yet.

    The prompt's time runs from boarding to the first token, and counts the tokens that were computed, not those that
    were found in the cache; the rest is the time of the predicted tokens.
    """
    if times is None or times.first_token_ns is None:
        return None
    prompt_ms = _ms(times.boarded_ns, times.first_token_ns)
    predicted_ms = _ms(times.first_token_ns, times.last_token_ns)
    num_computed = times.num_prompt_tokens - times.num_cached_tokens
    return {
        "cache_n": times.num_cached_tokens,
        **_pace("prompt", num_computed, prompt_ms),
        **_pace("predicted", times.num_output_tokens, predicted_ms),
    }


def _pace(name: str, num_tokens: int, ms: float | None) -> dict[str, Any]:
    per_token = ms / num_tokens if ms is not None and num_tokens else None
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": _rounded(ms),
        f"{name}_per_token_ms": _rounded(per_token),
        f"{name}_per_second": _per_second(num_tokens, ms),
    }


def _ms(first_ns: int | None, last_ns: int | None) -> float | None:
    return None if first_ns is None or last_ns is None else (last_ns - first_ns) / NS_PER_MS


def _per_second(num: int, ms: float | None) -> float | None:
    return round(1000 * num / ms, MS_DIGITS) if ms else None


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else round(ms, MS_DIGITS)
