"""Writes deploy/grafana/everystop.json anew: the Grafana dashboard, from the panels listed here.

python -m tools.grafana
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

TARGET = Path(__file__).parent.parent / "deploy" / "grafana" / "everystop.json"
WIDTH = 24
OURS = 'model_name=~"$model_name",instance=~"$instance"'
HERE = 'instance=~"$instance"'
RANGE = "[$__rate_interval]"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SECONDS, SHARE, PER_S, BYTES, COUNT = "s", "percentunit", "ops", "bytes", "short"


class Query(NamedTuple):
    """An expression and what its lines are called."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """One chart, eight wide unless said otherwise."""

    title: str
    text: str
    unit: str
    queries: tuple[Query, ...]
    is_stacked: bool = False
    kind: str = "timeseries"
    width: int = 8


def rate(metric: str, labels: str = OURS) -> str:
    """A counter's increase a second."""
    return f"rate({metric}{{{labels}}}{RANGE})"


def total(metric: str, by: str = "", labels: str = OURS) -> str:
    """The sum over servers of a counter's increase a second."""
    return f"sum{f' by ({by})' if by else ''} ({rate(metric, labels)})"


def quantile(share: float, histogram: str, labels: str = OURS, by: str = "") -> str:
    """A quantile over all servers."""
    groups = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {total(histogram + '_bucket', groups, labels)})"


def latency(title: str, histogram: str, text: str) -> Panel:
    """Three quantiles of a histogram, and its mean."""
    queries = [Query(quantile(share, histogram), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99)]
    mean = f"{total(histogram + '_sum')} / {total(histogram + '_count')}"
    return Panel(title, text, SECONDS, (*queries, Query(mean, "mean")))


