"""Every metric that is counted from the engine's events, under this project's names; docs/metrics.md is made of it.

Names carry base units; labels have few values, all of them known before: never the id of a request, nor a name that a
client chose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from everystop.core.durations import NS_PER_S
from everystop.observe.families import Family, Kind, Value, alone, each
from everystop.observe.metrics import Metrics, TenantCounts

Read = Callable[[Metrics], Value]


def _gauge(name: str, text: str, source: str, read: Read) -> Family[Metrics]:
    return Family(name=f"everystop_{name}", kind=Kind.GAUGE, text=text, source=source, read=alone(read))


def _counter(name: str, text: str, source: str, read: Read) -> Family[Metrics]:
    return Family(name=f"everystop_{name}_total", kind=Kind.COUNTER, text=text, source=source, read=alone(read))


def _counters(
    name: str, label: str, text: str, source: str, read: Callable[[Metrics], Mapping[str, Value]]
) -> Family[Metrics]:
    return Family(
        name=f"everystop_{name}_total",
        kind=Kind.COUNTER,
        text=text,
        source=source,
        read=each(read),
        labels=(label,),
    )


def _histogram(name: str, text: str, source: str, read: Read) -> Family[Metrics]:
    return Family(name=f"everystop_{name}", kind=Kind.HISTOGRAM, text=text, source=source, read=alone(read))


def _tenant(name: str, kind: Kind, text: str, source: str, read: Callable[[TenantCounts], Value]) -> Family[Metrics]:
    return Family(
        name=f"everystop_tenant_{name}",
        kind=kind,
        text=text,
        source=source,
        read=each(lambda m: {tenant: read(counts) for tenant, counts in m.tenants.items()}),
        labels=("tenant",),
    )


GAUGES: tuple[Family[Metrics], ...] = (
    _gauge("num_requests_running", "Requests that hold a slot", "admit, preempt, finish", lambda m: m.num_running),
    _gauge(
        "num_requests_waiting",
        "Requests that have arrived and do not run",
        "arrival, admit, preempt, finish",
        lambda m: m.num_waiting,
    ),
    _gauge(
        "kv_cache_usage_perc",
        "Share of the KV blocks held by requests, 0 to 1",
        "step, finish",
        lambda m: m.kv_usage,
    ),
    _gauge("kv_cache_blocks", "Blocks of the KV cache", "start-up", lambda m: m.num_blocks),
    Family(
        name="everystop_kv_blocks",
        kind=Kind.GAUGE,
        text="Blocks of the KV cache that requests hold (used), that only a prefix may match (cached), and blank ones",
        source="step, finish",
        read=each(lambda m: m.kv_blocks),
        labels=("state",),
    ),
    _gauge(
        "slot_occupancy_ratio",
        "Share of the slots that computed something for a request in the last step; 0 when nobody is there",
        "step, finish",
        lambda m: m.occupancy,
    ),
    _gauge("slots", "Slots, as --max-num-seqs says", "start-up", lambda m: m.steps.num_slots),
    _gauge(
        "step_target_seconds",
        "Latest target on the time of a step, 0 if there was none; under deadline it varies",
        "step",
        lambda m: m.steps.target_s,
    ),
)

COUNTERS: tuple[Family[Metrics], ...] = (
    _counter("prompt_tokens", "Prompt tokens of requests taken", "arrival", lambda m: m.num_prompt_tokens),
    _counter(
        "computed_prompt_tokens",
        "Prompt tokens computed, again after a preemption",
        "step",
        lambda m: m.num_computed_prompt_tokens,
    ),
    _counter("generation_tokens", "Tokens generated", "step", lambda m: m.num_generation_tokens),
    _counter("num_preemptions", "Preemptions", "preempt", lambda m: m.num_preemptions),
    _counter("preempted_tokens", "Computed tokens lost by preemptions", "preempt", lambda m: m.num_preempted_tokens),
    _counter(
        "recomputed_tokens", "Tokens computed again after a preemption", "step", lambda m: m.num_recomputed_tokens
    ),
    _counter(
        "restored_tokens",
        "Tokens that resumed requests found in the prefix cache; no prefix_cache_hits",
        "admit",
        lambda m: m.num_restored_tokens,
    ),
    _counter("prefix_cache_queries", "Tokens looked up in the prefix cache", "admit", lambda m: m.num_prefix_queries),
    _counter("prefix_cache_hits", "Tokens taken from the prefix cache", "admit, finish", lambda m: m.num_prefix_hits),
    _counter("evicted_blocks", "Cached KV blocks given to others", "step", lambda m: m.num_evicted_blocks),
    _counter("steps", "Steps that computed something", "step", lambda m: m.num_steps),
    _counter(
        "steps_over_target",
        "Steps planned although predicted to exceed their target, which was out of reach",
        "step",
        lambda m: m.steps.num_over_target,
    ),
    _counters(
        "slot_steps",
        "state",
        "Slots times steps, by what the slot did in the step",
        "step, finish",
        lambda m: m.steps.slots,
    ),
    _counters(
        "request_success",
        "finished_reason",
        "Requests that ended, by reason",
        "finish",
        lambda m: m.finished,
    ),
    _counters("requests_refused", "error", "Requests that the engine refused, by error", "refuse", lambda m: m.refused),
    _counters(
        "admission_blocked",
        "reason",
        "Times that a reason came up for which nobody, or not the one who was next, could board",
        "wait",
        lambda m: m.blocked,
    ),
    _counters(
        "request_blame_seconds",
        "cause",
        "Time of requests that were answered, by its cause; others' prefill is a modelled share",
        "all events, at the end of an answer",
        lambda m: {cause.value: ns / NS_PER_S for cause, ns in m.blame_ns.items()},
    ),
    _counters(
        "request_blame_requests",
        "result",
        "Answers whose time is in request_blame_seconds_total, and those left out, since working it out costs time",
        "the end of an answer",
        lambda m: {"explained": m.num_explained, "left_out": m.num_unexplained},
    ),
    _counter(
        "metrics_failures", "Lists of events that could not be counted", "a fault of ours", lambda m: m.num_failures
    ),
)

HISTOGRAMS: tuple[Family[Metrics], ...] = (
    _histogram(
        "time_to_first_token_seconds",
        "Last byte of the request read to first token computed",
        "arrival, step",
        lambda m: m.requests.ttft,
    ),
    _histogram("inter_token_latency_seconds", "Gap between two tokens of a request", "step", lambda m: m.requests.itl),
    _histogram(
        "request_time_per_output_token_seconds",
        "First to last token, divided by the tokens after the first",
        "step, finish",
        lambda m: m.requests.time_per_output_token,
    ),
    _histogram(
        "e2e_request_latency_seconds",
        "Last byte of the request read to its end in the engine; only requests that came to their end",
        "arrival, finish",
        lambda m: m.requests.e2e,
    ),
    _histogram(
        "request_queue_time_seconds",
        "Handed to the engine to first admission",
        "arrival, admit",
        lambda m: m.requests.queue_time,
    ),
    _histogram(
        "request_prefill_time_seconds",
        "First admission to first token",
        "admit, step, finish",
        lambda m: m.requests.prefill_time,
    ),
    _histogram("request_decode_time_seconds", "First to last token", "step, finish", lambda m: m.requests.decode_time),
    _histogram(
        "request_inference_time_seconds",
        "First admission to last token",
        "admit, step, finish",
        lambda m: m.requests.inference_time,
    ),
    _histogram("request_prompt_tokens", "Length of a prompt", "arrival, finish", lambda m: m.requests.prompt_tokens),
    _histogram(
        "request_computed_prompt_tokens",
        "Prompt tokens that did not come from the prefix cache",
        "finish",
        lambda m: m.requests.computed_prompt_tokens,
    ),
    _histogram("request_generation_tokens", "Tokens of an answer", "finish", lambda m: m.requests.generation_tokens),
    _histogram(
        "request_longest_generation_tokens",
        "Tokens of the longest answer to one prompt",
        "finish",
        lambda m: m.requests.longest_generation_tokens,
    ),
    _histogram(
        "request_params_max_tokens",
        "Most tokens that a request may get, by its own limit or the model's",
        "arrival, finish",
        lambda m: m.requests.max_tokens,
    ),
    _histogram("request_params_n", "Choices of a prompt", "arrival, finish", lambda m: m.requests.num_choices),
    _histogram(
        "request_num_preemptions", "How often a request lost its place", "finish", lambda m: m.requests.num_preemptions
    ),
    _histogram("step_seconds", "Execution of one step", "step", lambda m: m.steps.execute_time),
    _histogram(
        "iteration_seconds",
        "One step from its planning, or the return of the one before, to its own return",
        "step",
        lambda m: m.steps.whole_time,
    ),
    _histogram("step_tokens", "Tokens computed in one step", "step", lambda m: m.steps.tokens),
    Family(
        name="everystop_iteration_tokens",
        kind=Kind.HISTOGRAM,
        text="Tokens of one step: prompts and what is computed again (prefill), and single ones that sample (decode)",
        source="step",
        read=each(lambda m: {"prefill": m.steps.prefill_tokens, "decode": m.steps.decode_tokens}),
        labels=("phase",),
    ),
)

TENANTS: tuple[Family[Metrics], ...] = (
    Family(
        name="everystop_tenant_num_requests_running",
        kind=Kind.GAUGE,
        text="Requests that hold a slot",
        source="admit, preempt, finish",
        read=each(lambda m: m.num_by_tenant(is_running=True)),
        labels=("tenant",),
    ),
    Family(
        name="everystop_tenant_num_requests_waiting",
        kind=Kind.GAUGE,
        text="Requests that have arrived and do not run",
        source="arrival, admit, preempt, finish",
        read=each(lambda m: m.num_by_tenant(is_running=False)),
        labels=("tenant",),
    ),
    _tenant(
        "prompt_tokens_total",
        Kind.COUNTER,
        "Prompt tokens of requests that brought a token",
        "arrival, step",
        lambda counts: counts.num_prompt_tokens,
    ),
    _tenant(
        "generation_tokens_total",
        Kind.COUNTER,
        "Tokens generated",
        "step",
        lambda counts: counts.num_generation_tokens,
    ),
    _tenant(
        "requests_refused_total",
        Kind.COUNTER,
        "Requests that the engine refused",
        "refuse",
        lambda counts: counts.num_refused,
    ),
    _tenant(
        "time_to_first_token_seconds",
        Kind.HISTOGRAM,
        "Last byte of the request read to first token computed",
        "arrival, step",
        lambda counts: counts.ttft,
    ),
)
"""Only where `--tenants` names any."""

FAMILIES = (*GAUGES, *COUNTERS, *HISTOGRAMS, *TENANTS)
