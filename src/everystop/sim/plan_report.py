"""What `plan` finds, as plain data, in words, and as flags for `serve`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from everystop.core.durations import NS_PER_MS
from everystop.sim.planner import SECONDS_PER_HOUR, TOKENS_PER_PRICE, TOLERANCE, Carried, Plan, Scout
from everystop.sim.probe import WARM_UP_SHARE, Point
from everystop.sim.report import several
from everystop.words import in_time

MISSES = {"ttft": "TTFT", "itl": "ITL", "overload": "queue"}


def plan_figures(plan: Plan, *, trace: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A plan as plain data. `trace` says what was read; `given` are the settings of the server that were not left at
    their defaults, by their names in the configuration.
    """
    question = plan.question
    figures: dict[str, Any] = {
        "answer": {},
        "wanted_rate": plan.rate,
        "target": asdict(question.target),
        "price": None if question.price is None else asdict(question.price),
        "trace": {**trace, "num_requests": plan.workload.num_requests, "rate": round(plan.workload.rate, 6)},
        "method": {
            "num_requests": Scout(question, plan.workload).num_requests,
            "warm_up_share": WARM_UP_SHARE,
            "rate_tolerance": round(TOLERANCE - 1, 6),
        },
        "setup": plan.setup.as_data(),
        "rates": plan.rates,
        "replicas": [_carried_figures(plan, carried) for carried in plan.carried],
        "points": [_point_figures(plan, point) for point in plan.points],
        "as_given": None if plan.best_as_given is None else _point_figures(plan, plan.best_as_given),
        "recommended": None if plan.chosen is None else recommended(plan, given),
    }
    best = None if plan.best is None else {**_point_figures(plan, plan.best), "cliff": round(plan.cliff, 6)}
    figures["answer"] = {"is_met": plan.chosen is not None, "best": best}
    figures["answer"]["sentences"] = _answer(figures)
    return figures


def _point_figures(plan: Plan, point: Point) -> dict[str, Any]:
    """A point with what it costs; of an unstable one only why it is."""
    if not point.is_stable:
        return {"rate": point.rate, "num_replicas": point.num_replicas, "is_stable": False, "reason": point.reason}
    figures = asdict(point)
    del figures["reason"]
    return {**figures, "missed": list(point.missed), "is_stable": True, **_cost(plan, point)}


def _cost(plan: Plan, point: Point) -> dict[str, float]:
    price = plan.question.price
    if price is None:
        return {}
    per_hour = price.per_hour * point.num_replicas
    cost = {"cost_per_hour": round(per_hour, 6)}
    if point.output_tokens_per_s:
        per_token = per_hour / SECONDS_PER_HOUR / point.output_tokens_per_s
        cost["cost_per_million_output_tokens"] = round(per_token * TOKENS_PER_PRICE, 6)
    return cost


def _carried_figures(plan: Plan, carried: Carried) -> dict[str, Any]:
    return {
        "num_replicas": carried.num_replicas,
        "highest_rate": carried.rate,
        "next_misses": list(carried.limit),
        "cliff": round(carried.cliff, 6),
        "at_highest_rate": None if carried.point is None else _point_figures(plan, carried.point),
        "nearly_idle": None if carried.nearly_idle is None else _point_figures(plan, carried.nearly_idle),
    }


# --- flags ---------------------------------------------------------------------------------------------------------


