"""What the live page costs the machine it is looked at on: CPU time of all of Chromium's processes.

    python -m benchmarks.browser

It starts a server with twelve clients, opens /ui for a while, and prints the share of one core that the browser took,
beside that of an empty page. Chromium draws without a graphics card here, which is the dear case.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from playwright.sync_api import sync_playwright
from tools.chromium import ARGUMENTS, MISSING, find_chromium
from tools.crowd import Crowd

from benchmarks.local_server import LocalServer

OPTIONS = ("--max-num-seqs", "32")
NUM_CLIENTS = 40
SETTLE_MS = 4000
CASES = (
    ("an empty page", None, 1280, "no-preference"),
    ("/ui, 1280 x 900", "/ui", 1280, "no-preference"),
    ("/ui, 390 x 900", "/ui", 390, "no-preference"),
    ("/ui, 1280 x 900, reduced motion", "/ui", 1280, "reduce"),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each page is open (default: 20)")
    arguments = parser.parse_args()
    path = find_chromium()
    if path is None:
        raise SystemExit(MISSING)
    with LocalServer("smollm2", OPTIONS) as server, Crowd(server.url, NUM_CLIENTS), sync_playwright() as playwright:
        for title, target, width, motion in CASES:
            browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
            page = browser.new_page(viewport={"width": width, "height": 900}, reduced_motion=motion)
            page.goto("about:blank" if target is None else server.url + target)
            page.wait_for_timeout(SETTLE_MS)
            before_s = cpu_s()
            page.wait_for_timeout(1000 * arguments.seconds)
            share = (cpu_s() - before_s) / arguments.seconds
            print(f"{title}: {100 * share:.1f} % of one core", flush=True)
            browser.close()


def cpu_s() -> float:
    """CPU seconds that Chromium's processes below this one have taken so far."""
    fields = [stat(pid) for pid in descendants(os.getpid()) if is_browser(pid)]
    ticks = sum(int(one[11]) + int(one[12]) for one in fields if one is not None)
    return ticks / os.sysconf("SC_CLK_TCK")


def descendants(root: int) -> list[int]:
    """Processes that this one has started, and those that they have, and so on."""
    parents = {int(path.name): fields for path in Path("/proc").glob("[0-9]*") if (fields := stat(int(path.name)))}
    found = [root]
    for pid in found:
        found += [child for child, fields in parents.items() if int(fields[1]) == pid]
    return found[1:]


def stat(pid: int) -> list[str] | None:
    """Fields of a process from its state on (the name before it may hold anything); None when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def is_browser(pid: int) -> bool:
    """It is one of Chromium's, and not of the driver between us."""
    try:
        return b"chrom" in Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
    except OSError:
        return False


if __name__ == "__main__":
    main()
