"""What a client wants to be told beside the text of an answer, and in which portions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everystop.core.errors import RequestError


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a client wants beside the text: `usage` at the end of a stream and in each chunk, how it waits, its times in
    two dialects, the answer's tier; how many tokens a chunk holds; and of the prompt its text before the answer and the
    log-probabilities of so many tokens in each place, the ids of all tokens, and tokens named by their ids.
    """

    usage: bool = False
    continuous_usage: bool = False
    progress: bool = False
    metrics: bool = False
    timings: bool = False
    tier: bool = False
    interval: int = 1
    echo: bool = False
    prompt_logprobs: int | None = None
    token_ids: bool = False
    names_by_id: bool = False


NO_WISHES = Wishes()


def read_wishes(values: Mapping[str, Any], *, logprobs: int | None, gives_metrics: bool) -> Wishes:
    """Of a body's fields, and of the `logprobs` that they ask for; `gives_metrics` holds where it is silent. Raises
    RequestError for what cannot be given.
    """
    stream, options = values.get("stream", False), values.get("stream_options", {})
    interval: int = values.get("stream_interval", 1)
    for name, is_asked in (("stream_options", any(options.values())), ("stream_interval", interval != 1)):
        if is_asked and not stream:
            raise RequestError(f"{name} needs stream = true", param=name, code="conflicting_fields")
    if "prompt_logprobs" in values and stream:
        raise RequestError(
            "prompt_logprobs are not given in a stream; leave out stream, or send a completion with echo and logprobs",
            param="prompt_logprobs",
            code="conflicting_fields",
        )
    usage = options.get("include_usage", False)
    if values.get("include_metrics") and stream and not usage:
        raise RequestError(
            "include_metrics needs stream_options.include_usage = true in a stream: it comes with the usage",
            param="include_metrics",
            code="conflicting_fields",
        )
    if values.get("return_tokens_as_token_ids") and logprobs is None:
        raise RequestError(
            "return_tokens_as_token_ids needs logprobs, which is where tokens are named; for the ids alone send "
            "return_token_ids",
            param="return_tokens_as_token_ids",
            code="conflicting_fields",
        )
    return Wishes(
        usage=usage,
        continuous_usage=options.get("continuous_usage_stats", False),
        progress=options.get("include_progress", False),
        metrics=values.get("include_metrics", gives_metrics),
        timings=values.get("timings_per_token", False),
        tier="service_tier" in values,
        interval=interval,
        echo=values.get("echo", False),
        prompt_logprobs=values.get("prompt_logprobs"),
        token_ids=values.get("return_token_ids", False),
        names_by_id=values.get("return_tokens_as_token_ids", False),
    )


def num_scored(wishes: Wishes, logprobs: int | None) -> int | None:
    """How many of the best tokens the engine is to tell in each place of the prompt; None where it need not score it.
    An echoed prompt has the log-probabilities that the answer has.
    """
    asked = [num for num in (wishes.prompt_logprobs, logprobs if wishes.echo else None) if num is not None]
    return max(asked, default=None)


def check_sequences(wishes: Wishes, num_sequences: int) -> None:
    """Raise RequestError for what only a request of one sequence can be given."""
    if wishes.timings and num_sequences > 1:
        raise RequestError(
            f"timings_per_token needs one prompt and n = 1, and here are {num_sequences:,} sequences with times of "
            "their own",
            param="timings_per_token",
            code="conflicting_fields",
        )
