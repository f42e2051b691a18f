"""What `LLM` is handed: slips are named, what works elsewhere works here."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from everystop.core.errors import RequestError
from everystop.core.request import SamplingParams
from everystop.engine.arguments import check_ids, checked_params
from everystop.server.openai_fields import PARAMETER_FIELDS

VOCAB = 100


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", 10**30),
        ("min_tokens", 10**30),
        ("min_tokens", 4),  # above max_tokens
        ("top_k", 1.5),
        ("top_k", 10**30),
        ("n", 2.0),
        ("n", 10**9),
        ("seed", 1.5),
        ("seed", "x"),
        ("seed", 2**64),
        ("logprobs", 21),
        ("logprobs", True),
        ("temperature", 1e300),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e300),
        ("stop", "a text, not a tuple"),
        ("stop", (b"x",)),
        ("stop", (5,)),
        ("stop_token_ids", (1.5,)),
        ("stop_token_ids", 5),
        ("stop_token_ids", (VOCAB,)),
        ("logit_bias", {5: 1.0}),
        ("logit_bias", ((5, 1e300),)),
        ("logit_bias", ((5, "x"),)),
        ("logit_bias", ((5.5, 1.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", (5,)),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (5.5,)),
        ("allowed_token_ids", (VOCAB,)),
        ("ignore_eos", "no"),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", True),
        ("bad_word_ids", (5,)),
        ("bad_word_ids", ((5,), ())),
        ("bad_word_ids", ((VOCAB,),)),
        ("bad_word_ids", "word"),
    ],
)
def test_wrong_fields_are_named(field: str, value: Any) -> None:
    params = SamplingParams(max_tokens=3)
    object.__setattr__(params, field, value)  # some slips SamplingParams itself would stop
    with pytest.raises(RequestError, match=rf"^{field} ") as caught:
        checked_params(params, VOCAB)
    assert caught.value.param == field
    assert len(str(caught.value)) < 200


def test_ranges_hold_wherever_parameters_come_from() -> None:
    """`SamplingParams` itself, a call of `LLM`, a request's body: each bound is taken, and nothing beyond it."""
    for name, (low, high) in SamplingParams.RANGES.items():
        for bound, beyond in ((low, low - 1), (high, high + 1)):
            params = SamplingParams(**{"max_tokens": 2**31 - 1, name: bound})
            checked_params(params, VOCAB)
            with pytest.raises(RequestError, match=rf"^{name} is"):
                SamplingParams(**{name: beyond})
            object.__setattr__(params, name, beyond)
            with pytest.raises(RequestError, match=rf"^{name} is"):
                checked_params(params, VOCAB)
            row = PARAMETER_FIELDS.get(name)
            if row is not None and (name, bound) not in {
                ("n", high),
                ("top_k", low),
            }:  # the body's own limit, and -1
                row.read(name, bound)
                with pytest.raises(RequestError, match=rf"^{name} is"):
                    row.read(name, beyond)


def test_every_field_is_checked() -> None:
    """A field that nobody checks would meet its first check in the engine's thread."""
    for field in dataclasses.fields(SamplingParams):
        params = SamplingParams()
        object.__setattr__(params, field.name, object())
        with pytest.raises(RequestError):
            checked_params(params, VOCAB)


@pytest.mark.parametrize("params", [{"max_tokens": 2}, "x", 5])
def test_params_must_be_sampling_params(params: Any) -> None:
    with pytest.raises(RequestError, match="must be SamplingParams"):
        checked_params(params, VOCAB)


def test_sound_fields_are_taken() -> None:
    checked_params(SamplingParams(), VOCAB)
    checked_params(
        SamplingParams(
            max_tokens=5, min_tokens=5, temperature=0, top_p=1, top_k=3, min_p=0.1, repetition_penalty=1.2, n=3,
            presence_penalty=-2, frequency_penalty=2, seed=-1, stop=("a",), stop_token_ids=(1,), logprobs=0,
            logit_bias=((99, -100.0), (0, 3)), allowed_token_ids=(0, 99), ignore_eos=True,
            prompt_logprobs=20, bad_word_ids=((99,), [0, 5]),
        ),
        VOCAB,
    )  # fmt: skip


@pytest.mark.parametrize("ids", [np.array([28, 29]), {28, 29}, [np.int64(28), 29]])
def test_lists_become_tuples_of_whole_numbers(ids: Any) -> None:
    """The engine's thread asks whether they are there, and hashes them."""
    fields = {"allowed_token_ids": ids, "stop_token_ids": ids, "bad_word_ids": ([np.int32(5)],), "stop": ["a"]}
    params = checked_params(SamplingParams(**fields, logit_bias=[[np.int64(5), 1]]), VOCAB)  # type: ignore[arg-type]
    assert (params.allowed_token_ids, params.stop_token_ids) == ((28, 29), (28, 29))
    assert (params.bad_word_ids, params.stop, params.logit_bias) == (((5,),), ("a",), ((5, 1.0),))
    assert type(params.allowed_token_ids[0]) is type(params.logit_bias[0][0]) is int  # type: ignore[index]
    hash(params)


def test_ids_may_be_any_whole_numbers() -> None:
    assert check_ids("prompt", np.array([1, 99]), VOCAB) == (1, 99)
    assert check_ids("prompt", [np.int32(5), 7], VOCAB) == (5, 7)
    assert all(type(number) is int for number in check_ids("prompt", np.array([1], dtype=np.uint8), VOCAB))


@pytest.mark.parametrize("ids", [[1.0], ["a"], [None], 5, None, [-1], [VOCAB], [2**70]])
def test_wrong_ids_are_refused(ids: Any) -> None:
    with pytest.raises(RequestError, match=r"^prompt "):
        check_ids("prompt", ids, VOCAB)