def recommended(plan: Plan, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fewest replicas, their router, and the settings of each server by their names in the configuration."""
    searched = _searched(asdict(plan.tuned.limits))
    serve = {**given, **searched}
    return {
        "searched": searched,
        "replicas": plan.tuned.num_replicas,
        "router": plan.setup.router,
        "serve": serve,
        "command": serve_command(serve),
    }


def _searched(limits: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are searched, as the configuration has them."""
    settings = {name: limits[name] for name in ("max_num_seqs", "max_num_batched_tokens")}
    if limits["target_itl_ns"] is not None:
        settings["target_itl_ms"] = limits["target_itl_ns"] / NS_PER_MS
    return settings


def serve_command(serve: Mapping[str, Any]) -> str:
    """The line that starts one such server."""
    words = ["everystop", "serve"]
    for name, value in serve.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", shlex.quote(str(value))]
    return " ".join(words)


def as_yaml(figures: Mapping[str, Any]) -> str:
    """The recommended flags as YAML; the comments say what they promise."""
    advice = figures["recommended"]
    lines = [*_comment(figures), f"replicas: {advice['replicas']}", f"router: {advice['router']}", "serve:"]
    return "\n".join([*lines, *(f"  {name}: {_scalar(value)}" for name, value in advice["serve"].items())]) + "\n"


def as_toml(figures: Mapping[str, Any]) -> str:
    """The same for one server, as `everystop serve --config` reads it."""
    serve = figures["recommended"]["serve"]
    lines = [f"{name.replace('_', '-')} = {_scalar(value)}" for name, value in serve.items()]
    return "\n".join([*_comment(figures), *lines]) + "\n"


def _comment(figures: Mapping[str, Any]) -> list[str]:
    setup = figures["setup"]
    lines = [
        *figures["answer"]["sentences"],
        f"Trace: {figures['trace']['file']}; step times: {source(figures)}",
        f"Simulated with a KV cache of {setup['num_blocks']:,} blocks of {setup['block_size']} tokens in each replica.",
        figures["recommended"]["command"],
    ]
    return [f"# {' '.join(line.split())}" for line in lines]


def _scalar(value: Any) -> str:
    """A setting as both YAML and TOML write it: settings are numbers, truth values and text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


# --- words ---------------------------------------------------------------------------------------------------------


def _answer(figures: Mapping[str, Any]) -> list[str]:
    """The answer in one to three sentences."""
    target, best = figures["target"], figures["answer"]["best"]
    rate = f"{figures['wanted_rate']:.4g} requests/s"
    if not figures["answer"]["is_met"]:
        return _refusal(figures, rate)
    num = best["num_replicas"]
    sentences = [
        f"{several(num, 'replica')} {'carries' if num == 1 else 'carry'} {rate}: {_durations(best, target)}; "
        f"the queue grows without bound from {best['cliff']:.4g} requests/s."
    ]
    sentences += _cost_sentence(figures, best)
    return sentences + _flags_sentence(figures)


def _durations(point: Mapping[str, Any], target: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name.upper()} p95 {of_ms(point[f'{name}_ms']['p95'])} (target {of_ms(target[f'{name}_p95_ms'])})"
        for name in ("ttft", "itl")
    )


def _refusal(figures: Mapping[str, Any], rate: str) -> list[str]:
    """Nothing carries the rate: what comes nearest, and what could be changed."""
    target, best, last = figures["target"], figures["answer"]["best"], figures["replicas"][-1]
    most = several(last["num_replicas"], "replica")
    sentences = [
        f"No number of replicas that was tried, up to {last['num_replicas']}, carries {rate} within TTFT p95 "
        f"{of_ms(target['ttft_p95_ms'])} and ITL p95 {of_ms(target['itl_p95_ms'])}."
    ]
    if best is None:
        sentences.append(f"{most} serve at most {last['cliff']:.4g} requests/s; allow more --replicas or lower --rate.")
        return sentences
    sentences.append(f"The nearest: {several(best['num_replicas'], 'replica')}, {_durations(best, target)}.")
    idle = last["nearly_idle"]
    if idle is not None and idle["missed"]:
        sentences.append(
            f"Nor would more replicas: at {idle['rate']:.4g} requests/s, nearly idle, {most} "
            f"{'has' if last['num_replicas'] == 1 else 'have'} {_durations(idle, target)}."
        )
    else:
        sentences.append("Allow more --replicas, lower --rate, or raise the target.")
    return sentences


def _cost_sentence(figures: Mapping[str, Any], point: Mapping[str, Any]) -> list[str]:
    if figures["price"] is None:
        return []
    currency = figures["price"]["currency"]
    return [
        f"That costs {point['cost_per_hour']:,.2f} {currency} an hour, "
        f"{point['cost_per_million_output_tokens']:,.4g} {currency} for a million output tokens."
    ]


def _flags_sentence(figures: Mapping[str, Any]) -> list[str]:
    """Which flags were changed, and what those given would do."""
    before, given = _searched(figures["setup"]["limits"]), figures["as_given"]
    changed = {name: num for name, num in figures["recommended"]["searched"].items() if num != before.get(name)}
    if not changed:
        return []
    flags = " ".join(f"--{name.replace('_', '-')} {num:g}" for name, num in changed.items())
    if given is None:
        return [f"This is with {flags}; with the flags as given the queue grows without bound."]
    outcome = f"{several(given['num_replicas'], 'replica')}, {_durations(given, figures['target'])}"
    return [f"This is with {flags}; with the flags as given: {outcome}{', which misses' if given['missed'] else ''}."]


def describe_plan(figures: Mapping[str, Any]) -> str:
    """The answer, then the table, then how it was found; one screen."""
    trace, method, setup = figures["trace"], figures["method"], figures["setup"]
    lines = [
        *figures["answer"]["sentences"],
        "",
        *_table(figures),
        "",
        f"{trace['file']}: {trace['num_requests']:,} requests, {trace['rate']:.4g} requests/s; "
        f"policy {setup['policy']}, router {setup['router']}; step times: {source(figures)}",
        f"{method['num_requests']:,} requests in each simulation, the first {method['warm_up_share']:.0%} not "
        f"counted; highest rates within {method['rate_tolerance']:.0%}",
        *_warnings(figures),
    ]
    if figures["recommended"] is not None:
        lines += ["", figures["recommended"]["command"]]
    return "\n".join(lines)


def _table(figures: Mapping[str, Any]) -> list[str]:
    """A line for each number of replicas, with the flags as given."""
    price = figures["price"]
    wanted = {point["num_replicas"]: point for point in figures["points"] if point["rate"] == figures["wanted_rate"]}
    at = f"at {figures['wanted_rate']:.4g}/s:"
    head = f"{'replicas':>8}{'carry req/s':>13}{'then':>7}{'cliff':>9}{at + ' TTFT p95':>24}{'ITL p95':>10}{'load':>7}"
    if price is not None:
        head += f"{price['currency'] + '/h':>10}{price['currency'] + '/1M tokens':>16}"
    lines = [head]
    for carried in figures["replicas"]:
        point = wanted[carried["num_replicas"]]
        line = (
            f"{carried['num_replicas']:>8}{carried['highest_rate']:>13.4g}{_then(carried):>7}{carried['cliff']:>9.4g}"
        )
        if point["is_stable"]:
            line += f"{of_ms(point['ttft_ms']['p95']):>24}{of_ms(point['itl_ms']['p95']):>10}"
        else:
            line += f"{'queue grows':>24}{'':>10}"
        line += f"{figures['wanted_rate'] / carried['cliff']:>7.0%}"
        if price is not None:
            at_most = carried["at_highest_rate"] or {}
            per_million = at_most.get("cost_per_million_output_tokens")
            line += f"{price['per_hour'] * carried['num_replicas']:>10,.2f}"
            line += f"{'-' if per_million is None else format(per_million, ',.4g'):>16}"
        lines.append(line)
    return lines


def _then(carried: Mapping[str, Any]) -> str:
    """What the next higher rate misses."""
    return "+".join(MISSES[name] for name in carried["next_misses"])


def _warnings(figures: Mapping[str, Any]) -> list[str]:
    refused = max((point.get("num_refused", 0) for point in figures["points"]), default=0)
    if not refused:
        return []
    limit = figures["setup"]["limits"]["max_model_len"]
    return [
        f"warning: up to {refused:,} requests of a point are longer than {limit:,} tokens and were refused; they count "
        "for nothing"
    ]


def source(figures: Mapping[str, Any]) -> str:
    """Where the step times come from."""
    return str(figures["setup"]["cost"]["source"] or "no source given")


def of_ms(ms: float) -> str:
    """A duration to three digits. Examples: 41.2 ms, 410 ms, 12.3 s."""
    return in_time(ms / 1000, is_said=True)