def share_of(part: str, whole: str) -> str:
    """One rate over another; nothing where nothing happens."""
    return f"{part} / ({whole} > 0)"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Now",
        (
            Panel(
                "Requests on board and waiting",
                "Those that hold a slot, and those that do not yet, or not any more",
                COUNT,
                (
                    Query(f"sum (everystop_num_requests_running{{{OURS}}})", "running"),
                    Query(f"sum (everystop_num_requests_waiting{{{OURS}}})", "waiting"),
                    Query(f"sum (everystop_slots{{{OURS}}})", "slots"),
                ),
            ),
            Panel(
                "Tokens a second",
                "Prompt tokens computed (hits in the prefix cache are not) and tokens generated",
                COUNT,
                (
                    Query(total("everystop_generation_tokens_total"), "generated"),
                    Query(total("everystop_computed_prompt_tokens_total"), "prompt, computed"),
                    Query(total("everystop_prefix_cache_hits_total"), "prompt, from the cache"),
                ),
            ),
            Panel(
                "Ends a second",
                "Requests by how they ended",
                PER_S,
                (Query(total("everystop_request_success_total", "finished_reason"), "{{finished_reason}}"),),
                is_stacked=True,
            ),
        ),
    ),
    (
        "Latency",
        (
            latency(
                "Time to first token",
                "everystop_time_to_first_token_seconds",
                "From the last byte of the request to its first token",
            ),
            latency(
                "Time between tokens", "everystop_inter_token_latency_seconds", "Gaps between tokens of one request"
            ),
            latency(
                "Whole request",
                "everystop_e2e_request_latency_seconds",
                "From the last byte of the request to its last token; aborts left out",
            ),
            latency(
                "Time in the queue",
                "everystop_request_queue_time_seconds",
                "From the hand-over to the engine to the first slot",
            ),
            latency(
                "Time of prefill", "everystop_request_prefill_time_seconds", "From the first slot to the first token"
            ),
            Panel(
                "Where the time goes",
                "Seconds a second of all answered requests, by cause; others' prefill is a modelled share",
                SECONDS,
                (Query(total("everystop_request_blame_seconds_total", "cause"), "{{cause}}"),),
                is_stacked=True,
            ),
        ),
    ),
    (
        "Scheduler",
        (
            Panel(
                "What the slots do",
                "Share of slot-steps by state: idle and held slots are what batching could still use",
                SHARE,
                (
                    Query(
                        f"{total('everystop_slot_steps_total', 'state')} / ignoring (state) group_left () "
                        f"({total('everystop_slot_steps_total')} > 0)",
                        "{{state}}",
                    ),
                ),
                is_stacked=True,
            ),
            Panel(
                "Time of a step",
                "Execution alone, and with planning and hand-over",
                SECONDS,
                (
                    Query(quantile(0.5, "everystop_step_seconds"), "executed, p50"),
                    Query(quantile(0.99, "everystop_step_seconds"), "executed, p99"),
                    Query(quantile(0.5, "everystop_iteration_seconds"), "whole, p50"),
                    Query(quantile(0.99, "everystop_iteration_seconds"), "whole, p99"),
                ),
            ),
            Panel(
                "Tokens of a step",
                "Mean number of tokens computed in one step, by phase",
                COUNT,
                (
                    Query(
                        f"{total('everystop_iteration_tokens_sum', 'phase')}"
                        f" / {total('everystop_iteration_tokens_count', 'phase')}",
                        "{{phase}}",
                    ),
                ),
                is_stacked=True,
            ),
            Panel(
                "Why nobody boards",
                "How often each reason came up, a second",
                PER_S,
                (Query(total("everystop_admission_blocked_total", "reason"), "{{reason}}"),),
                is_stacked=True,
                width=6,
            ),
            Panel(
                "Oldest that waits",
                "How long the oldest has been waiting that has not boarded yet",
                SECONDS,
                (Query(f"max by (instance) (everystop_oldest_waiting_seconds{{{OURS}}})", "{{instance}}"),),
                width=6,
            ),
            Panel(
                "Preemptions",
                "Requests that lost their place, a second",
                PER_S,
                (Query(total("everystop_num_preemptions_total"), "preemptions"),),
                width=6,
            ),
            Panel(
                "Tokens computed again",
                "What preemptions cost, a second",
                COUNT,
                (Query(total("everystop_recomputed_tokens_total"), "computed again"),),
                width=6,
            ),
        ),
    ),
    (
        "KV cache",
        (
            Panel(
                "Blocks",
                "Held by requests, kept for a prefix to match (not a leak: given away when needed), and blank",
                COUNT,
                (Query(f"sum by (state) (everystop_kv_blocks{{{OURS}}})", "{{state}}"),),
                is_stacked=True,
            ),
            Panel(
                "Share held by requests",
                "At 1 somebody is preempted",
                SHARE,
                (Query(f"max by (instance) (everystop_kv_cache_usage_perc{{{OURS}}})", "{{instance}}"),),
            ),
            Panel(
                "Hits in the prefix cache",
                "Share of the prompt tokens looked up",
                SHARE,
                (
                    Query(
                        share_of(
                            total("everystop_prefix_cache_hits_total"), total("everystop_prefix_cache_queries_total")
                        ),
                        "hits",
                    ),
                ),
            ),
        ),
    ),
    (
        "Where the time of a step goes",
        (
            Panel(
                "Engine's thread",
                "Its time but sleep, by what it did; 1 is a thread that is never idle",
                COUNT,
                (Query(total("everystop_step_part_seconds_total", "part"), "{{part}}"),),
                is_stacked=True,
            ),
            Panel(
                "Outside the kernels",
                "Share of the engine's thread that is not the native call",
                SHARE,
                (
                    Query(
                        "1 - "
                        + share_of(
                            total("everystop_step_part_seconds_total", labels=f'{OURS},part="native"'),
                            total("everystop_step_part_seconds_total"),
                        ),
                        "all servers",
                    ),
                ),
            ),
            Panel(
                "Event loop's thread",
                "From a step's outputs to their last write, by what it did",
                COUNT,
                (Query(total("everystop_delivery_part_seconds_total", "part"), "{{part}}"),),
                is_stacked=True,
            ),
        ),
    ),
    (
        "Edge",
        (
            Panel(
                "HTTP answers a second",
                "By route and status",
                PER_S,
                (Query(total("http_requests_total", "handler, status", HERE), "{{handler}} {{status}}"),),
            ),
            Panel(
                "Refusals and errors a second",
                "By the name of the error",
                PER_S,
                (Query(total("everystop_http_errors_total", "error"), "{{error}}"),),
                is_stacked=True,
            ),
            Panel(
                "Ended before their time",
                "By the error behind it; ClientGone is a client that left",
                PER_S,
                (Query(total("everystop_requests_aborted_total", "error"), "{{error}}"),),
                is_stacked=True,
            ),
        ),
    ),
    (
        "Tenants",
        (
            Panel(
                "Time to first token, p95",
                "Only with --tenants",
                SECONDS,
                (Query(quantile(0.95, "everystop_tenant_time_to_first_token_seconds", by="tenant"), "{{tenant}}"),),
            ),
            Panel(
                "Tokens a second",
                "Generated, only with --tenants",
                COUNT,
                (Query(total("everystop_tenant_generation_tokens_total", "tenant"), "{{tenant}}"),),
                is_stacked=True,
            ),
            Panel(
                "Waiting",
                "Only with --tenants",
                COUNT,
                (Query(f"sum by (tenant) (everystop_tenant_num_requests_waiting{{{OURS}}})", "{{tenant}}"),),
                is_stacked=True,
            ),
        ),
    ),
    (
        "Process",
        (
            Panel("CPU", "Cores in use", COUNT, (Query(rate("process_cpu_seconds_total", HERE), "{{instance}}"),)),
            Panel(
                "Memory",
                "Resident",
                BYTES,
                (Query(f"process_resident_memory_bytes{{{HERE}}}", "{{instance}}"),),
            ),
            Panel(
                "Open files",
                "Each client takes one",
                COUNT,
                (
                    Query(f"process_open_fds{{{HERE}}}", "{{instance}}"),
                    Query(f"process_max_fds{{{HERE}}}", "limit of {{instance}}"),
                ),
            ),
        ),
    ),
)


