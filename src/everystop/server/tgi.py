"""Hugging Face TGI's requests: what `/generate`, `/generate_stream` and `/` take, as TGI means it; and `/info`.

The fields and their defaults are those of TGI 3 (`router/src/lib.rs`, `router/src/validation.rs`), the limits our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from everystop import __version__
from everystop.core.errors import RequestError
from everystop.core.request import SamplingParams
from everystop.server import fields
from everystop.server.fields import Field, wrong
from everystop.server.openai_fields import MAX_N, MAX_STOP_CHARS, MAX_STOPS, RANGES
from everystop.server.prompts import PREPARE_WORKERS
from everystop.server.protocol import Accepted, Parsed
from everystop.server.state import ServedModel
from everystop.server.truncation import Truncation
from everystop.server.wishes import NO_WISHES, Wishes

DEFAULT_NEW_TOKENS = 100
MAX_BEST_OF = MAX_N
MAX_CLIENT_BATCH = 1
NAMES = {  # of what completions call otherwise
    "max_tokens": "max_new_tokens",
    "n": "best_of",
    "logprobs": "top_n_tokens",
    "prompt_logprobs": "decoder_input_details",
}


@dataclass(frozen=True, slots=True)
class TgiOptions:
    """What shapes TGI's answer. `prompt` is put before the text ("" for nothing), `prefill` tells the prompt's tokens,
    `seed` is what the client sent, `is_listed` puts the answer into a list of one.
    """

    details: bool
    prompt: str = ""
    prefill: bool = False
    num_top: int = 0
    samples: bool = False
    seed: int | None = None
    is_listed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TgiParsed(Parsed):
    """A body in TGI's dialect that can be served."""

    tgi: TgiOptions


def _positive(high: float) -> Field:
    """A number above 0."""
    at_most = fields.number(0, high)

    def read(name: str, value: Any) -> float:
        number: float = at_most.read(name, value)
        if number == 0:
            raise wrong(name, value, f"more than 0, and at most {high:g}")
        return number

    return Field(read, {"type": "number", "exclusiveMinimum": 0, "maximum": high})


GENERATE_PARAMETERS: dict[str, Field] = {
    "max_new_tokens": fields.within(1, RANGES["max_tokens"][1]).described(f"{DEFAULT_NEW_TOKENS} where it is absent"),
    "do_sample": fields.boolean().described("greedy without it, unless another field asks for sampling"),
    "temperature": _positive(RANGES["temperature"][1]).described("samples, unless it is 1"),
    "top_k": fields.within(1, RANGES["top_k"][1]).described("samples"),
    "top_p": _positive(1.0).described("samples, unless it is 1"),
    "typical_p": fields.only(1.0, why="typical decoding is not served"),
    "repetition_penalty": fields.within(*RANGES["repetition_penalty"]).described("for tokens of prompt and answer"),
    "frequency_penalty": fields.within(*RANGES["frequency_penalty"]).described("for tokens of the answer, each time"),
    "seed": fields.integer(0, 2**64 - 1).described("the same seed and prompt give the same answer"),
    "best_of": fields.integer(1, MAX_BEST_OF).described("the likeliest of so many; needs sampling, no seed, no stream"),
    "stop": fields.stop_strings(MAX_STOPS, MAX_STOP_CHARS).described("part of the text that it ends"),
    "truncate": fields.within(1, RANGES["max_tokens"][1]).described("keeps the last tokens of the prompt"),
    "return_full_text": fields.boolean().described("the prompt before the text; on `/` true where it is absent"),
    "details": fields.boolean().described("what is told beside the text; `/generate_stream` tells tokens without it"),
    "top_n_tokens": fields.within(*RANGES["logprobs"]).described(
        "the likeliest tokens at each position; needs `details`, or a stream"
    ),
    "decoder_input_details": fields.boolean().described("`details`, and in them the tokens of the prompt; no stream"),
    "watermark": fields.only(False, why="no watermark is made"),
    "grammar": fields.only(why="answers are not constrained"),
    "adapter_id": fields.only(why="there are no adapters"),
}
_INPUTS = Field(fields.string(2**31).read, {"type": "string", "minLength": 1})
_PARAMETERS = fields.table(GENERATE_PARAMETERS)
GENERATE_FIELDS: dict[str, Field] = {
    "inputs": _INPUTS,
    "parameters": _PARAMETERS,
    "stream": fields.only(False, why="/generate_stream streams"),
}
STREAM_FIELDS = GENERATE_FIELDS | {"stream": fields.only(True, why="/generate does not stream")}
COMPAT_FIELDS = GENERATE_FIELDS | {"stream": fields.boolean()}


