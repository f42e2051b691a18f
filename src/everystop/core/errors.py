"""The errors that a user, a client or a machine can cause, by name; `server/errors.py` adds those of HTTP alone, and
maps all of them to the wire once.

EverystopError
├── ConfigError            a flag or an environment variable cannot be honoured
├── RequestError           a client's request cannot be honoured (HTTP 400)
│   ├── PromptTooLong      the prompt leaves no room for one output token
│   ├── NeverFits          prompt + max_tokens exceed what the empty system holds
│   ├── TooManyChoices     n exceeds what the tenant may have running and waiting
│   ├── TenantQueueFull    as many of the tenant's requests wait as may (HTTP 429)
│   ├── UnsupportedField   a known field that this version does not serve
│   ├── ChatTemplateMissing  chat was asked of a model that has no template
│   └── ChatTemplateError  the template refused the messages, or failed on them
├── ModelError             a model file is missing, damaged or of an unknown kind
│   ├── ModelNotFound      no such embedded name, file or folder
│   ├── ModelFileDamaged   a file is truncated, altered or contradicts itself
│   ├── UnsupportedModel   a sound file of a kind that this version does not serve
│   └── PullFailed         an embedded model could not be fetched
├── RecordError            a file is no record of a run, or one that cannot be replayed
├── RemoteError            a server that a command looks at is not there, or does not answer as it should
├── EngineDead             the engine thread has failed; nothing can be served (HTTP 503)
├── Draining               the server is shutting down (HTTP 503)
└── PolicyError            a scheduling policy broke its contract (our own bug)
"""

from __future__ import annotations


class EverystopError(Exception):
    """Base of all named errors; the message says cause, numbers, and what to change."""


class ConfigError(EverystopError):
    """A setting that cannot be honoured."""


class RequestError(EverystopError):
    """A request that cannot be honoured; `param` names the offending field where there is one."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class PromptTooLong(RequestError):
    """The prompt alone fills or exceeds the longest sequence that can be served."""

    def __init__(self, num_prompt_tokens: int, limit_tokens: int) -> None:
        super().__init__(
            f"the prompt has {num_prompt_tokens:,} tokens, but at most {limit_tokens - 1:,} fit beside one output "
            f"token (limit {limit_tokens:,}); shorten it, or raise --max-model-len or --kv-cache-memory",
            param="prompt",
            code="context_length_exceeded",
        )


class NeverFits(RequestError):
    """Prompt and `max_tokens`, or the field of that `name`, together exceed what an empty server could hold."""

    def __init__(self, num_prompt_tokens: int, num_tokens: int, limit_tokens: int, *, name: str = "max_tokens") -> None:
        super().__init__(
            f"{num_prompt_tokens:,} prompt tokens + {name} {num_tokens:,} = {num_prompt_tokens + num_tokens:,}, "
            f"but at most {limit_tokens:,} fit; lower {name} to {limit_tokens - num_prompt_tokens:,}, shorten "
            "the prompt, or raise --max-model-len or --kv-cache-memory",
            param=name,
            code="context_length_exceeded",
        )


class TooManyChoices(RequestError):
    """The n choices of one request exceed what its tenant may ever have running and waiting."""

    def __init__(self, n: int, limit: int) -> None:
        super().__init__(
            f"n is {n:,}, but this tenant may have at most {limit:,} choices running and waiting; lower n, or raise "
            "max_running or max_queued in the tenants' file",
            param="n",
            code="too_many_choices",
        )


class TenantQueueFull(RequestError):
    """The tenant has as many requests waiting as it may; `retry_after_s` says when one of them should have boarded."""

    def __init__(self, num_waiting: int, n: int, max_queued: int, retry_after_s: int) -> None:
        more = "one more" if n == 1 else f"{n:,} more"
        super().__init__(
            f"this tenant's waiting requests: {num_waiting:,}; with {more} there would be more than {max_queued:,} "
            f"(max_queued) without a place to run; try again in {retry_after_s:,} s",
            code="tenant_queue_full",
        )
        self.retry_after_s = retry_after_s


class UnsupportedField(RequestError):
    """A field that is known but not served; refused by name, never ignored."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message, param=param, code="unsupported_field")


class ModelError(EverystopError):
    """A model that cannot be loaded; the message names the file, and the tensor where there is one."""


class ModelNotFound(ModelError):
    """Neither an embedded name, nor a `.gguf` file, nor a folder with a model."""


class ModelFileDamaged(ModelError):
    """A model file that is truncated, altered, or contradicts itself."""


class UnsupportedModel(ModelError):
    """A sound model file of a kind that this version does not serve; names the kind."""


class PullFailed(ModelError):
    """An embedded model that could not be fetched or verified."""


class ChatTemplateMissing(RequestError):
    """Chat was asked of a model that brings no chat template."""


class ChatTemplateError(RequestError):
    """The chat template refused the messages, or failed on them; carries the template's own words."""


class RecordError(EverystopError):
    """A file that is no record of a run, or one that cannot be replayed."""


class RemoteError(EverystopError):
    """A running server cannot be asked, or refuses."""


class EngineDead(EverystopError):
    """The engine has stopped after a failure."""


class Draining(EverystopError):
    """The server is shutting down and takes no new requests."""


class PolicyError(EverystopError):
    """A policy answered something that its contract forbids."""