def panels() -> list[dict[str, Any]]:
    """All rows and their panels, placed from left to right."""
    made: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        place = {"h": 1, "w": WIDTH, "x": 0, "y": y}
        made.append(
            {"id": len(made) + 1, "type": "row", "title": title, "gridPos": place, "collapsed": False, "panels": []}
        )
        y, x = y + 1, 0
        for panel in row:
            made.append(chart(panel, len(made) + 1, {"h": 8, "w": panel.width, "x": x, "y": y}))
            x += panel.width
            if x >= WIDTH:
                x, y = 0, y + 8
        y += 8 if x else 0
    return made


def chart(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    """One panel as Grafana keeps it."""
    stacking = {"mode": "normal" if panel.is_stacked else "none", "group": "A"}
    custom = {"fillOpacity": 40 if panel.is_stacked else 5, "lineWidth": 1, "showPoints": "never", "stacking": stacking}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
                "editorMode": "code",
                "range": True,
            }
            for i, query in enumerate(panel.queries)
        ],
    }


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    """A choice of label values, all of them by default."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": query,
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
        "sort": 1,
    }


def dashboard() -> dict[str, Any]:
    """The whole file."""
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1}
    return {
        "uid": "everystop",
        "title": "Everystop",
        "description": "Who is on board, who waits and why, and where the time goes",
        "tags": ["everystop", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                source,
                variable("model_name", "Model", "label_values(everystop_num_requests_running, model_name)"),
                variable("instance", "Server", "label_values(everystop_num_requests_running, instance)"),
            ]
        },
        "annotations": {"list": []},
        "panels": panels(),
    }


def text() -> str:
    """The file as it is written."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
