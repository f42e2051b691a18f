"""A page in a browser, and all that it says and asks for while a test plays with it."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlsplit

DEADLINE_S = 30.0
LOOKS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]


class Watched:
    """`page`, with its complaints and requests; `expected` are complaints that a test means to cause."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.expected: list[str] = []
        self.urls: list[str] = []
        self._host = urlsplit(url).netloc
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.urls.append(request.url))

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def check(self) -> None:
        """Nothing was complained of, and nobody else was asked."""
        unexpected = [text for text in self.complaints if not any(part in text for part in self.expected)]
        assert unexpected == []
        foreign = [url for url in self.urls if urlsplit(url).netloc not in (self._host, "")]
        assert foreign == []

    @property
    def address(self) -> str:
        """The address as the page itself knows it; Playwright hears of a change some time later."""
        return str(self.page.evaluate("location.href"))

    def close(self) -> None:
        """Close the page, whose server may go then; once is enough, and twice is no harm."""
        self.page.context.close()

    def text(self, selector: str) -> str:
        """The text of an element that is there."""
        return str(self.page.locator(selector).inner_text())

    def wait_for_text(self, selector: str, text: str) -> None:
        """Wait until the element contains the text."""
        self.page.locator(selector, has_text=text).first.wait_for()

    def wait_for(self, expression: str, argument: object = None) -> None:
        """Wait until a script's value is true; `wait_for_function` has the page evaluate it, which its policy forbids
        from the second look on.
        """
        end = time.monotonic() + DEADLINE_S
        while not self.page.evaluate(expression, argument):
            assert time.monotonic() < end, f"it never came true: {expression}"
            self.page.wait_for_timeout(20)

    def wait_for_drawings(self) -> None:
        """Wait until the charts in sight show what the page knows: a frame may tell what is in sight, and change sizes,
        before they are drawn in the next.
        """
        frame = "new Promise(done => requestAnimationFrame(done))"
        for _ in range(3):
            self.page.evaluate(frame)

    def wait_for_colors(self, selector: str, *wanted: str) -> None:
        """Wait until the canvas shows these colours, "r,g,b" each."""
        end = time.monotonic() + DEADLINE_S
        while missing := set(wanted) - self.colors(selector):
            assert time.monotonic() < end, f"{selector} never showed {missing}"
            self.page.wait_for_timeout(20)

    def look(self, width: int, scheme: str) -> None:
        """Look with this width and theme, once it is drawn."""
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=scheme)
        self.wait_for_drawings()

    def axe(self) -> list[str]:
        """What axe-core finds wrong, one line each."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [f"{rule['id']}: {rule['help']}: {node['html'][:160]}" for rule in found for node in rule["nodes"]]

    def colors(self, selector: str) -> set[str]:
        """The colours that a canvas shows, as "r,g,b"."""
        pixels = self.page.locator(selector).evaluate(
            """canvas => {
                const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                const seen = new Set();
                for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) seen.add(data.slice(i, i + 3).join());
                return [...seen];
            }"""
        )
        return set(pixels)
