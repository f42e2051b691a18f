"""Throughput of many requests through the scheduler and the step loop, and through transformers' own batching."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from everystop.core.events import StepEvent
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.policy import make_policy
from everystop.core.request import Request, SamplingParams
from everystop.core.scheduler import Scheduler
from everystop.engine.loop import StepLoop
from everystop.model.spec import DecoderSpec
from everystop.runner.torch.loading import TorchModel
from everystop.runner.torch.runner import RunnerLimits, TorchRunner
from everystop.sim.workloads import Dice

BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class Job:
    """A request: its prompt's length and its answer's."""

    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Throughput:
    """What a run of all jobs came to; `busy_share` is the device's share of the wall time, 0 where nobody knows."""

    how: str
    num_jobs: int
    seconds: float
    output_tokens_per_s: float
    busy_share: float = 0.0
    num_wasted_rows: int = 0


def chat_jobs(num: int, scale: int) -> list[Job]:
    """The `chat` shape with lengths times `scale`: prompts uniform, answers log-normal, between 40 and 200."""
    dice = Dice("chat", 0)
    return [Job(dice.between(40, 200) * scale, dice.log_normal(40, 200) * scale) for _ in range(num)]


def serve(
    model: TorchModel,
    jobs: Sequence[Job],
    *,
    policy: str,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_blocks: int,
    graphs: str,
    depth: int = 1,
) -> Throughput:
    """All jobs at once, to their end; tokens mean nothing, lengths do."""
    longest = max(job.num_prompt_tokens + job.num_output_tokens for job in jobs)
    runner = TorchRunner(
        model,
        RunnerLimits(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=longest,
            graphs=graphs,
        ),
    )
    scheduler = Scheduler(
        Limits(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_model_len=longest),
        KVCache(num_blocks=num_blocks, block_size=BLOCK_SIZE, enable_prefix_caching=False),
        make_policy(policy),
    )
    loop = StepLoop(scheduler, runner, time.monotonic_ns, depth=depth)
    began_s = time.perf_counter()
    for i, job in enumerate(jobs):
        ids = [(i * 7919 + j * 31) % (model.spec.vocab_size - 1) + 1 for j in range(job.num_prompt_tokens)]
        scheduler.add(Request(i, ids, SamplingParams(max_tokens=job.num_output_tokens, temperature=0.0)), 0)
    device_ns = num_wasted = 0
    while scheduler.has_work:
        for event in loop.turn().events:
            if isinstance(event, StepEvent):
                device_ns += event.execute_ns
                num_wasted += event.num_wasted_rows
    loop.turn()
    seconds = time.perf_counter() - began_s
    runner.close()
    tokens = sum(job.num_output_tokens for job in jobs)
    return Throughput(policy, len(jobs), seconds, tokens / seconds, device_ns / 1e9 / seconds, num_wasted)


def serve_by_transformers(spec: DecoderSpec, jobs: Sequence[Job], device: str) -> Throughput:
    """The same jobs by `transformers`' continuous batching on a model of the same sizes in bfloat16."""
    import torch
    import transformers

    torch.cuda.empty_cache()  # it looks for free memory for its cache; nothing where there is no GPU
    untyped: Any = transformers  # whose types differ from release to release
    config = untyped.LlamaConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_position,
        tie_word_embeddings=spec.tied_embeddings,
        pad_token_id=0,
        eos_token_id=-1,
        bos_token_id=None,
    )
    with torch.device(device):
        model = untyped.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    settings = untyped.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
    with model.continuous_batching_context_manager(generation_config=settings) as manager:
        began_s = time.perf_counter()
        for i, job in enumerate(jobs):
            ids = [(i * 7919 + j * 31) % (spec.vocab_size - 1) + 1 for j in range(job.num_prompt_tokens)]
            manager.add_request(ids, max_new_tokens=job.num_output_tokens)
        tokens = num_done = 0
        while num_done < len(jobs):
            result = manager.get_result(timeout=60)
            if result is None:
                raise RuntimeError(f"no answer for 60 s after {num_done} of {len(jobs)}")
            if result.is_finished():
                num_done += 1
                tokens += len(result.generated_tokens)
        seconds = time.perf_counter() - began_s
    return Throughput("transformers", len(jobs), seconds, tokens / seconds)
