"""What the runs say: medians and ranges, each peer's best, ratios of neighbours in a turn, and what must be objected.

A ratio is taken within a turn, ours over the peer's, so that a machine that was slow for a while was so for both. Where
other work took processors, ratios of clock time mean little, since threads that wait for each other lose more by it
than threads that do not; tokens a second of the server's own processor time are given beside them, and are no proof
either, for a server that spins burns time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.peers.loads import NUM_COMPARED
from benchmarks.peers.peer import NUM_THREADS, Peer
from benchmarks.peers.records import Record, best_setting, is_good

OURS, OUR_SETTING = "everystop", "int8"
LEAST_EVENTS = 0.95
QUIET_SHARE = 0.05
TARGETS = {
    ("chat", "openvino"): 3.0,
    ("chat", "llama.cpp"): 8.0,
    ("chat", "vllm"): 5.0,
    ("single", "openvino"): 2.5,
    ("single", "llama.cpp"): 2.0,
    ("straggler", "openvino"): 3.0,
    ("uniform", "openvino"): 2.0,
    ("prefill", "openvino"): 1.7,
}
"""How many times a peer's best output tokens a second ours are to be, by workload and peer."""

FIGURES = (
    ("output tok/s", "output_tok_s", 0),
    ("wall s", "wall_s", 1),
    ("TTFT p50 ms", "ttft_p50_ms", 0),
    ("TTFT p95 ms", "ttft_p95_ms", 0),
    ("ITL p50 ms", "itl_p50_ms", 1),
    ("ITL p99 ms", "itl_p99_ms", 0),
    ("events a token", "events_per_token", 2),
    ("server CPU s", "server_cpu_s", 1),
)
Spread = dict[str, Any]


def spread(values: Sequence[float]) -> Spread:
    """Median, least, most, and how many."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "runs": len(values)}


def summarise(all_records: Sequence[Record], peers: Sequence[Peer]) -> dict[str, Any]:
    """Everything that tables and charts show, as plain data."""
    runs = [record for record in all_records if record["kind"] not in ("failure", "limits")]
    workloads = {name: _workload(runs, name, peers) for name in _names(runs, "workload")}
    others = spread([record["figures"]["others_share"] for record in runs]) if runs else None
    return {
        "machine": next((record["machine"] for record in all_records if "machine" in record), {}),
        "versions": {record["peer"]: record["version"] for record in runs if "version" in record},
        "others_share": others,
        "workloads": workloads,
        "targets": list(_targets(workloads, is_quiet=others is not None and others["most"] <= QUIET_SHARE)),
        "sweep": _sweep(runs),
        "answers": _answers(runs),
        "clients": _curve(runs, "clients", "output_tok_s", peers),
        "context": {
            "itl_ms": _curve(runs, "context", "itl_p50_ms", peers),
            "ttft_ms": _curve(runs, "context", "ttft_p50_ms", peers),
        },
        "rows": _curve(runs, "rows", "step_ms", peers),
        "limits": next((record["figures"] for record in reversed(all_records) if record["kind"] == "limits"), None),
        "failures": [_failure(record) for record in all_records if record["kind"] == "failure"],
        "objections": list(objections(runs)),
        "remarks": [remark for peer in peers for remark in peer.remarks if any(r["peer"] == peer.name for r in runs)],
    }


def _names(runs: Iterable[Record], kind: str) -> list[str]:
    """Names of this kind in their order of first appearance."""
    return list(dict.fromkeys(record["name"] for record in runs if record["kind"] == kind))


def _settings_shown(runs: Sequence[Record], peer: Peer, workload: str) -> list[str]:
    """The best setting of a peer that is swept; each one of a peer that is not."""
    if not peer.is_swept:
        return [setting.name for setting in peer.settings]
    best = best_setting(runs, peer.name, workload)
    return [best] if best else []


def _workload(runs: Sequence[Record], name: str, peers: Sequence[Peer]) -> list[dict[str, Any]]:
    """A row for each peer that has run this workload."""
    mine = [record for record in runs if record["kind"] == "workload" and record["name"] == name and is_good(record)]
    rows = []
    for peer in peers:
        for setting in _settings_shown(runs, peer, name):
            found = _of(mine, peer.name, setting)
            if found:
                row = {"peer": peer.name, "title": peer.title, "setting": setting}
                row["ours_over_it"] = _ratios(mine, found, lambda record: record["figures"]["output_tok_s"])
                row["ours_over_it_by_cpu"] = _ratios(mine, found, tokens_per_cpu_s)
                row["figures"] = {key: spread([r["figures"][key] for r in found]) for _, key, _ in FIGURES}
                row |= {"num_swept": len({r["setting"] for r in mine if r["peer"] == peer.name})}
                if fronts := [r["figures"]["front_share"] for r in found if "front_share" in r["figures"]]:
                    row["front_share"] = spread(fronts)
                rows.append(row)
    return rows


def _targets(workloads: Mapping[str, Sequence[Mapping[str, Any]]], *, is_quiet: bool) -> Iterable[dict[str, Any]]:
    """What was aimed at, and what the median ratio says, where both were run in one turn; nothing on a busy machine."""
    for (name, peer), at_least in TARGETS.items():
        for row in workloads.get(name, ()):
            if row["peer"] == peer and row["ours_over_it"] is not None:
                is_met = row["ours_over_it"]["median"] >= at_least if is_quiet else None
                yield {"workload": name, "peer": peer, "at_least": at_least, "is_met": is_met, **row["ours_over_it"]}


def _of(runs: Iterable[Record], peer: str, setting: str) -> list[Record]:
    return [record for record in runs if record["peer"] == peer and record["setting"] == setting]


def tokens_per_cpu_s(record: Record) -> float:
    """Output tokens a second of the server's processor time; the clock ticks a hundred times a second."""
    figures = record["figures"]
    return float(figures["output_tokens"]) / max(0.01, figures["server_cpu_s"])


