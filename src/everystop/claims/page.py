"""Renders claims.md from what was found: a table of verdicts, then a section for each claim. No figure of it is written
by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from everystop.claims.claim import Claim
from everystop.claims.findings import (
    CONFIDENCE,
    INTERVAL_METHOD,
    NUM_LOOKS,
    Condition,
    Figure,
    Findings,
    Source,
    Verdict,
)
from everystop.claims.lab import FILL_WAIT_MS
from everystop.claims.plots import WIDTH

MARKS = {Verdict.HELD: "✔ held", Verdict.DID_NOT_HOLD: "✘ did not hold", Verdict.UNDECIDED: "? undecided"}
SOURCES = {
    Source.MEASURED: "measured",
    Source.COUNTED: "counted in the events of the runs",
    Source.SIMULATED: "simulated",
    Source.COMPUTED: "computed",
}
INTRODUCTION = (
    "# The claims, measured\n\nThis page is written by `everystop claims`; run it and it is written anew, from "
    "measurements on your machine. Each claim has a threshold that it can fail: *held* means that the whole interval "
    "lies on the right side of it, *did not hold* that none of it does, *undecided* that the interval crosses it."
)

METHOD = (
    "Whatever is measured was measured on the real server: each policy and setting is an `everystop serve` of its own, "
    "with the flags that a claim names, `--record`, and room for all in its queue. Clients in another process of the "
    "same machine ask it over HTTP and read streams. TTFT, ITL, E2E and tokens a second are what the clients saw: from "
    "a request's first byte to the first event with text, from one such event to the next, to the end of the stream, "
    "and over the whole run. Steps, their times, slots, waits to board and blocks are what the server's record says. "
    "It is joined with the clients' requests by their `x-request-id`, and the scheduler must make every plan in it "
    "again, block by block. Clients and servers share the cores; what the clients computed stands with each claim. The "
    "prefix cache is cold in every run (`cache_salt`), tokens are chosen greedily, answers have fixed lengths, and all "
    "runs of a workload gave the same texts, or, where that is said below, texts of the same lengths. A static batch "
    f"may wait {FILL_WAIT_MS / 1000:g} s to fill, which costs nothing, since all are there. Policies take turns within "
    "each repeat, after a warm-up. What is called simulated ran in virtual time, where those who are sent at once also "
    f"arrive at once. A measured figure is {INTERVAL_METHOD}. While the intervals leave a claim undecided, it is run "
    f"on, to twice and to {2 ** (NUM_LOOKS - 1)} times the repeats; an interval of {100 * CONFIDENCE:.1f} % is right "
    f"for all {NUM_LOOKS} looks together in 95 of 100 cases. A counted figure is the middle of the repeats, from the "
    "least to the most. Ratios travel, absolute numbers do not."
)


class Result(Protocol):
    """What is shown of a claim's result."""

    @property
    def findings(self) -> Findings: ...
    @property
    def settings(self) -> Mapping[str, Any]: ...
    @property
    def seconds(self) -> float: ...
    @property
    def client_cpu_s(self) -> float: ...


def render(claims: Iterable[Claim], results: Mapping[int, Result], pictures: str) -> str:
    """The page; claims without a result are listed as not measured. `pictures` is the folder of the pictures."""
    claims = list(claims)
    parts = [INTRODUCTION, "\n".join(_table(claims, results)), "\n".join(_method(results))]
    shown = (claim for claim in claims if claim.number in results)
    parts += ["\n".join(_section(claim, results[claim.number], pictures)) for claim in shown]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(claims: Iterable[Claim], results: Mapping[int, Result]) -> Iterator[str]:
    yield "| | claim | verdict | what was found |"
    yield "|---:|---|---|---|"
    for claim in claims:
        result = results.get(claim.number)
        if result is None:
            yield f"| {claim.number} | {claim.title} | not measured | run `everystop claims --only {claim.number}` |"
        else:
            verdict = MARKS[result.findings.verdict]
            yield f"| {claim.number} | [{claim.title}](#{anchor(claim)}) | {verdict} | {result.findings.headline} |"