def _parse(
    body: Mapping[str, Any], accepted: Accepted, *, rows: Mapping[str, Field], stream: bool | None, is_listed: bool
) -> TgiParsed:
    values = fields.read_fields(body, rows)
    if not values.get("inputs"):
        raise RequestError("inputs is missing, or empty; send a text", param="inputs", code="missing_field")
    asked: dict[str, Any] = values.get("parameters", {})
    streams: bool = values.get("stream", False) if stream is None else stream
    samples = _samples(asked, has_parameters="parameters" in values)
    _check(asked, accepted, samples=samples, streams=streams)
    options = TgiOptions(
        details=asked.get("details", False) or asked.get("decoder_input_details", False),
        prompt=values["inputs"] if asked.get("return_full_text", is_listed) else "",
        prefill=asked.get("decoder_input_details", False),
        num_top=asked.get("top_n_tokens", 0),
        samples=samples,
        seed=asked.get("seed"),
        is_listed=is_listed,
    )
    return TgiParsed(
        params=_params(asked, options, streams=streams),
        model=accepted.model_names[0],
        prompts=(values["inputs"],),
        stream=streams,
        wishes=Wishes(prompt_logprobs=0) if options.prefill else NO_WISHES,
        truncation=Truncation(asked["truncate"]) if "truncate" in asked else None,
        tgi=options,
        names=NAMES,
        prompt_name="inputs",
    )


parse_generate = partial(_parse, rows=GENERATE_FIELDS, stream=False, is_listed=False)
parse_generate_stream = partial(_parse, rows=STREAM_FIELDS, stream=True, is_listed=False)
parse_compat = partial(_parse, rows=COMPAT_FIELDS, stream=None, is_listed=True)


def _samples(asked: Mapping[str, Any], *, has_parameters: bool) -> bool:
    """Whether tokens are drawn: asked for, or meant by a field. Without any `parameters` TGI samples."""
    meant = asked.get("temperature", 1) != 1 or asked.get("top_p", 1) != 1 or "top_k" in asked
    return bool(asked.get("do_sample", not has_parameters)) or meant


def _params(asked: Mapping[str, Any], options: TgiOptions, *, streams: bool) -> SamplingParams:
    """The model's own recommendations are not asked, as TGI does not ask them."""
    best_of = asked.get("best_of", 1)
    tells_tokens = options.details or streams
    same = ("top_k", "top_p", "repetition_penalty", "frequency_penalty", "stop")
    return SamplingParams(
        max_tokens=asked.get("max_new_tokens", DEFAULT_NEW_TOKENS),
        temperature=asked.get("temperature", 1.0) if options.samples else 0.0,
        seed=None if options.seed is None else options.seed % 2**63,
        n=best_of,
        prompt_logprobs=0 if options.prefill else None,
        include_stop_str_in_output=True,
        logprobs=options.num_top if tells_tokens else (0 if best_of > 1 else None),
        **{name: asked[name] for name in same if name in asked},
    )


def _check(asked: Mapping[str, Any], accepted: Accepted, *, samples: bool, streams: bool) -> None:
    if asked.get("best_of", 1) > 1:
        for is_wrong, why in (
            (streams, "tokens are not streamed; use /generate"),
            (not samples, "tokens are sampled; set do_sample"),
            ("seed" in asked, "no seed is given; leave it out"),
        ):
            if is_wrong:
                message = f"best_of = {asked['best_of']} is served only where {why}"
                raise RequestError(message, param="best_of", code="conflicting_fields")
    if asked.get("decoder_input_details") and streams:
        message = "decoder_input_details are not streamed; use /generate"
        raise RequestError(message, param="decoder_input_details", code="conflicting_fields")
    if asked.get("top_n_tokens") and not (streams or asked.get("details") or asked.get("decoder_input_details")):
        message = f"top_n_tokens needs details = true, or a stream: nothing else tells {asked['top_n_tokens']} tokens"
        raise RequestError(message, param="top_n_tokens", code="conflicting_fields")
    limit = accepted.max_model_len - 1
    if asked.get("truncate", 0) > limit:
        raise wrong("parameters.truncate", asked["truncate"], f"a whole number from 1 to {limit}")


def info(model: ServedModel) -> dict[str, Any]:
    """`GET /info`: TGI's description of a server; the limits are those that hold here."""
    accepted = model.accepted
    return {
        "model_id": accepted.model_names[0],
        "model_sha": None,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": model.limits.max_num_seqs + model.queue.max_num_reqs,
        "max_best_of": MAX_BEST_OF,
        "max_stop_sequences": MAX_STOPS,
        "max_input_tokens": accepted.max_model_len - 1,
        "max_total_tokens": accepted.max_model_len,
        "validation_workers": PREPARE_WORKERS,
        "max_client_batch_size": MAX_CLIENT_BATCH,
        "router": "everystop",
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }
