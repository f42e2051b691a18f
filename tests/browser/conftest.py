"""A Chromium for the tests of pages: the system's own, driven by Playwright. Without either, they are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.browser.watched import DEADLINE_S, Watched
from tools.chromium import ARGUMENTS, MISSING, find_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for all tests of a module; its event loop would be in the way of tests elsewhere."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, which is in the test extra")
    path = find_chromium()
    if path is None:
        pytest.skip(MISSING)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Watched]]:
    """Opens pages, each in a profile of its own; in the end none may have complained or asked another host."""
    opened: list[Watched] = []

    def open_one(url: str, *, width: int = 1280, height: int = 900, scheme: str = "light", **options: Any) -> Watched:
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            service_workers="block",
            **{"timezone_id": "UTC"} | options,
        )
        context.set_default_timeout(1000 * DEADLINE_S)
        watched = Watched(context.new_page(), url)
        opened.append(watched)
        watched.page.goto(url)
        return watched

    yield open_one
    for watched in opened:
        watched.close()
        watched.check()
