"""Which runs a report shows where only one of each policy can be shown."""

from __future__ import annotations

from everystop.observe.comparison import Comparison, Run


def shown_repeat(comparison: Comparison) -> int | None:
    """The repeat in which the gain of the last policy over the baseline is the median one, of those that every policy
    has; None if there is none.
    """
    by_repeat: dict[int, dict[str, Run]] = {}
    for run in comparison.runs:
        by_repeat.setdefault(run.repeat, {})[run.policy] = run
    whole = {repeat: runs for repeat, runs in by_repeat.items() if len(runs) == len(comparison.policies)}
    if not whole:
        return None
    first, last = comparison.policies[0], comparison.policies[-1]
    gains = sorted(
        (runs[first].duration_s / max(runs[last].duration_s, 1e-9), repeat) for repeat, runs in whole.items()
    )
    if first == last:
        gains = sorted((runs[first].duration_s, repeat) for repeat, runs in whole.items())
    return gains[(len(gains) - 1) // 2][1]


def shown_runs(comparison: Comparison) -> list[Run]:
    """One run of each policy, all of one repeat; of an interrupted comparison without such a repeat, the first runs."""
    repeat = shown_repeat(comparison)
    if repeat is None:
        firsts = [next(iter(comparison.runs_of(policy)), None) for policy in comparison.policies]
        return [run for run in firsts if run is not None]
    return [run for policy in comparison.policies for run in comparison.runs_of(policy) if run.repeat == repeat]
