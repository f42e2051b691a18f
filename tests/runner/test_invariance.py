"""Batching never changes an answer: bitwise equal tokens and log-probabilities, however a request is served."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.model.builders import write_folder
from tests.native.avxvnni import Process
from tests.runner.invariance import (
    BLOCK_SIZES,
    GREEDY,
    LENGTHS,
    RANDOM,
    Prompt,
    Run,
    Setting,
    assert_same,
    check_batch,
    make_prompts,
    matrix,
    serve,
    serve_alone,
    storing,
)
from tests.runner.models import random_model, random_transformer

from everystop.core.policy import Priority
from everystop.model.checkpoint import inspect_model
from everystop.model.home import Home
from everystop.model.weights import LoadedModel, load_model

DTYPES = (("int8", "auto"), ("float32", "auto"), ("int8", "float16"))  # of weights, and of the KV cache


def describe(value: object) -> str | None:
    """A short name for a case."""
    if isinstance(value, tuple):
        return "-kv-".join(value)
    if not isinstance(value, Setting):
        return None
    cache = "cached" if value.prefix_caching else "uncached"
    return (
        f"chunk{value.max_num_prefill_tokens}-block{value.block_size}-threads{value.num_threads}-{cache}-{value.depth}"
    )


def tokens_of(length: int, salt: int, vocab_size: int) -> tuple[int, ...]:
    """A prompt of its own."""
    return tuple((salt + 17 * i + i * i // 3) % (vocab_size - 1) + 1 for i in range(length))


@pytest.fixture(scope="module", params=DTYPES, ids=describe)
def tiny(request: pytest.FixtureRequest) -> LoadedModel:
    """A tiny model with sizes that fit no vector."""
    dtype, kv_cache_dtype = request.param
    return storing(random_model("llama", dtype), kv_cache_dtype)


@pytest.fixture(scope="module")
def prompts(tiny: LoadedModel) -> list[Prompt]:
    """Thirty-two prompts of mixed lengths; each stays long enough to be met by all others, whatever the chunk."""
    return make_prompts(LENGTHS, tiny.spec.vocab_size, max_tokens=340)


@pytest.fixture(scope="module")
def alone(tiny: LoadedModel, prompts: list[Prompt]) -> Run:
    """What each of them gets alone."""
    return serve_alone(tiny, prompts)


@pytest.mark.parametrize(("size", "setting"), list(matrix()), ids=describe)
def test_batches_of_any_size_chunk_block_and_thread_count(
    tiny: LoadedModel, prompts: list[Prompt], alone: Run, size: int, setting: Setting
) -> None:
    check_batch(tiny, alone, prompts, size, setting)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_prefix_hits_of_earlier_and_of_simultaneous_requests(tiny: LoadedModel, block_size: int) -> None:
    """A later turn of the same conversation hits what the first left; a burst with one prefix computes it once."""
    vocab_size = tiny.spec.vocab_size
    shared = tokens_of(150, 3, vocab_size)
    first = Prompt(shared, replace(GREEDY, max_tokens=40))
    later = [
        Prompt(
            shared + tokens_of(5 + 20 * i, 50 + i, vocab_size),
            replace(RANDOM if i % 2 else GREEDY, max_tokens=40),
            after=lambda tokens: len(tokens) == 40,
        )
        for i in range(4)
    ]
    setting = Setting(block_size=block_size, prefix_caching=True, max_num_prefill_tokens=100, num_threads=2)
    run = serve(tiny, setting, [first, *later])
    assert run.num_hits >= 4
    assert sum(run.chunk_sizes) < sum(len(p.token_ids) for p in (first, *later)) - 3 * (150 // block_size * block_size)
    assert_same(run, serve_alone(tiny, [first, *later]))
    burst = [replace(prompt, after=None) for prompt in later]
    run = serve(tiny, replace(setting, max_num_prefill_tokens=None), burst)
    assert run.num_hits == 3
    assert len(run.steps[0].plan.rows) == 4, "the burst was not admitted at once"
    assert_same(run, serve_alone(tiny, burst))


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_preemption_at_block_borders(tiny: LoadedModel, block_size: int, depth: int, prefix_caching: bool) -> None:
    """An urgent request takes the only slot when the first has k tokens out; the first comes back and goes on."""
    vocab_size = tiny.spec.vocab_size
    prompt_length = block_size * 2  # so that k generated tokens end k slots into a block
    for k in (1 + depth, block_size - 1, block_size, block_size + 1):  # at depth 1 one more is on its way
        for params in (GREEDY, RANDOM):
            slow = Prompt(tokens_of(prompt_length, k, vocab_size), replace(params, max_tokens=k + 8), priority=5)
            urgent = Prompt(
                tokens_of(40, 90 + k, vocab_size),
                replace(RANDOM, max_tokens=4),
                after=lambda tokens, k=k: len(tokens) >= k - depth,
            )
            setting = Setting(
                block_size=block_size,
                max_num_seqs=1,
                max_num_prefill_tokens=33,
                max_num_batched_tokens=64,
                depth=depth,
                prefix_caching=prefix_caching,
                policy=Priority,
            )
            run = serve(tiny, setting, [slow, urgent])
            assert run.preempted == [0]
            assert num_generated_when_preempted(run) == k
            assert_same(run, serve_alone(tiny, [slow, urgent]), f"preempted after {k}")


def num_generated_when_preempted(run: Run) -> int:
    """Tokens of request 0 that had been sampled by steps before the one that preempted it."""
    preempting = next(i for i, step in enumerate(run.steps) if 0 in step.plan.preempted)
    rows = [row for step in run.steps[:preempting] for row in step.plan.rows if row.request_id == 0]
    return sum(row.logits_from < row.num_tokens for row in rows)


def test_preemption_in_a_tight_pool(tiny: LoadedModel) -> None:
    """Many requests, blocks for few: preempted while others run, again and again."""
    prompts = make_prompts((60, 33, 90, 17, 48, 75, 20, 64), tiny.spec.vocab_size, max_tokens=60)
    for prefix_caching in (False, True):
        setting = Setting(
            block_size=16, num_tokens=420, max_num_seqs=8, max_num_prefill_tokens=40, prefix_caching=prefix_caching
        )
        run = serve(tiny, setting, prompts)
        assert len(run.preempted) >= 3
        assert_same(run, serve_alone(tiny, prompts))


@pytest.mark.parametrize("num_threads", [2, 3, 4])
def test_a_long_context_whose_splits_are_shared_out(tiny: LoadedModel, num_threads: int) -> None:
    """Four splits of attention for few rows: each thread computes some, and they are merged in order."""
    prompts = make_prompts((850, 600), tiny.spec.vocab_size, max_tokens=20)
    run = serve(tiny, Setting(num_threads=num_threads, max_num_prefill_tokens=256), prompts)
    assert max(row.start + row.num_tokens for step in run.steps for row in step.plan.rows) > 3 * 256
    assert_same(run, serve_alone(tiny, prompts))


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_three_choices_fork_the_prompt_and_differ(tiny: LoadedModel, prefix_caching: bool) -> None:
    prompts = make_prompts((50, 33, 64, 5), tiny.spec.vocab_size, max_tokens=30, n=3)
    setting = Setting(block_size=32, prefix_caching=prefix_caching, max_num_prefill_tokens=33, num_threads=3)
    run = serve(tiny, setting, prompts)
    assert run.num_forks >= 4
    assert any(step.plan.copies for step in run.steps), "no partial block was copied"
    assert_same(run, serve_alone(tiny, prompts))
    for index, prompt in enumerate(prompts):
        choices = {tuple(run.tokens[index, choice]) for choice in range(3)}
        assert len(choices) == (1 if prompt.params.temperature == 0 else 3)


@pytest.mark.parametrize("mutant", ["quantize_over_batch", "split_by_rows", "scale_over_tokens"])
def test_a_kernel_that_looks_at_the_batch_is_found(tiny: LoadedModel, prompts: list[Prompt], mutant: str) -> None:
    few = [replace(prompt, params=replace(prompt.params, max_tokens=8)) for prompt in prompts[:5]]
    setting = Setting(max_num_seqs=5, mutant=mutant)
    single = [serve(tiny, replace(setting, max_num_seqs=1), [prompt]) for prompt in few]
    together = serve(tiny, setting, few)
    assert max(together.batch_sizes) == 5
    reference = Run(
        tokens={(i, 0): run.tokens[0, 0] for i, run in enumerate(single)},
        logprobs={(i, 0): run.logprobs[0, 0] for i, run in enumerate(single)},
    )
    with pytest.raises(AssertionError, match="differ"):
        assert_same(together, reference)


@pytest.mark.parametrize("dtypes", DTYPES, ids=describe)
@pytest.mark.parametrize("isa", ["avx512vnni", "avxvnni", "avx2", "portable"])
def test_each_instruction_set_path(tmp_path: Path, isa: str, dtypes: tuple[str, str]) -> None:
    folder = write_folder(tmp_path, random_transformer("qwen3"))
    code = (
        "import sys; from tests.runner.invariance import check_small_matrix; print(check_small_matrix(*sys.argv[1:]))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(folder), *dtypes],
        env=os.environ | {"EVERYSTOP_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if process.returncode and "EVERYSTOP_ISA" in process.stderr:
        pytest.skip(process.stderr.strip().splitlines()[-1])
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == str({"isa": isa, "cases": 3})


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_the_whole_matrix_on_each_slower_path(isa: str) -> None:
    """All of this file, but what starts processes or needs the embedded model, in a process of its own."""
    options = ["-q", "-p", "no:cacheprovider", "--timeout", "300", "-m", "not slow and not model"]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-k", "not instruction_set", __file__],
        env=os.environ | {"EVERYSTOP_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
    assert " passed" in process.stdout
    assert " skipped" not in process.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtypes", DTYPES, ids=describe)
def test_the_avxvnni_path_on_a_cpu_without_it(tmp_path: Path, dtypes: tuple[str, str]) -> None:
    """As `test_each_instruction_set_path`, with the instructions emulated where they must be."""
    folder = write_folder(tmp_path / "model", random_transformer("qwen3"))
    code = (
        "import sys; from tests.runner.invariance import check_small_matrix; print(check_small_matrix(*sys.argv[1:]))"
    )
    process = Process(tmp_path, must_trap=dtypes[0] == "int8")
    output = process.run_python("-c", code, str(folder), *dtypes, "3", "40", timeout_s=550)
    assert output.strip() == str({"isa": "avxvnni", "cases": 3})


@pytest.fixture(scope="module", params=DTYPES, ids=describe)
def smollm2(request: pytest.FixtureRequest, smollm2_path: Path) -> LoadedModel:
    """The embedded model."""
    dtype, kv_cache_dtype = request.param
    model = load_model(inspect_model(smollm2_path), dtype=dtype, num_threads=2, home=Home.from_environment())
    return storing(model, kv_cache_dtype)


@pytest.mark.model
def test_the_embedded_model_in_a_mixed_batch(smollm2: LoadedModel) -> None:
    """Chunks, prefix hits, threads, forks and preemption at once."""
    prompts = make_prompts((1, 70, 33, 16, 120), 40_000, max_tokens=36)
    shared = prompts[4].token_ids[:100]
    prompts += [
        Prompt((*shared, 11, 12, 13), replace(RANDOM, n=3, max_tokens=30)),
        Prompt((*shared, 21, 22), replace(GREEDY, max_tokens=30)),
    ]
    setting = Setting(max_num_prefill_tokens=50, max_num_batched_tokens=64, prefix_caching=True, num_threads=2)
    run = serve(smollm2, replace(setting, num_tokens=11 * 32, max_num_seqs=9), prompts)
    assert run.preempted
    assert run.num_hits
    assert run.num_forks
    assert max(run.batch_sizes) >= 5
    assert any(row.start > 0 and row.num_tokens > 1 for step in run.steps for row in step.plan.rows)
    assert_same(run, serve_alone(smollm2, prompts))
