"""Percentiles of durations, and the handful of figures that sum a set of them up."""

from __future__ import annotations

from collections.abc import Sequence

PERCENTILES = (50, 90, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks; NaN of nothing."""
    if not values:
        return float("nan")
    ranked = sorted(values)
    low, part = divmod((len(ranked) - 1) * percent / 100, 1)
    above = ranked[min(int(low) + 1, len(ranked) - 1)]
    return ranked[int(low)] + (above - ranked[int(low)]) * part


def distribution_ms(values_s: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and maximum of seconds, in milliseconds."""
    mean = sum(values_s) / len(values_s) if values_s else float("nan")
    figures = {"mean": mean} | {f"p{p}": percentile(values_s, p) for p in PERCENTILES}
    return {name: value * 1e3 for name, value in (figures | {"max": max(values_s, default=float("nan"))}).items()}
