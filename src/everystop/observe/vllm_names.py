"""The same metrics under the names, labels and buckets that dashboards made for vLLM ask for, in old and new spelling.

Each is one of this project's metrics, or says that what it counts does not exist here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from everystop.observe.buckets import VLLM_ITL_S, VLLM_LATENCY_S, VLLM_STEP_TOKENS, VLLM_TTFT_S
from everystop.observe.catalogue import FAMILIES
from everystop.observe.families import Family, Kind, alone
from everystop.observe.metrics import Metrics

PREFIX = "vllm:"


class Alias(NamedTuple):
    """A metric of vLLM, and which of ours it is; of a histogram only the `bounds` that vLLM has."""

    name: str
    ours: str
    bounds: tuple[float, ...] | None = None


ALIASES = (
    Alias("num_requests_running", "num_requests_running"),
    Alias("num_requests_waiting", "num_requests_waiting"),
    Alias("kv_cache_usage_perc", "kv_cache_usage_perc"),
    Alias("gpu_cache_usage_perc", "kv_cache_usage_perc"),
    Alias("prompt_tokens_total", "prompt_tokens_total"),
    Alias("prompt_tokens_cached_total", "prefix_cache_hits_total"),
    Alias("generation_tokens_total", "generation_tokens_total"),
    Alias("num_preemptions_total", "num_preemptions_total"),
    Alias("request_success_total", "request_success_total"),
    Alias("prefix_cache_queries_total", "prefix_cache_queries_total"),
    Alias("prefix_cache_hits_total", "prefix_cache_hits_total"),
    Alias("gpu_prefix_cache_queries_total", "prefix_cache_queries_total"),
    Alias("gpu_prefix_cache_hits_total", "prefix_cache_hits_total"),
    Alias("time_to_first_token_seconds", "time_to_first_token_seconds", VLLM_TTFT_S),
    Alias("inter_token_latency_seconds", "inter_token_latency_seconds", VLLM_ITL_S),
    Alias("time_per_output_token_seconds", "inter_token_latency_seconds", VLLM_ITL_S),
    Alias("request_time_per_output_token_seconds", "request_time_per_output_token_seconds", VLLM_ITL_S),
    Alias("e2e_request_latency_seconds", "e2e_request_latency_seconds", VLLM_LATENCY_S),
    Alias("request_queue_time_seconds", "request_queue_time_seconds", VLLM_LATENCY_S),
    Alias("request_inference_time_seconds", "request_inference_time_seconds", VLLM_LATENCY_S),
    Alias("request_prefill_time_seconds", "request_prefill_time_seconds", VLLM_LATENCY_S),
    Alias("request_decode_time_seconds", "request_decode_time_seconds", VLLM_LATENCY_S),
    Alias("request_prompt_tokens", "request_prompt_tokens"),
    Alias("request_generation_tokens", "request_generation_tokens"),
    Alias("request_max_num_generation_tokens", "request_longest_generation_tokens"),
    Alias("request_params_n", "request_params_n"),
    Alias("request_params_max_tokens", "request_params_max_tokens"),
    Alias("request_prefill_kv_computed_tokens", "request_computed_prompt_tokens"),
    Alias("request_num_preemptions", "request_num_preemptions"),
    Alias("iteration_tokens_total", "step_tokens", VLLM_STEP_TOKENS),
)

_OURS = {family.name: family for family in FAMILIES}

FAMILIES_OF_VLLM: tuple[Family[Metrics], ...] = (
    *(
        replace(
            _OURS[f"everystop_{ours}"], name=PREFIX + name, text=f"everystop_{ours}, as vLLM calls it", bounds=bounds
        )
        for name, ours, bounds in ALIASES
    ),
    Family(
        name=PREFIX + "cache_config_info",
        kind=Kind.GAUGE,
        text="The KV cache, as vLLM tells of it",
        source="start-up",
        read=lambda metrics: [((str(metrics.block_size), str(metrics.num_blocks)), 1.0)],
        labels=("block_size", "num_gpu_blocks"),
    ),
    Family(
        name=PREFIX + "num_requests_swapped",
        kind=Kind.GAUGE,
        text="Always 0: nothing is swapped here, what is preempted is computed again",
        source="none",
        read=alone(lambda metrics: 0.0),
    ),
)
