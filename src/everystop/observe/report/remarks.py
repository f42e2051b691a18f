"""What is said beside the figures: captions, what must be known first, how it was measured, and the limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from everystop.observe.batch_wait import SETTING, batch_wait_remarks, batch_wait_setting
from everystop.observe.bench_keys import arrival_lags_s
from everystop.observe.comparison import Comparison
from everystop.observe.comparison_text import NOT_SEEN
from everystop.observe.goodput import is_demanding
from everystop.observe.ratios import METHOD
from everystop.observe.report.grammar import strokes
from everystop.observe.report.request_pictures import MAX_ROWS, changes, extremes, tally
from everystop.observe.report.shown import shown_runs
from everystop.observe.wording import counted, failures
from everystop.words import in_time


def facts(comparison: Comparison) -> Iterator[str]:
    """What, how often, with which model, and when."""
    yield f"{len(comparison.runs[0].requests):,} requests"
    for policy, stroke in strokes(comparison.policies).items():
        yield f"{len(comparison.runs_of(policy))} × {stroke.glyph} {policy}"
    settings = comparison.settings
    yield from (str(settings[name]) for name in ("model_id", "cpu") if settings.get(name))
    if settings.get("date"):
        yield str(settings["date"])[:16].replace("T", " ")


def caption(comparison: Comparison, name: str) -> Iterator[str]:
    """What to see in a picture, and of which runs it is."""
    runs = shown_runs(comparison)
    shown = f"Shown: repeat {runs[0].repeat + 1} of {len(comparison.runs_of(runs[0].policy))}"
    shown += ", the one with the median gain." if len(comparison.policies) > 1 else ", the median one."
    kind, _, policy = name.partition("-") if name.startswith(("winners", "lengths")) else (name, "", "")
    policy = policy or comparison.policies[-1]
    match kind:
        case "slots":
            yield "One row is one slot of the batch. A number is the request that decodes there; above, how many wait."
            if any(run.policy.startswith("static") for run in runs):
                yield "A bracket is a batch: nobody else boards before all of it is done."
            yield shown
        case "occupancy":
            yield "Slots that compute a token somebody will get; grey is the difference between the curves."
            yield shown
        case "tokens":
            yield "The horizontal gap is time saved or lost."
            yield shown
        case "durations":
            yield "Up to which duration how many requests (for ITL: gaps between tokens) lie, all repeats together."
            if is_demanding(comparison.settings):
                yield "A dotted line is what was demanded (SLO)."
        case "winners":
            found = changes(comparison, policy)
            sooner, later, same = tally(found)
            yield f"{sooner} ended sooner under {policy}, {later} later, {same} within 2 %. {extremes(found)}"
            yield f"Medians over repeats, the greatest gain first. Bold lines are losses of {policy}."
            if len(found) > MAX_ROWS:
                yield f"Of {len(found):,} requests {MAX_ROWS} are drawn, evenly from most gain to most loss."
        case "lengths":
            yield "Above the line a request ended sooner, below it later; each dot is one request."
        case "slot-time":
            yield "All slots from the start of a run to its end, all repeats together."


def lead(comparison: Comparison) -> str:
    """What is said where nothing is compared."""
    if len(comparison.policies) > 1 or not comparison.served:
        return ""
    run = shown_runs(comparison)[0]
    return f"{len(run.requests):,} requests under {run.policy} took {in_time(run.duration_s)}."


def alarms(comparison: Comparison, no_pictures: str) -> Iterator[str]:
    """What a reader must know before any figure."""
    found = comparison.equality()
    if not found.holds:
        some = ", ".join(map(str, found.different[:10])) + (", …" if len(found.different) > 10 else "")
        yield (
            f"Outputs differ: {len(found.different)} requests had not the same output in all runs ({some}). "
            "The runs did not do the same work, and no ratio means anything."
        )
    if not comparison.is_complete:
        done = "; ".join(f"{len(comparison.runs_of(policy))} under {policy}" for policy in comparison.policies)
        yield f"Interrupted: {comparison.num_repeats_asked} repeats were asked for; there are {done}."
    for policy in comparison.policies:
        if policy not in comparison.served and (errors := comparison.errors(policy)):
            num = sum(num for _, num in errors)
            failed = f"all {num:,} requests failed, over all its runs"
            yield f"Nothing was served under {policy}: {failed}. {failures(errors)}"
    if comparison.num_errors and comparison.served:
        first = next(line.error for run in comparison.runs for line in run.requests if line.error is not None)
        yield f"{comparison.num_errors} requests failed, over all runs; no figure counts them. The first: {first}"
    yield from batch_wait_remarks(comparison)
    if any(run.history is None for run in comparison.runs):
        yield NOT_SEEN
    if no_pictures:
        yield (
            no_pictures[0].upper()
            + no_pictures[1:]
            + ", and draw the report again: python -m everystop.observe.report DIR."
        )


def equality(comparison: Comparison) -> str:
    """Whether all runs gave the same answers."""
    found = comparison.equality()
    if len(comparison.runs) < 2:
        return "One run only: there is nothing to compare outputs with."
    total = found.num_equal + len(found.different)
    if not total:
        return "Every request failed in some run: there are no outputs to compare."
    words = f"{found.num_equal:,} of {total:,} requests gave the same output in all {len(comparison.runs)} runs"
    return words + (": the same work was done." if found.holds else ".")


def method(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """How it was measured, as (what, how)."""
    yield "policies", ", ".join(comparison.policies)
    yield "repeats", f"{max(len(comparison.runs_of(p)) for p in comparison.policies)} of {comparison.num_repeats_asked}"
    yield "intervals", METHOD
    lags = [lag for run in comparison.runs for lag in arrival_lags_s(run.requests)]
    if lags:
        late = f"from due to sent: median {in_time(median(lags))}, at most {in_time(max(lags))}"
        yield "client lag", f"{late}, over {counted(len(lags), 'timed request')}"
    if wait := batch_wait_setting(comparison):
        yield "batch wait", wait
    for name, value in comparison.settings.items():
        if name == SETTING:
            continue
        yield name.replace("_", " "), _setting(value)


def _setting(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_setting(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return "–" if value is None else str(value)


def limits(comparison: Comparison) -> Iterator[str]:
    """What the figures do not say."""
    yield "Ratios travel further than absolute numbers: those are of this machine, this model and these lengths."
    num_runs = max(len(comparison.runs_of(policy)) for policy in comparison.policies)
    if len(comparison.policies) > 1 and num_runs < 2:
        yield "One repeat: no ratio has an interval, and any small difference may be chance."
    elif len(comparison.policies) > 1 and num_runs < 5:
        yield "Fewer than five repeats: intervals are wide, and lean on ratios being spread log-normally."
    if "static" in comparison.policies:
        yield (
            "static is the best case of request-level batching: a finished row keeps its slot but is not computed, and "
            "tokens are delivered as they come."
        )
    if "static-padded" in comparison.policies:
        yield "static-padded is the naive case: finished rows are computed until the whole batch is done."
    if any(run.history is not None for run in comparison.runs):
        yield "Times are those of one monotonic clock in the engine; no network and no HTTP lie between."
    else:
        yield "Times are those of the client, and include the network and the server's HTTP."
