"""The report of a comparison: one page that opens anywhere, and its pictures as files."""

from __future__ import annotations

from pathlib import Path

from everystop.observe.comparison import Comparison
from everystop.observe.report.drawing import PictureError
from everystop.observe.report.page import render_page
from everystop.observe.report.pictures import Drawing, draw_all, remove_files, write_files

__all__ = ["PictureError", "remove_files", "write_report"]


def write_report(comparison: Comparison, directory: Path) -> list[Path]:
    """Write `report.html`, and each picture as PNG and SVG, light and dark; returns the files. The directory is made.

    Without matplotlib there is only the page, without pictures, which says what to install. Raises ValueError where the
    comparison has no run, and OSError.
    """
    if not comparison.runs:
        raise ValueError("there is nothing to report: no run was finished")
    directory.mkdir(parents=True, exist_ok=True)
    drawings, no_pictures = _draw(comparison)
    page = directory / "report.html"
    page.write_text(render_page(comparison, drawings, no_pictures), encoding="utf-8")
    return [page, *(write_files(drawings, directory) if drawings else ())]


def _draw(comparison: Comparison) -> tuple[list[Drawing], str]:
    """The pictures, and why there are none if there are none."""
    try:
        return draw_all(comparison), ""
    except PictureError as error:
        return [], str(error)
