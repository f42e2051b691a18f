"""Takes the pictures of the pages in docs/pictures, from a real server with real traffic, and of a report.

    python -m tools.screenshots
    python -m tools.screenshots --report OUT    # what `everystop compare --out OUT` wrote

Each page light and dark, at 1280 and 390 pixels wide. Needs Chromium and the test extra.
"""

from __future__ import annotations

import argparse
import io
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.local_server import ROOT, LocalServer
from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from tools.chromium import ARGUMENTS, MISSING, find_chromium
from tools.crowd import Crowd

FOLDER = ROOT / "docs" / "pictures"
OPTIONS = ("--max-num-seqs", "8", "--kv-cache-memory", "56MiB", "--max-num-batched-tokens", "128")
NUM_CLIENTS = 12
WARM_UP_S = 40
LOOK_S = 4
WIDTHS = (1280, 390)
VIEW_PX = 3400
SCHEMES = ("light", "dark")
MOST_TOKENS = 150
GRAMMAR = [(217, 217, 217), (230, 159, 0), (0, 114, 178), (86, 180, 233), (179, 60, 0), (59, 59, 59)]


def main() -> None:
    """Take them all, or those of a report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the pictures (default: docs/pictures)")
    parser.add_argument("--policy", default="continuous", help="policy of the server (default: continuous)")
    parser.add_argument("--report", type=Path, metavar="OUT", help="take the report in this folder, and no other page")
    arguments = parser.parse_args()
    path = find_chromium()
    if path is None:
        raise SystemExit(MISSING)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        if arguments.report is not None:
            page = (arguments.report / "report.html").resolve(strict=True).as_uri()
            take(browser, page, arguments.out, "report", until=".figures")
        else:
            take_pages(browser, arguments.policy, arguments.out)
        browser.close()


def take_pages(browser: Browser, policy: str, folder: Path) -> None:
    """The live page, and that of a request, of a server under load."""
    options = [*OPTIONS, "--policy", policy]
    with LocalServer("smollm2", options) as server, Crowd(server.url, NUM_CLIENTS) as crowd:
        time.sleep(WARM_UP_S)
        take(browser, f"{server.url}/ui", folder, "ui")
        take(browser, f"{server.url}/ui/r/{most_telling(server.url, crowd.answered[-200:])}", folder, "request")


def take(browser: Browser, url: str, folder: Path, name: str, *, until: str = "body") -> None:
    """One page in both themes and both widths, down to the end of an element."""
    for scheme in SCHEMES:
        for width in WIDTHS:
            page = browser.new_page(viewport={"width": width, "height": VIEW_PX}, color_scheme=scheme)
            page.goto(url)
            page.wait_for_timeout(1000 * LOOK_S)
            bottom = "until => Math.ceil(document.querySelector(until).getBoundingClientRect().bottom)"
            height = page.evaluate(bottom, until)
            clip = {"x": 0, "y": 0, "width": width, "height": height}
            picture = page.screenshot(clip=clip, full_page=height > VIEW_PX)
            path = folder / f"{name}-{scheme}-{width}.png"
            path.write_bytes(with_palette(picture))
            print(f"{path.name}: {path.stat().st_size:,} bytes")
            page.close()


def with_palette(picture: bytes) -> bytes:
    """The same picture in its most frequent colours and those of the grammar, at a third of the size."""
    packed, image = io.BytesIO(), Image.open(io.BytesIO(picture)).convert("RGB")
    frequent = [color for _, color in sorted(image.getcolors(1 << 24) or [], reverse=True)]
    palette = Image.new("P", (1, 1))
    palette.putpalette([channel for color in (GRAMMAR + frequent)[:256] for channel in color])
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(packed, "PNG", optimize=True)
    return packed.getvalue()


def most_telling(url: str, names: list[str]) -> str:
    """Of these requests the one whose time went to the most causes, and that is short enough to be seen whole."""
    return max(names, key=lambda name: telling(explain(url, name)))


def explain(url: str, name: str) -> dict[str, Any]:
    """What the server says of a request."""
    with urllib.request.urlopen(f"{url}/v1/requests/{name}/explain") as answer:
        explanation: dict[str, Any] = json.load(answer)
    return explanation


def telling(explanation: dict[str, Any]) -> float:
    """How much there is to see."""
    if explanation["num_output_tokens"] > MOST_TOKENS:
        return 0.0
    late = sum(token["is_outlier"] for token in explanation["tokens"])
    return sum(min(cause["share"], 0.15) for cause in explanation["causes"]) + min(late, 8) / 40


if __name__ == "__main__":
    main()
