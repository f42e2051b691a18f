"""What is served: a request, its sampling parameters and its state; knows nothing of blocks' owners, queues or time."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from enum import StrEnum
from typing import ClassVar

from everystop.core.errors import RequestError

MAX_INTEGER = 2**31 - 1


class RequestState(StrEnum):
    """Where a request stands; `FINISHED` is terminal."""

    WAITING = "waiting"
    FORKING = "forking"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended; `stop` and `length` are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How output tokens are chosen; a value out of range raises RequestError with the field's name.

    `temperature` 0 is greedy (ties to the lowest id). `top_k` 0 means all. `logprobs` is None for none, 0 for the
    chosen token only, k for the k best beside it; `prompt_logprobs` is the same for each token of the prompt but the
    first. `seed` None is replaced by a number at the edge. `max_tokens` None means as many as fit; 0 ends the request
    once its prompt is computed. None of the sequences in `bad_word_ids` comes about in the output: its last token is
    not sampled behind the others. `skip_special_tokens` keeps control tokens out of the text,
    `include_stop_str_in_output` keeps in it what ended it; neither changes a token.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: int | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    # What every way in takes: bounds that are whole numbers ask for whole numbers.
    RANGES: ClassVar[Mapping[str, tuple[float, float]]] = {
        "max_tokens": (0, MAX_INTEGER),
        "min_tokens": (0, MAX_INTEGER),
        "temperature": (0.0, 100.0),
        "top_p": (0.0, 1.0),
        "top_k": (0, MAX_INTEGER),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (0.01, 100.0),
        "presence_penalty": (-2.0, 2.0),
        "frequency_penalty": (-2.0, 2.0),
        "seed": (-(2**63), 2**64 - 1),
        "n": (1, 1024),
        "logprobs": (0, 20),
        "prompt_logprobs": (0, 20),
    }
    MAX_BIAS: ClassVar[float] = 100.0
    OPTIONAL: ClassVar[tuple[str, ...]] = ("max_tokens", "seed", "logprobs", "prompt_logprobs")

    def __post_init__(self) -> None:
        for name, (low, high) in self.RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in self.OPTIONAL:
                _require(low <= value <= high, name, value, f"from {low} to {high}")
        _require(all(self.stop), "stop", self.stop, "strings that are not empty")
        _require(all(self.bad_word_ids), "bad_word_ids", self.bad_word_ids, "sequences of token ids that are not empty")
        biases = [bias for _, bias in self.logit_bias]
        _require(all(abs(bias) <= self.MAX_BIAS for bias in biases), "logit_bias", biases, f"up to ±{self.MAX_BIAS:g}")


def _require(holds: bool, name: str, value: object, must: str) -> None:
    """NaN fails every comparison, so it never holds."""
    if not holds:
        raise RequestError(f"{name} is {value!r}; it must be {must}", param=name)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to generate; mutated by the `Scheduler` alone.

    `request_id` is the arrival index: the last tie-break of every order. The n choices of one client request are n
    `Request`s with one `group_id` (the id of the first) and `choice_index` 0 to n-1. `token_ids` holds the prompt, then
    the output. `epoch` counts preemptions, so that a row planned before one is known when it comes back. The first
    `num_lost_tokens` tokens were computed, or found, and lost by a preemption at some time.

    One of the choices, the first, computes the prompt's log-probabilities for all: the logits of its first
    `num_scored_tokens` tokens, of which `num_planned_scores` are computed or on their way, once each.
    """

    request_id: int
    prompt_token_ids: InitVar[Sequence[int]]
    params: SamplingParams
    arrival_ns: int = 0
    eos_token_ids: tuple[int, ...] = ()
    group_id: int = -1
    choice_index: int = 0
    tenant: str = ""
    priority: int = 0
    ttft_target_ns: int | None = None
    itl_target_ns: int | None = None
    cache_salt: str = ""
    adapter: str = ""
    block_keys: list[bytes] = field(default_factory=list)

    # What follows is the scheduler's account of it.
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    num_prompt_tokens: int = 0
    max_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    num_pending_samples: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    num_published_blocks: int = 0
    num_scored_tokens: int = 0
    num_planned_scores: int = 0
    block_table: list[int] = field(default_factory=list)
    slot: int = -1
    last_served_step: int = -1
    last_matched_step: int = -1
    epoch: int = 0

    def __post_init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.token_ids = array("i", prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        if self.group_id < 0:
            self.group_id = self.request_id
        eos = () if self.params.ignore_eos else self.eos_token_ids
        self.stop_ids = frozenset((*eos, *self.params.stop_token_ids))
        if self.params.prompt_logprobs is not None and self.choice_index == 0:
            self.num_scored_tokens = max(0, self.num_prompt_tokens - 1)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_scheduled_through(self) -> int:
        """Tokens computed or on their way: where the next row starts."""
        return self.num_computed_tokens + self.num_in_flight

    @property
    def is_scoring(self) -> bool:
        """Logits of its prompt are still to be planned, so it has to compute that part of the prompt itself."""
        return self.num_planned_scores < self.num_scored_tokens

    @property
    def num_reusable_tokens(self) -> int:
        """How many tokens another may have computed for it: all but the last, or those whose logits it has."""
        return self.num_planned_scores if self.is_scoring else len(self.token_ids) - 1

    @property
    def is_prefilled(self) -> bool:
        """It generates nothing, and has nothing of its prompt left to compute that anybody wants."""
        return self.max_tokens == 0 and self.num_computed_tokens >= self.num_prompt_tokens - 1

    @property
    def num_remaining(self) -> int:
        """Tokens still to compute, counting one for each token that is being sampled now."""
        return len(self.token_ids) + self.num_pending_samples - self.num_computed_tokens - self.num_in_flight


def extend_block_keys(request: Request, block_size: int) -> None:
    """Append to `request.block_keys` the keys of all full blocks of known tokens that have none yet.

    The key of block i is SHA-256 over (key of block i-1, its token ids as 32-bit little-endian); the chain starts from
    a digest of the salt and the adapter, each with its own tag, so that adapter "x" and salt "x" never meet. Keys given
    from outside (a trace, a record) stand as they are: the chain continues from the last one.

    Example, block_size 4, 10 known tokens: keys of blocks 0 (tokens 0..3) and 1 (4..7); tokens 8 and 9 stay private.
    """
    keys = request.block_keys
    num_full = len(request.token_ids) // block_size
    if len(keys) >= num_full:
        return
    parent = keys[-1] if keys else _root_key(request.cache_salt, request.adapter)
    for i in range(len(keys), num_full):
        block = request.token_ids[i * block_size : (i + 1) * block_size]
        parent = hashlib.sha256(parent + block.tobytes()).digest()
        keys.append(parent)


def _root_key(salt: str, adapter: str) -> bytes:
    tagged = f"salt:{len(salt)}:{salt};adapter:{len(adapter)}:{adapter}"
    return hashlib.sha256(tagged.encode("utf-8", "surrogatepass")).digest()