def _ratios(mine: Sequence[Record], others: Sequence[Record], rate: Callable[[Record], float]) -> Spread | None:
    """Our rate over theirs, in each turn that both ran; None for our own row."""
    ours: dict[int, list[float]] = {}
    for record in _of(mine, OURS, OUR_SETTING):
        ours.setdefault(record["turn"], []).append(rate(record))
    if others and others[0]["peer"] == OURS and others[0]["setting"] == OUR_SETTING:
        return None
    ratios = [statistics.median(ours[record["turn"]]) / rate(record) for record in others if record["turn"] in ours]
    return spread(ratios) if ratios else None


def _sweep(runs: Sequence[Record]) -> dict[str, dict[str, dict[str, Spread]]]:
    """Output tokens a second by peer, setting and workload: what each best was chosen from."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for record in runs:
        if record["kind"] == "workload" and is_good(record):
            of_setting = found.setdefault(record["peer"], {}).setdefault(record["setting"], {})
            of_setting.setdefault(record["name"], []).append(record["figures"]["output_tok_s"])
    return {
        peer: {setting: {name: spread(v) for name, v in names.items()} for setting, names in settings.items()}
        for peer, settings in found.items()
    }


def _answers(runs: Sequence[Record]) -> list[dict[str, Any]]:
    """How many greedy answers differ between one client and many, turn by turn."""
    found: dict[tuple[str, str], list[int]] = {}
    both: dict[tuple[str, str, int], dict[str, list[str]]] = {}
    for record in runs:
        if record["kind"] == "answers" and is_good(record):
            key = (record["peer"], record["setting"], record["turn"])
            both.setdefault(key, {})[record["name"]] = record["figures"]["answers"]
    for (peer, setting, _), answers in both.items():
        if {"alone", "crowded"} <= answers.keys():
            pairs = zip(answers["alone"], answers["crowded"], strict=False)
            found.setdefault((peer, setting), []).append(sum(a != b for a, b in pairs))
    return [
        {"peer": peer, "setting": setting, "of": NUM_COMPARED, "differ": spread(counts)}
        for (peer, setting), counts in found.items()
    ]


def _curve(runs: Sequence[Record], kind: str, key: str, peers: Sequence[Peer]) -> dict[str, dict[str, Spread]]:
    """A figure by entrant and number of the sweep, numbers in their order."""
    curves: dict[str, dict[str, Spread]] = {}
    for peer in peers:
        mine = [r for r in runs if r["kind"] == kind and r["peer"] == peer.name and is_good(r)]
        for setting in dict.fromkeys(r["setting"] for r in mine):
            points: dict[int, list[float]] = {}
            for record in _of(mine, peer.name, setting):
                points.setdefault(int(record["name"]), []).append(record["figures"][key])
            curves[f"{peer.title}, {setting}"] = {str(at): spread(points[at]) for at in sorted(points)}
    return curves


def _failure(record: Record) -> dict[str, Any]:
    return {key: record[key] for key in ("peer", "setting", "turn", "cause")}


def objections(runs: Iterable[Record]) -> Iterable[str]:
    """What forbids a comparison, said once for each entrant and cause."""
    said: dict[str, None] = {}
    for record in runs:
        who, figures = f"{record['peer']} {record['setting']}, {record['name']}", record["figures"]
        if figures["errors"]:
            said[f"{who}: {figures['errors']} requests failed: {figures.get('first_error', '')}; not compared"] = None
        elif not is_good(record):
            said[f"{who}: answers are not as long as asked for; not compared"] = None
        elif figures["events_per_token"] < LEAST_EVENTS:
            said[
                f"{who}: {figures['events_per_token']:.2f} events a token, under {LEAST_EVENTS}: it puts several "
                "tokens into one event or holds text back, so its ITL is not one of tokens"
            ] = None
    return said


def limits_record() -> Record:
    """What the machine can do at most, and what a step of the model asks of it."""
    from dataclasses import asdict

    from benchmarks.peers.weights import embedded
    from everystop.claims.model_work import model_work
    from everystop.model.home import Home
    from everystop.model.weights import load_model
    from everystop.trial.machine_limits import cpu_limits

    checkpoint = embedded()
    loaded = load_model(checkpoint, dtype="int8", num_threads=NUM_THREADS, home=Home.from_environment())
    work, limits = model_work(checkpoint.spec, loaded.num_step_bytes), cpu_limits("int8", NUM_THREADS)
    figures = asdict(work) | {"operations_per_s": limits.operations_per_s, "bytes_per_s": limits.bytes_per_s}
    return {"kind": "limits", "name": "machine", "peer": OURS, "setting": OUR_SETTING, "turn": 0, "figures": figures}


# ---------------------------------------------------------------------------------- text


def text(found: Mapping[str, Any]) -> str:
    """The report for people, in Markdown."""
    parts = [*_head(found)]
    for name, rows in found["workloads"].items():
        parts.append(f"\n`{name}`\n\n{_workload_table(rows)}")
    if found["targets"]:
        parts.append(f"\nWhat was aimed at\n\n{_target_table(found['targets'])}")
    if found["answers"]:
        parts.append(f"\nGreedy answers that differ between one client and many\n\n{_answer_table(found['answers'])}")
    curves = (
        ("Output tok/s by number of clients", found["clients"], 0),
        ("Gap between tokens in ms by length of the prompt, one client", found["context"]["itl_ms"], 1),
        ("Time to the first token in ms by length of the prompt, one client", found["context"]["ttft_ms"], 0),
        ("Step time in ms by number of rows", found["rows"], 1),
    )
    parts += [f"\n{title}\n\n{_curve_table(curve, digits)}" for title, curve, digits in curves if curve]
    parts.append(f"\nAll settings, output tok/s\n\n{_sweep_table(found['sweep'])}")
    parts += [f"\n- {remark}" for remark in found["remarks"]]
    parts += [f"\nFAILED {f['peer']} {f['setting']}: {f['cause'].splitlines()[0]}" for f in found["failures"]]
    parts += [f"\nOBJECTION {objection}" for objection in found["objections"]]
    return "\n".join(parts)


def _head(found: Mapping[str, Any]) -> Iterable[str]:
    machine, others = found["machine"], found["others_share"]
    yield f"{machine.get('cpu', 'unknown processor')}, {machine.get('num_cpus', '?')} processors; " + ", ".join(
        f"{peer} {version}" for peer, version in found["versions"].items()
    )
    if others is not None:
        share = f"{others['median']:.0%} ({others['least']:.0%}–{others['most']:.0%})"
        label = "" if others["most"] <= QUIET_SHARE else "PRELIMINARY: the machine was not quiet. "
        yield f"{label}Other processes took {share} of the processors while runs went on."


def cell(values: Spread | None, digits: int) -> str:
    """Median, with its range where there are several runs."""
    if values is None:
        return ""
    median = f"{values['median']:,.{digits}f}"
    if values["runs"] == 1:
        return median
    return f"{median} ({values['least']:,.{digits}f}–{values['most']:,.{digits}f})"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], num_words: int = 1) -> str:
    """Markdown; the first columns are words."""
    lines = [f"| {' | '.join(heads)} |", "|---" * num_words + "|---:" * (len(heads) - num_words) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _workload_table(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = ["server", "best setting", "ours over it", "by CPU time", *(title for title, _, _ in FIGURES)]
    body = []
    for row in rows:
        setting = f"{row['setting']} (of {row['num_swept']})" if row["peer"] != OURS else row["setting"]
        figures = [cell(row["figures"][key], digits) for _, key, digits in FIGURES]
        ratios = [cell(row[key], 2) for key in ("ours_over_it", "ours_over_it_by_cpu")]
        body.append([row["title"], setting, *ratios, *figures])
    return table(heads, body, 2)


def _target_table(targets: Sequence[Mapping[str, Any]]) -> str:
    words = {True: "met", False: "missed", None: "not judged: a busy machine"}
    body = [[t["workload"], t["peer"], f"{t['at_least']:g}", cell(dict(t), 2), words[t["is_met"]]] for t in targets]
    return table(["workload", "peer", "aimed at", "ours over its best", ""], body, 2)


def _answer_table(rows: Sequence[Mapping[str, Any]]) -> str:
    return table(
        ["server", "setting", "differ", "of"],
        [[row["peer"], row["setting"], cell(row["differ"], 0), str(row["of"])] for row in rows],
        2,
    )


def _curve_table(curves: Mapping[str, Mapping[str, Spread]], digits: int) -> str:
    points = sorted({int(at) for curve in curves.values() for at in curve})
    body = [[name, *(cell(curve.get(str(at)), digits) for at in points)] for name, curve in curves.items()]
    return table(["server", *(f"{at:,}" for at in points)], body)


def _sweep_table(sweep: Mapping[str, Mapping[str, Mapping[str, Spread]]]) -> str:
    names = list(dict.fromkeys(name for settings in sweep.values() for of in settings.values() for name in of))
    body = [
        [peer, setting, *(cell(of.get(name), 0) for name in names)]
        for peer, settings in sweep.items()
        for setting, of in settings.items()
    ]
    return table(["server", "setting", *names], body, 2)