def _method(results: Mapping[int, Result]) -> Iterator[str]:
    """How it was measured, on which machines and when."""
    if not results:
        return
    yield f"> **Method.** {METHOD}"
    for setting, numbers in _by_setting(results).items():
        yield ">"
        yield f"> {_claims_word(numbers)}: {setting}"


def _by_setting(results: Mapping[int, Result]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for number, result in sorted(results.items()):
        found.setdefault(machine_text(result.settings), []).append(number)
    return found


def _claims_word(numbers: list[int]) -> str:
    return f"Claim{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def machine_text(settings: Mapping[str, Any]) -> str:
    """On what it was measured, in a line."""
    pairs = (
        ("", settings.get("date")),
        ("", settings.get("cpu")),
        ("served ", settings.get("served", "by an engine in the same process, without HTTP")),
        ("threads ", settings.get("num_threads")),
        ("kernels ", settings.get("kernels")),
        ("", settings.get("python")),
        ("everystop ", settings.get("version")),
        ("model ", settings.get("model_id")),
        ("dtype ", settings.get("dtype")),
        ("intervals of ", f"{100 * settings.get('confidence', 0.95):.1f} %"),
        ("outputs ", settings.get("outputs")),
        ("load average before ", settings.get("load_average")),
    )
    words = ", ".join(f"{name}{value}" for name, value in pairs if value is not None)
    return f"{words}; `{settings['command']}`" if "command" in settings else words


def anchor(claim: Claim) -> str:
    """Where its section begins."""
    return f"claim-{claim.number}"


def _section(claim: Claim, result: Result, pictures: str) -> Iterator[str]:
    findings = result.findings
    yield f'<a id="{anchor(claim)}"></a>\n'
    yield f"## {claim.number}. {claim.title}\n"
    yield f"**{MARKS[findings.verdict]}.** {findings.headline}\n"
    yield f"*The claim.* {claim.statement}\n"
    yield f"*It holds if* {claim.test}\n"
    yield f"*What was run.* {findings.how} {_time_text(result)}\n"
    yield from _picture(claim, findings, pictures)
    yield "| what decides | found | interval or range | demanded | | source |"
    yield "|---|---:|---:|---:|---|---|"
    yield from map(_condition_row, findings.conditions)
    if findings.figures:
        yield "\n| beside it | found | interval or range | source |"
        yield "|---|---:|---:|---|"
        yield from map(_figure_row, findings.figures)
    for remark in findings.remarks:
        yield f"\n{remark}"


def _time_text(result: Result) -> str:
    """How long it took."""
    took = f"It took {result.seconds:.0f} s"
    if not result.client_cpu_s:
        return f"{took}."
    return f"{took}; the clients computed {result.client_cpu_s:.1f} s, on cores that they share with the servers."


def _picture(claim: Claim, findings: Findings, pictures: str) -> Iterator[str]:
    if not findings.data:
        return
    stem = f"{pictures}/{claim.number}-{claim.name}"
    alt = findings.headline.replace('"', "'")
    yield "<picture>"
    yield f'  <source media="(prefers-color-scheme: dark)" srcset="{stem}-dark.png">'
    yield f'  <img src="{stem}.png" alt="{alt}" width="{WIDTH:.0f}">'
    yield "</picture>\n"
    yield f"{findings.caption}\n"


def _condition_row(condition: Condition) -> str:
    figure = condition.figure
    cells = (
        figure.name,
        figure.text(),
        figure.range_text() or _why_no_range(figure),
        condition.bound_text(),
        MARKS[condition.verdict],
        _source(figure),
    )
    return f"| {' | '.join(cells)} |"


def _figure_row(figure: Figure) -> str:
    return f"| {figure.name} | {figure.text()} | {figure.range_text() or _why_no_range(figure)} | {_source(figure)} |"


def _why_no_range(figure: Figure) -> str:
    return "exact" if figure.is_exact else "one repeat"


def _source(figure: Figure) -> str:
    words = SOURCES[figure.source]
    if figure.source in (Source.MEASURED, Source.COUNTED):
        words += f", {figure.num_repeats} repeat{'s' if figure.num_repeats != 1 else ''}"
    return words
