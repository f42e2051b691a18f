"""Reads the bodies of completions and chat completions: every field is honoured, neutral, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from everystop.core.durations import NS_PER_MS
from everystop.core.errors import RequestError, UnsupportedField
from everystop.core.fitting import check_ids, check_settings
from everystop.core.request import SamplingParams
from everystop.model.messages import PLAIN, ChatOptions
from everystop.server import fields
from everystop.server.errors import ModelUnknown
from everystop.server.field_names import in_names
from everystop.server.openai_fields import CHAT_FIELDS, COMPLETION_FIELDS, PARAMETER_FIELDS, Prompt
from everystop.server.truncation import Truncation, read_truncation
from everystop.server.wishes import NO_WISHES, Wishes, check_sequences, num_scored, read_wishes

MAX_SEQUENCES = 1024
MAX_USER_CHARS = 256
MAX_LISTED = 8  # names of models in an error
ANY_MODEL = ("tgi", "dummy")  # what clients of TGI name a model for which they have no name


@dataclass(frozen=True, slots=True)
class Accepted:
    """What the served model and the policy allow, and what holds where a request is silent."""

    model_names: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    defaults: SamplingParams = field(default_factory=SamplingParams)
    has_priorities: bool = False
    has_targets: bool = False
    names_tenants: bool = False
    gives_metrics: bool = False


@dataclass(frozen=True, slots=True)
class Parsed:
    """A body that can be served; chat has `messages`, completions have `prompts`.

    `names` are what its dialect calls the fields of completions, where it calls them otherwise, but for the prompt.
    """

    params: SamplingParams
    model: str
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    stream: bool = False
    wishes: Wishes = NO_WISHES
    chat: ChatOptions = PLAIN
    add_special_tokens: bool = True
    truncation: Truncation | None = None
    bad_words: tuple[str, ...] = ()
    cache_salt: str = ""
    priority: int = 0
    ttft_target_ns: int | None = None
    itl_target_ns: int | None = None
    timeout_s: float | None = None
    user: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    prompt_name: str = "prompt"


def parse_completion(body: Mapping[str, Any], accepted: Accepted) -> Parsed:
    """`POST /v1/completions`; raises RequestError."""
    values = fields.read_fields(body, COMPLETION_FIELDS)
    if "prompt" not in values:
        raise RequestError("prompt is missing", param="prompt", code="missing_field")
    _check_best_of(values)
    parsed = _parse_common(values, accepted, logprobs=values.get("logprobs"), max_tokens=values.get("max_tokens"))
    prompts = values["prompt"]
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_ids("prompt", prompt, accepted.vocab_size)
    num_sequences = len(prompts) * parsed.params.n
    check_sequences(parsed.wishes, num_sequences)
    if num_sequences > MAX_SEQUENCES:
        raise RequestError(
            f"{len(prompts):,} prompts × n {parsed.params.n} = {num_sequences:,} sequences; "
            f"at most {MAX_SEQUENCES:,} are taken in one request",
            param="n",
            code="too_many_sequences",
        )
    return replace(parsed, prompts=prompts, add_special_tokens=values.get("add_special_tokens", True))


def parse_chat(body: Mapping[str, Any], accepted: Accepted) -> Parsed:
    """`POST /v1/chat/completions`; raises RequestError."""
    values = fields.read_fields(body, CHAT_FIELDS)
    if "messages" not in values:
        raise RequestError("messages is missing", param="messages", code="missing_field")
    logprobs = None
    if values.get("logprobs"):
        logprobs = values.get("top_logprobs", 0)
    elif values.get("top_logprobs"):
        raise RequestError("top_logprobs needs logprobs = true", param="top_logprobs", code="conflicting_fields")
    max_tokens = values.get("max_completion_tokens", values.get("max_tokens"))
    if values.get("max_tokens", max_tokens) != max_tokens:
        raise RequestError(
            "max_tokens and max_completion_tokens differ; send one of them",
            param="max_tokens",
            code="conflicting_fields",
        )
    names = {"max_tokens": "max_completion_tokens"} if "max_completion_tokens" in values else {}
    try:
        parsed = _parse_common(values, accepted, logprobs, max_tokens)
    except RequestError as error:
        raise in_names(error, names) from None
    check_sequences(parsed.wishes, parsed.params.n)
    return replace(parsed, messages=values["messages"], chat=_read_chat_options(values), names=names)


def _read_chat_options(values: dict[str, Any]) -> ChatOptions:
    continues = values.get("continue_final_message", False)
    opens = values.get("add_generation_prompt", not continues)
    if continues and opens:
        raise RequestError(
            "continue_final_message and add_generation_prompt are both true, but an answer either goes on with the "
            "last message or begins a new one; set one of them to false",
            param="continue_final_message",
            code="conflicting_fields",
        )
    return ChatOptions(
        add_generation_prompt=opens,
        continue_final_message=continues,
        add_special_tokens=values.get("add_special_tokens", False),
        variables=values.get("chat_template_kwargs", {}),
    )


def _parse_common(values: dict[str, Any], accepted: Accepted, logprobs: int | None, max_tokens: int | None) -> Parsed:
    model = check_model(values.get("model"), accepted)
    chosen = {name: values[name] for name in PARAMETER_FIELDS if name in values}
    wishes = read_wishes(values, logprobs=logprobs, gives_metrics=accepted.gives_metrics)
    params = replace(
        accepted.defaults,
        **chosen,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=num_scored(wishes, logprobs),
    )
    check_settings(params, accepted.vocab_size)
    if max_tokens == 0 and not wishes.echo and wishes.prompt_logprobs is None:
        raise RequestError(
            "max_tokens is 0, but nothing is asked of the prompt either; set echo or prompt_logprobs, or ask for at "
            "least one token",
            param="max_tokens",
            code="conflicting_fields",
        )
    if values.get("spaces_between_special_tokens") and not params.skip_special_tokens:
        raise UnsupportedField(
            "spaces_between_special_tokens",
            "spaces_between_special_tokens = true is not supported with skip_special_tokens = false: no blanks are put "
            "between tokens; leave it out",
        )
    return Parsed(
        params=params,
        model=model,
        stream=values.get("stream", False),
        wishes=wishes,
        truncation=read_truncation(values),
        bad_words=values.get("bad_words", ()),
        cache_salt=values.get("cache_salt", ""),
        priority=_read_priority(values, accepted),
        ttft_target_ns=_read_target("ttft_target_ms", values, accepted),
        itl_target_ns=_read_target("itl_target_ms", values, accepted),
        timeout_s=values.get("timeout"),
        user=_read_user(values, accepted),
    )


def check_model(model: str | None, accepted: Accepted) -> str:
    """The served name that is meant; raises ModelUnknown."""
    if model is None or (model in ANY_MODEL and model not in accepted.model_names):
        return accepted.model_names[0]
    if model not in accepted.model_names:
        raise ModelUnknown(
            f"the model {fields.echo(model)} is not served here; send {_listed(accepted.model_names)}, or no model",
            param="model",
        )
    return model


def _listed(names: tuple[str, ...]) -> str:
    """The names to choose from, as many as can be read."""
    listed = " or ".join(map(repr, names[:MAX_LISTED]))
    num_left = len(names) - MAX_LISTED
    return f"{listed} ({num_left:,} more are listed by /v1/models)" if num_left > 0 else listed


def _read_priority(values: dict[str, Any], accepted: Accepted) -> int:
    """Lower is more urgent; only 0 where the policy has no priorities."""
    priority: int = values.get("priority", 0)
    if priority and not accepted.has_priorities:
        raise UnsupportedField("priority", f"priority = {priority} needs --policy priority; the policy here has none")
    return priority


def _read_target(name: str, values: dict[str, Any], accepted: Accepted) -> int | None:
    """A target in nanoseconds; None where the request has none, as it must where the policy has none."""
    target_ms: float | None = values.get(name)
    if target_ms is None:
        return None
    if not accepted.has_targets:
        raise UnsupportedField(name, f"{name} = {target_ms:g} needs --policy deadline; the policy here has no targets")
    return round(target_ms * NS_PER_MS)


def _read_user(values: dict[str, Any], accepted: Accepted) -> str:
    """The tenant's name where the server believes this field; else it is anything, and without effect."""
    return fields.string(MAX_USER_CHARS).read("user", values.get("user", "")) if accepted.names_tenants else ""


def _check_best_of(values: dict[str, Any]) -> None:
    n = values.get("n", 1)
    best_of = values.get("best_of", n)
    if best_of != n:
        raise UnsupportedField(
            "best_of",
            f"best_of is {best_of} and n is {n}, but no choices are made beyond those that are sent; set n to "
            f"{best_of} to get them all, or leave best_of out",
        )
