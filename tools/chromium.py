"""The system's Chromium, as tests, pictures and measurements start it."""

from __future__ import annotations

import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = "needs Chromium, and none is on the PATH (Debian: apt install chromium)"
# It runs as root in a container and draws without a graphics card; the rest keeps it from talking to anybody.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def find_chromium() -> str | None:
    """Where it is, None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)
