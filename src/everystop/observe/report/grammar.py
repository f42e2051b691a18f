"""What colours, textures and marks mean, in every picture: one place, so that no two pictures disagree.

A state is told by colour, texture and word together. The colours keep CIE76 differences of 24 and more between every
pair in normal, protan, deutan and tritan vision.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Use(StrEnum):
    """What a slot does for a while; a slot without any is idle, and shows the page."""

    PREFILL = "prefill"
    DECODE = "decode"
    SLOW = "slow"
    RECOMPUTE = "recompute"
    SKIPPED = "skipped"
    HELD = "held"
    PADDING = "padding"


@dataclass(frozen=True, slots=True)
class Look:
    """How a state is drawn; `hatch` is matplotlib's, `height` a share of the row."""

    label: str
    fill: str | None
    hatch: str = ""
    hatch_colour: str = "#FFFFFF"
    height: float = 0.84


WASTE, RUST = "#3B3B3B", "#B33C00"
LOOKS = {
    Use.PREFILL: Look("prefill", "#E69F00"),
    Use.DECODE: Look("decode", "#0072B2"),
    Use.SLOW: Look("decode in a slow step", "#56B4E9"),
    Use.RECOMPUTE: Look("computed again (preempted)", RUST, "////"),
    Use.SKIPPED: Look("on board, passed over", None, height=0.4),
    Use.HELD: Look("held: finished, slot kept", WASTE, "xxxx", "#A8A8A8"),
    Use.PADDING: Look("padding: computed for nobody", WASTE, "xxxx", "#FFFFFF"),
}


@dataclass(frozen=True, slots=True)
class Stroke:
    """How a policy's line is drawn: colour, dashes and marker, so that it is known without its colour."""

    colour: str
    dashes: str | tuple[int, tuple[int, ...]]
    marker: str

    @property
    def glyph(self) -> str:
        """The marker as a character, for where a policy is named in text."""
        return GLYPHS[self.marker]


FINISHED = "o"
END_MARKS = {"error": ("failed", "x"), "abort": ("cancelled", r"$\oslash$")}
"""How a request that did not finish left: in a word, and as matplotlib's marker."""

GLYPHS = {"s": "■", "o": "●", "D": "◆", "^": "▲", "v": "▼", "P": "✚", "X": "✖", "*": "★"}
INK_STROKE = ""  # a stroke of this colour takes the theme's ink
KNOWN_STROKES = {
    "static": Stroke(RUST, (0, (5, 2)), "s"),
    "continuous": Stroke("#0072B2", "-", "o"),
    "static-padded": Stroke("#E69F00", (0, (2, 2)), "D"),
}
OTHER_STROKES = (
    Stroke(INK_STROKE, (0, (1, 1)), "v"),
    Stroke("#56B4E9", (0, (7, 2, 2, 2)), "^"),
    Stroke("#E69F00", (0, (3, 1, 1, 1, 1, 1)), "P"),
    Stroke("#0072B2", (0, (9, 3)), "X"),
    Stroke(RUST, "-", "*"),
)


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of one variant; `outline` goes around cells, `grid` fills what stays in the background."""

    name: str
    page: str
    ink: str
    faint: str
    grid: str
    outline: str


LIGHT = Theme("light", "#FFFFFF", "#1A1A1A", "#595959", "#DDDDDD", "#333333")
DARK = Theme("dark", "#111418", "#ECECEC", "#9BA1A9", "#2E343B", "#C8CCD1")
# Colours that occur nowhere else: a page replaces them by its own, and so follows the reader's light or dark.
INLINE = Theme("inline", "#FE0101", "#FE0202", "#FE0303", "#FE0404", "#FE0505")
INLINE_NAMES = {
    INLINE.page: "var(--page)",
    INLINE.ink: "var(--ink)",
    INLINE.faint: "var(--faint)",
    INLINE.grid: "var(--grid)",
    INLINE.outline: "var(--outline)",
}


def strokes(policies: tuple[str, ...]) -> dict[str, Stroke]:
    """A stroke for each policy, no two alike."""
    spare = iter(OTHER_STROKES * (1 + len(policies) // len(OTHER_STROKES)))
    return {policy: KNOWN_STROKES.get(policy) or next(spare) for policy in policies}
