"""Draws the picture at the head of the README: one measured run of each policy, slot by slot.

    everystop compare --out OUT
    python -m tools.hero OUT

Writes hero.svg, hero.png and both dark to docs/pictures, and prints the caption: what is shown, and the command that
measured it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image

from everystop.observe.comparison import Comparison
from everystop.observe.report.__main__ import read_comparison
from everystop.observe.report.grammar import DARK, LIGHT
from everystop.observe.report.pictures import twin_slot_chart
from everystop.observe.report.sheets import drawing_style
from everystop.observe.report.shown import shown_runs
from everystop.observe.report.use_picture import wasted_share
from everystop.words import in_time, listed, percent

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
ROW_PX = 15.0


def main() -> None:
    """Draw from a folder that `everystop compare` wrote."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what was given as --out")
    parser.add_argument("--to", type=Path, default=FOLDER, help="default: docs/pictures")
    arguments = parser.parse_args()
    comparison = read_comparison(arguments.folder / "report.json")
    for path in draw(comparison, arguments.to):
        print(path)
    print(caption(comparison))


def draw(comparison: Comparison, folder: Path) -> list[Path]:
    """The picture in both themes and both formats; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with drawing_style():
        for theme, stem in ((LIGHT, "hero"), (DARK, "hero-dark")):
            sheet = twin_slot_chart(shown_runs(comparison), theme, row_px=ROW_PX)
            paths += [folder / f"{stem}.svg", folder / f"{stem}.png"]
            paths[-2].write_text(sheet.as_svg(), encoding="utf-8")
            sheet.write_png(paths[-1])
            with Image.open(paths[-1]) as image:  # in few colours, as the repository keeps it
                image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(paths[-1], optimize=True)
    return paths


def caption(comparison: Comparison) -> str:
    """What the picture shows, in figures."""
    runs = shown_runs(comparison)
    ends = listed([f"{in_time(run.duration_s)} under {run.policy}" for run in runs])
    return (
        f"The same {len(runs[0].requests)} requests on the same kernels, {runs[0].max_num_seqs} slots: {ends}. "
        f"{percent(wasted_share(runs[:1]))} of slot time under {runs[0].policy} was held by finished requests. "
        f"Measured with `{comparison.settings.get('command', 'everystop compare')}`, repeat {runs[0].repeat + 1}."
    )


if __name__ == "__main__":
    main()
