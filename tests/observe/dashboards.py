"""What dashboards and rules ask for: those made for vLLM, by their names, and our own, by their files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

DEPLOY = Path(__file__).parent.parent.parent / "deploy"

# What the panels of vLLM's own Grafana dashboards query, in the old spelling and the new one.
VLLM_QUERIES = (
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:time_per_output_token_seconds_sum",
    "vllm:time_per_output_token_seconds_count",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:inter_token_latency_seconds_count",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_swapped",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_sum",
    "vllm:time_to_first_token_seconds_count",
    "vllm:gpu_cache_usage_perc",
    "vllm:kv_cache_usage_perc",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_success_total",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_inference_time_seconds_sum",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:iteration_tokens_total_sum",
    "vllm:request_params_n_sum",
    "vllm:request_params_max_tokens_sum",
    "vllm:cache_config_info",
)

KEYWORDS = {
    "abs", "and", "avg", "avg_over_time", "bool", "by", "clamp_max", "clamp_min", "count", "group_left", "group_right",
    "histogram_quantile", "ignoring", "increase", "label_replace", "max", "max_over_time", "min", "offset", "on", "or",
    "rate", "sum", "time", "topk", "unless", "vector", "without", "absent",
}  # fmt: skip


def names_in(expression: str) -> set[str]:
    """The metrics that a PromQL expression names: words that are no functions, outside of labels and durations."""
    text = re.sub(r'"[^"]*"', "", expression)
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", text)
    text = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", text)
    return {word for word in re.findall(r"[A-Za-z_:][A-Za-z0-9_:]*", text) if word not in KEYWORDS}


def rule_groups(name: str) -> list[dict]:
    """The groups of one of our files of rules."""
    groups: list[dict] = yaml.safe_load((DEPLOY / "prometheus" / name).read_text(encoding="utf-8"))["groups"]
    return groups


def dashboard() -> dict:
    """Our Grafana dashboard."""
    found: dict = json.loads((DEPLOY / "grafana" / "everystop.json").read_text(encoding="utf-8"))
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """(where it stands, expression) of all that our dashboard, rules and alerts ask."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["query"].removeprefix("label_values(").partition(",")[0]
    for name in ("rules.yml", "alerts.yml"):
        for group in rule_groups(name):
            for rule in group["rules"]:
                yield f"{name} {rule.get('alert') or rule.get('record')}", rule["expr"]


def recorded() -> set[str]:
    """What our recording rules make."""
    return {rule["record"] for group in rule_groups("rules.yml") for rule in group["rules"]}
