"""What crosses between the engine thread and everybody else: plain, serialisable data, nothing shared."""

from __future__ import annotations

from typing import NamedTuple

from everystop.core.plan import TokenLogprobs
from everystop.core.request import SamplingParams


class Submit(NamedTuple):
    """A client's request with its n choices; choice k gets the id `first_request_id + k`."""

    first_request_id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    tenant: str = ""
    priority: int = 0
    cache_salt: str = ""
    ttft_target_ns: int | None = None
    itl_target_ns: int | None = None


class Abort(NamedTuple):
    """The client of these requests has gone; unknown or finished ids are ignored."""

    request_ids: tuple[int, ...]


class StepOutput(NamedTuple):
    """What one step brought for one request; `finish_reason` is set exactly once, in its last output.

    `finish_reason` is stop, length, abort or error; with `error` the message says what failed. `stop_reason` is the
    matched stop string or stop token id where there is one. `num_cached_tokens` is the number of prompt tokens taken
    from the prefix cache. `refused` marks a request that was never taken (the message in `error`, and the field in
    `error_param`, are for HTTP 400; with `retry_after_s`, seconds until it may be taken, for HTTP 429).
    `prompt_logprobs` are those of the next tokens of the prompt, of which the first has none; in all outputs of a
    request each comes once, in order, and all before the first token. Of n choices the first gets them for all.
    """

    request_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_code: str | None = None
    error_param: str | None = None
    refused: bool = False
    retry_after_s: int | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
