"""Sampling: each setting does what it says, ties go to the lowest id, draws are nobody else's business."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from everystop import _native

FAILED, MASKED = -2, -3
NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": 0,
    "choice_index": 0,
    "min_tokens": 0,
    "num_logprobs": -1,
    "bad_word_ids": [],
    "stop_token_ids": [],
    "logit_bias": [],
    "allowed_token_ids": None,
}


def sample(
    logits: Sequence[float] | np.ndarray, history: Sequence[int] = (), num_prompt: int = 0, **settings: Any
) -> Any:
    """(token, logprobs) for a row of logits after `history`."""
    naive = settings.pop("naive", False)
    return _native.sample(
        np.asarray(logits, dtype=np.float32),
        NEUTRAL | settings,
        np.array(history, dtype=np.int32),
        num_prompt,
        naive=naive,
    )


def ids(*tokens: int) -> np.ndarray:
    """Token ids as the decoder takes them."""
    return np.array(tokens, dtype=np.int32)


def token(*args: Any, **settings: Any) -> int:
    """The sampled token alone."""
    chosen: int = sample(*args, **settings)[0]
    return chosen


def tokens_of_seeds(logits: Any, count: int = 400, **settings: Any) -> Counter[int]:
    """How often each token is drawn over many seeds."""
    return Counter(token(logits, seed=seed, **settings) for seed in range(count))


# ------------------------------------------------------------------- random numbers


def test_philox_gives_the_published_numbers() -> None:
    """Known answers of the reference implementation (Random123, kat_vectors)."""
    ones = 0xFFFFFFFF
    assert _native.philox4x32([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert _native.philox4x32([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert _native.philox4x32([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]) == [
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    ]


def test_draws_differ_by_seed_choice_and_position_and_are_uniform() -> None:
    draws = [_native.uniform_draw(s, c, p) for s in range(20) for c in range(5) for p in range(20)]
    assert len(set(draws)) == len(draws)
    assert all(0 <= draw < 1 for draw in draws)
    counts, _ = np.histogram(draws, bins=10, range=(0, 1))
    assert counts.min() > 130
    assert counts.max() < 270
    assert _native.uniform_draw(2**64 - 1, 0, 0) != _native.uniform_draw(2**32 - 1, 0, 0)


# ---------------------------------------------------------------------------- greedy


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-6])
def test_greedy_takes_the_lowest_of_tied_ids(temperature: float) -> None:
    logits = np.zeros(5000)
    logits[[77, 78, 4000]] = 3.0
    assert token(logits, temperature=temperature, top_p=0.5, top_k=1) == 77


def test_a_temperature_above_the_floor_is_used() -> None:
    assert len(tokens_of_seeds([1.0, 1.0], temperature=1e-4, count=40)) == 2


def test_top_k_of_one_is_greedy_on_ties() -> None:
    assert set(tokens_of_seeds([2.0, 5.0, 5.0, 5.0], top_k=1, count=50)) == {1}


# ---------------------------------------------------------------------------- filters


def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_a_tie() -> None:
    assert set(tokens_of_seeds([0.0, 1.0, 1.0, 1.0, 1.0], top_k=3)) == {1, 2, 3}
    assert set(tokens_of_seeds([1.0] * 6, top_k=2)) == {0, 1}


@pytest.mark.parametrize("top_k", [0, 4, 5, 1000])
def test_top_k_of_none_or_all_changes_nothing(top_k: int) -> None:
    assert set(tokens_of_seeds([1.0] * 4, top_k=top_k)) == {0, 1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = np.log([0.5, 0.25, 0.15, 0.1])
    assert set(tokens_of_seeds(logits, top_p=0.49)) == {0}
    assert set(tokens_of_seeds(logits, top_p=0.51)) == {0, 1}
    assert set(tokens_of_seeds(logits, top_p=0.76)) == {0, 1, 2}
    assert set(tokens_of_seeds(logits, top_p=1.0)) == {0, 1, 2, 3}
    assert set(tokens_of_seeds([1.0] * 8, top_p=0.4)) == {0, 1, 2, 3}


@pytest.mark.parametrize("top_p", [0.0, 1e-9])
def test_top_p_keeps_at_least_the_best(top_p: float) -> None:
    assert set(tokens_of_seeds([0.0, 2.0, 2.0], top_p=top_p, count=50)) == {1}


def test_top_p_counts_its_share_of_what_top_k_left() -> None:
    logits = np.log([0.4, 0.2, 0.2, 0.2])
    assert set(tokens_of_seeds(logits, top_k=2, top_p=0.7)) == {0, 1}
    assert set(tokens_of_seeds(logits, top_k=2, top_p=0.6)) == {0}


def test_min_p_is_relative_to_the_best() -> None:
    logits = np.log([0.5, 0.2, 0.1, 0.2])
    assert set(tokens_of_seeds(logits, min_p=0.3)) == {0, 1, 3}
    assert set(tokens_of_seeds(logits, min_p=1.0)) == {0}


def test_frequencies_follow_the_probabilities_at_a_temperature() -> None:
    probabilities = np.array([0.1, 0.2, 0.3, 0.4])
    for temperature in (1.0, 2.0, 0.5):
        expected = probabilities ** (1 / temperature)
        expected /= expected.sum()
        counts = tokens_of_seeds(np.log(probabilities), temperature=temperature, count=4000)
        for i, share in enumerate(expected):
            assert counts[i] / 4000 == pytest.approx(share, abs=0.04)


# -------------------------------------------------------- penalties, masks and biases


def test_repetition_penalty_sees_prompt_and_output_once_each() -> None:
    logits = [1.0, 1.5, -1.0, 1.6]
    assert token(logits, temperature=0, repetition_penalty=2.0, history=[3], num_prompt=1) == 1
    assert token(logits, temperature=0, repetition_penalty=2.0, history=[3, 1, 1, 1], num_prompt=1) == 0
    assert token([-1.0, -1.5], temperature=0, repetition_penalty=2.0, history=[0, 0], num_prompt=2) == 1


def test_presence_and_frequency_see_the_output_alone() -> None:
    logits = [1.0, 1.5]
    assert token(logits, temperature=0, presence_penalty=2.0, history=[1, 1, 1], num_prompt=3) == 1
    assert token(logits, temperature=0, presence_penalty=2.0, history=[1, 1, 1], num_prompt=2) == 0
    assert token(logits, temperature=0, presence_penalty=0.4, history=[1, 1, 1], num_prompt=0) == 1
    assert token(logits, temperature=0, frequency_penalty=0.2, history=[1, 1], num_prompt=0) == 1
    assert token(logits, temperature=0, frequency_penalty=0.2, history=[1, 1, 1], num_prompt=0) == 0


def test_scratch_is_clean_after_penalties() -> None:
    """What one call counted does not leak into the next."""
    for _ in range(3):
        assert token([1.0, 1.5], temperature=0, frequency_penalty=0.3, history=[1], num_prompt=0) == 1


def test_logit_bias_and_allowed_ids() -> None:
    assert token([0.0, 1.0, 2.0], temperature=0, logit_bias=[(0, 3.0)]) == 0
    assert set(tokens_of_seeds(np.arange(70.0), allowed_token_ids=ids(0, 33, 64), temperature=50.0)) == {0, 33, 64}


def test_stop_ids_are_masked_until_min_tokens_are_out() -> None:
    settings = {"temperature": 0, "stop_token_ids": [1], "min_tokens": 2}
    assert token([0.0, 9.0, 1.0], history=[0, 2], num_prompt=1, **settings) == 2
    assert token([0.0, 9.0, 1.0], history=[0, 2, 2], num_prompt=1, **settings) == 1


def test_rows_that_cannot_be_sampled_fail() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        for position in (0, 5, 20):
            logits = np.zeros(21)
            logits[position] = bad
            assert token(logits) == FAILED
            assert token(logits, temperature=0) == FAILED


@pytest.mark.parametrize("naive", [False, True])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_whose_tokens_are_all_masked_says_so(temperature: float, naive: bool) -> None:
    """Which is no failure: the logits are as good as any."""
    how: dict[str, Any] = {"temperature": temperature, "naive": naive}
    assert token([1.0, 2.0], allowed_token_ids=ids(), **how) == MASKED
    assert token([1.0, 2.0], allowed_token_ids=ids(1), stop_token_ids=[1], min_tokens=1, **how) == MASKED
    assert token([1.0, np.nan], allowed_token_ids=ids(), **how) == FAILED


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        token([0.0, 1.0], **{name: value})


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    for settings in ({"stop_token_ids": [4]}, {"logit_bias": [(-1, 1.0)]}, {"allowed_token_ids": ids(4)}):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            token([0.0] * 4, **settings)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        token([0.0] * 4, history=[4])


# ----------------------------------------------------------------- the naive version


@pytest.mark.parametrize("size", [1, 2, 17, 300, 5000])
def test_equals_the_naive_version_on_random_settings(size: int) -> None:
    rng = np.random.default_rng(size)
    for case in range(150):
        logits = np.round(rng.standard_normal(size) * rng.choice([0.5, 3, 10]), int(rng.choice([0, 1, 6])))
        history = rng.integers(0, size, rng.integers(1, 30)).tolist()
        allowed = ids(*rng.choice(size, max(1, size // 2), replace=False))
        settings = {
            "temperature": float(rng.choice([0.0, 0.3, 1.0, 2.5])),
            "top_k": int(rng.choice([0, 0, 1, 5, 40, 300])),
            "top_p": float(rng.choice([1.0, 0.9, 0.4])),
            "min_p": float(rng.choice([0.0, 0.05])),
            "repetition_penalty": float(rng.choice([1.0, 1.3])),
            "presence_penalty": float(rng.choice([0.0, 0.5])),
            "frequency_penalty": float(rng.choice([0.0, 0.7])),
            "logit_bias": [(int(rng.integers(size)), 2.0)],
            "allowed_token_ids": allowed if case % 3 == 0 else None,
            "seed": case,
        }
        arguments = (logits, history, int(rng.integers(0, len(history) + 1)))
        assert token(*arguments, **settings) == token(*arguments, **settings, naive=True), settings


# --------------------------------------------------------------------------- logprobs


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 4
    chosen, (logprob, rank, top) = sample(logits, num_logprobs=5, logit_bias=[(3, 100.0)], temperature=0.7)
    wide = logits.astype(np.float64)
    expected = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    assert chosen == 3
    assert logprob == pytest.approx(expected[3], abs=1e-5)
    assert rank == 1 + (logits > logits[3]).sum()
    order = np.argsort(-expected, kind="stable")[:5]
    assert [i for i, _ in top] == order.tolist()
    assert [p for _, p in top] == pytest.approx(expected[order].tolist(), abs=1e-5)


def test_logprobs_of_ties_are_in_order_of_ids() -> None:
    _, (_, rank, top) = sample([1.0, 2.0, 2.0, 2.0, 1.0], num_logprobs=4, logit_bias=[(2, 5.0)], temperature=0)
    assert rank == 2
    assert [i for i, _ in top] == [1, 2, 3, 0]


def test_logprobs_zero_and_more_than_the_vocabulary() -> None:
    assert sample([0.0, 1.0], num_logprobs=0, temperature=0)[1][2] == ()
    assert len(sample([0.0, 1.0], num_logprobs=20, temperature=0)[1][2]) == 2
    assert sample([0.0, 1.0], temperature=0)[1] is None


# ------------------------------------------------------------------------------ bad words


@pytest.mark.parametrize(
    ("history", "num_prompt", "words", "expected"),
    [
        ([], 0, [[2]], 1),
        ([], 0, [[2], [1]], 0),
        ([5, 3], 1, [[3, 2]], 1),  # the output ends with the beginning of the word
        ([3], 1, [[3, 2]], 2),  # the prompt does
        ([5, 3], 1, [[5, 3, 2]], 2),  # prompt and output do together
        ([5, 3, 4], 1, [[3, 2]], 2),  # something has come between
        ([5, 3, 3], 1, [[3, 3, 2]], 1),
        ([5, 3], 1, [[3, 3, 2]], 2),  # the output is too short
        ([5, 2], 1, [[2, 2]], 1),
        ([5, 3], 1, [[4, 2], [3, 1]], 2),
    ],
)
@pytest.mark.parametrize("naive", [False, True])
def test_bad_words_do_not_come_about(
    history: list[int], num_prompt: int, words: list[list[int]], expected: int, naive: bool
) -> None:
    logits = [0.0, 1.0, 2.0, -1.0, -1.0, -1.0]
    assert token(logits, history, num_prompt, bad_word_ids=words, temperature=0, naive=naive) == expected


def test_bad_words_and_other_masks_together_may_leave_nothing() -> None:
    settings: dict[str, Any] = {"allowed_token_ids": ids(1, 2), "temperature": 0}
    assert token([0.0, 1.0, 2.0], bad_word_ids=[[2]], **settings) == 1
    assert token([0.0, 1.0, 2.0], bad_word_ids=[[2], [1]], **settings) == MASKED


def test_bad_words_leave_the_log_probabilities_alone() -> None:
    plain = sample([0.0, 1.0, 2.0], num_logprobs=2, temperature=0)
    chosen, logprobs = sample([0.0, 1.0, 2.0], num_logprobs=2, temperature=0, bad_word_ids=[[2]])
    assert chosen == 1
    assert logprobs[2] == plain[1][2]
    assert logprobs[1] == 2


def test_bad_words_are_sampled_as_the_naive_version_does() -> None:
    rng = np.random.default_rng(7)
    for seed in range(60):
        logits = rng.normal(size=40).astype(np.float32)
        history = rng.integers(0, 4, 9).tolist()
        words = [rng.integers(0, 4, rng.integers(1, 4)).tolist() for _ in range(4)]
        settings: dict[str, Any] = {"bad_word_ids": words, "seed": seed, "top_k": 5, "logit_bias": [(2, 6.0)]}
        assert token(logits, history, 3, **settings) == token(logits, history, 3, naive=True, **settings)


@pytest.mark.parametrize("words", [[[]], [[6]], [[-1]], [[1, 99]]])
def test_bad_words_outside_the_vocabulary_are_refused(words: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="bad word"):
        token([0.0] * 6, bad_word_ids=words)
