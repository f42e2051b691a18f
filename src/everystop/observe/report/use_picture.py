"""Where the time of the slots went: one full bar a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from everystop.observe.comparison import Run
from everystop.observe.report.drawing import SMALL, TEXT, dress, matplotlib, size_px, text_px
from everystop.observe.report.grammar import LIGHT, LOOKS, Look, Theme, Use
from everystop.observe.slot_use import USES, slot_use
from everystop.words import percent

WASTE = ("held", "padding")
USE_LOOKS = {
    "decode": LOOKS[Use.DECODE],
    "prefill": LOOKS[Use.PREFILL],
    "padding": LOOKS[Use.PADDING],
    "held": LOOKS[Use.HELD],
    "idle": Look("idle: nobody on board, or passed over", None),
    "overhead": Look("overhead: planning and hand-over", "#D9D9D9", "----", "#6A6A6A"),
}
DARK_TEXT = (None, LOOKS[Use.PREFILL].fill, "#D9D9D9")


def slot_shares(runs: Sequence[Run]) -> dict[str, float]:
    """The shares of slot time by use, over all runs together; they sum to 1. Empty where a history is missing."""
    spent = dict.fromkeys(USES, 0)
    for run in runs:
        used = slot_use(run)
        if used is None:
            return {}
        for use in USES:
            spent[use] += used.slot_ns[use]
    whole = max(sum(spent.values()), 1)
    return {use: ns / whole for use, ns in spent.items()}


def wasted_share(runs: Sequence[Run]) -> float:
    """The share of slot time in held and padded slots, over all runs together."""
    shares = slot_shares(runs)
    return sum(shares.get(use, 0.0) for use in WASTE)


def slot_time(shares: Mapping[str, Mapping[str, float]], axes: Any, theme: Theme = LIGHT) -> None:
    """A bar of 100 % for each policy, cut by what its slots did."""
    dress(axes, theme)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(shares) - 0.35, -0.65)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("share of slot time", color=theme.faint, fontsize=SMALL)
    rectangle = matplotlib("patches").Rectangle
    for row, (policy, uses) in enumerate(shares.items()):
        axes.text(0, row - 0.34, policy, color=theme.ink, fontsize=TEXT, va="bottom", ha="left", fontweight="bold")
        left = 0.0
        for use, share in uses.items():
            if share <= 0:
                continue
            look = USE_LOOKS[use]
            style = {"facecolor": look.fill or "none", "edgecolor": theme.outline, "lw": 0.8}
            hatch = {"hatch": look.hatch or None, "hatchcolor": look.hatch_colour}
            axes.add_patch(rectangle((left, row - 0.28), share, 0.56, **style, **hatch))
            _share_name(left, share, row, use, axes, theme)
            left += share


def _share_name(left: float, share: float, row: int, use: str, axes: Any, theme: Theme) -> None:
    """The use and its share inside its part of the bar, as much of it as there is room for."""
    look = USE_LOOKS[use]
    room = share * size_px(axes)[0] - 8
    words = next((w for w in (f"{use} {percent(share)}", percent(share)) if text_px(w) <= room), "")
    if not words:
        return
    ink = "#FFFFFF" if look.fill not in DARK_TEXT else theme.ink if look.fill is None else "#1A1A1A"
    box = {"facecolor": look.fill, "edgecolor": "none", "pad": 1.5} if look.hatch else None
    axes.text(left + share / 2, row, words, color=ink, fontsize=SMALL, ha="center", va="center", bbox=box)
