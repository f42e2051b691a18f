"""A comparison in the words and columns of a terminal: what was gained, what was lost, and what that is made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from everystop.observe.batch_wait import batch_wait_remarks, batch_wait_setting
from everystop.observe.comparison import Comparison
from everystop.observe.gains import Gain, gains, headline, measures
from everystop.observe.ratios import METHOD, Ratio
from everystop.observe.slot_use import USES, expected_occupancy, slot_use
from everystop.observe.wording import failures
from everystop.words import in_time

NOT_SEEN = (
    "A server's clients were measured, not its scheduler: slots, steps and waste are unknown.\n"
    "From the second repeat on its prefix cache, if it has one, knows the prompts."
)


def describe_comparison(comparison: Comparison) -> str:
    """Headline, table, and what must be known to read them."""
    lines = [*_heading(comparison), *_alarms(comparison), ""]
    if comparison.policies[0] in comparison.served:
        for policy in comparison.policies[1:]:
            if policy in comparison.served:
                lines += [*_headline(comparison, policy), ""]
    if comparison.served:
        lines += [*_table(comparison), ""]
        lines += _slots(comparison)
    lines += _remarks(comparison)
    return "\n".join(lines)


def _heading(comparison: Comparison) -> Iterator[str]:
    first = comparison.runs[0]
    slots = f", {first.max_num_seqs} slots" if first.max_num_seqs else ""
    runs = "; ".join(f"{len(comparison.runs_of(policy))} × {policy}" for policy in comparison.policies)
    yield f"{comparison.workload}: {len(first.requests)} requests{slots}; runs: {runs}"
    if not comparison.is_complete:
        yield f"INTERRUPTED: {comparison.num_repeats_asked} repeats were asked for; what is there is shown."


def _headline(comparison: Comparison, policy: str) -> Iterator[str]:
    """The three figures and every loss, in the same form."""
    said = headline(comparison, policy)
    yield f"{policy} against {said.baseline} (times, with 95 % interval):"
    for gain in (*said.figures, *said.losses):
        yield _gain_line(gain)
    if not said.losses and any(gain.ratio is not None for gain in said.figures):
        yield "  no other figure got worse"


def _gain_line(gain: Gain) -> str:
    figures = f"{_middle(gain.baseline, gain.measure.is_rate)} → {_middle(gain.values, gain.measure.is_rate)}"
    return f"  {in_words(gain.ratio):<38} {gain.measure.title:<28} {figures}"


def in_words(ratio: Ratio | None) -> str:
    """ "2.43 × better [2.40, 2.47]": always times above 1, and whether that is better, worse or not decided."""
    if ratio is None:
        return "no ratio"
    is_better = ratio.mean >= 1
    times, low, high = ratio.mean, ratio.low, ratio.high
    if not is_better:
        times = 1 / times
        low, high = (1 / high, 1 / low) if low is not None and high is not None else (None, None)
    word = "better" if is_better else "worse"
    if low is None or high is None:
        return f"{times:.2f} × {word} (one repeat)"
    doubt = "" if ratio.is_decided else ", undecided"
    return f"{times:.2f} × {word} [{low:.2f}, {high:.2f}]{doubt}"


def _table(comparison: Comparison) -> Iterator[str]:
    """Every measure: medians over repeats by policy, and how the others stand to the first."""
    others = comparison.policies[1:]
    ratios = {policy: {gain.measure.name: gain.ratio for gain in gains(comparison, policy)} for policy in others}
    header = ["median over repeats", *comparison.policies, *(f"{policy} is" for policy in others)]
    rows = []
    for measure in measures(comparison):
        values = ([measure.of(run) for run in comparison.runs_of(policy)] for policy in comparison.policies)
        cells = [_middle(column, measure.is_rate) for column in values]
        rows.append([measure.title, *cells, *(in_words(ratios[policy][measure.name]) for policy in others)])
    yield from columns([header, *rows])


def _slots(comparison: Comparison) -> Iterator[str]:
    """Where slot time went in the last run of each policy."""
    uses = {policy: slot_use(runs[-1]) for policy in comparison.policies if (runs := comparison.runs_of(policy))}
    rows = []
    for policy, use in uses.items():
        if use is not None:
            data = use.as_data()
            shares = (f"{data['slot_ns_share'][name]:.1%}" for name in USES)
            rows.append([policy, f"{use.num_steps:,}", f"{use.occupancy:.1%}", *shares])
    if rows:
        yield from columns([["slot time, last run", "steps", "occupancy", *USES], *rows])
        expected = expected_occupancy(comparison.runs[0])
        if expected is not None:
            yield f"Of batches as they arrive, U = Σ lengths / (slots × longest) = {expected:.1%} of slot-steps decode."
        yield ""


def _alarms(comparison: Comparison) -> Iterator[str]:
    """What takes the meaning from all that follows, or a part of it."""
    different = comparison.equality().different
    if different:
        some = ", ".join(map(str, different[:10])) + (", …" if len(different) > 10 else "")
        yield f"OUTPUTS DIFFER: {len(different)} requests had not the same output in all runs ({some});"
        yield "the runs did not do the same work, and no ratio means anything."
    for policy in comparison.policies:
        if policy not in comparison.served and (errors := comparison.errors(policy)):
            num = sum(num for _, num in errors)
            yield f"NOTHING WAS SERVED under {policy}: all {num:,} requests failed, over all its runs."
            yield f"  {failures(errors)}"
    if comparison.num_errors and comparison.served:
        yield f"ERRORS: {comparison.num_errors} requests failed, over all runs; no figure counts them. Such as:"
        yield from _first_errors(comparison)
    for remark in batch_wait_remarks(comparison):
        yield f"NOTE: {remark}"


def _remarks(comparison: Comparison) -> Iterator[str]:
    if comparison.runs[0].history is None:
        yield NOT_SEEN
    equality, num_runs = comparison.equality(), len(comparison.runs)
    if equality.holds and equality.num_equal:
        yield f"Outputs: {equality.num_equal} requests, each with the same output in all {num_runs} runs."
    if equality.num_uncompared and num_runs > 1:
        yield f"Not compared: {equality.num_uncompared} requests, which failed in some run."
    if comparison.policies[1:]:
        yield f"Intervals: {METHOD}."
    if wait := batch_wait_setting(comparison):
        yield f"Batch wait: {wait}."


def _first_errors(comparison: Comparison) -> list[str]:
    messages = (f"  {line.error}" for run in comparison.runs for line in run.requests if line.error is not None)
    return list(dict.fromkeys(messages))[:3]


def _middle(values: Sequence[float], is_rate: bool) -> str:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "–"
    value = median(known)
    if is_rate:
        return f"{value:,.0f} /s" if value >= 100 else f"{value:.3g} /s"
    return in_time(value)


def columns(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Rows of cells, the first column to the left, the others to the right."""
    listed = list(rows)
    widths = [max(len(row[i]) for row in listed) for i in range(len(listed[0]))]
    for row in listed:
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        yield "  ".join([row[0].ljust(widths[0]), *rest]).rstrip()
