"""Clients that keep a server busy while somebody looks at it: a closed loop of prompts of many lengths."""

from __future__ import annotations

import http.client
import json
import random
import threading
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

PREFIX = "You are the conductor of a bus that stops at every corner. Answer each passenger shortly, kindly and truly. "
WORDS = [
    "stop",
    "street",
    "corner",
    "morning",
    "ticket",
    "seat",
    "window",
    "driver",
    "rain",
    "bridge",
    "market",
    "school",
    "river",
    "garden",
    "station",
]
PROMPT_WORDS = (8, 20, 40, 90, 400)
OUTPUT_TOKENS = (20, 40, 80, 140, 320)
PAUSE_S = 0.05


class Crowd:
    """A context: `size` clients, each with one request at a time, until the block is left.

    `answered` are the ids of the requests that are over, in the order of their ends. Reproducible but for timing.
    """

    def __init__(self, url: str, size: int, seed: int = 1) -> None:
        self.answered: list[str] = []
        self._netloc = urlsplit(url).netloc
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ride, args=(random.Random(seed + i),)) for i in range(size)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ride(self, dice: random.Random) -> None:
        while not self._stop.wait(dice.uniform(0, PAUSE_S)):
            words = " ".join(dice.choice(WORDS) for _ in range(dice.choice(PROMPT_WORDS)))
            prompt = (PREFIX if dice.random() < 0.5 else "") + words
            self.answered.append(self._ask(prompt, dice.choice(OUTPUT_TOKENS)))

    def _ask(self, prompt: str, max_tokens: int) -> str:
        connection = http.client.HTTPConnection(self._netloc, timeout=120)
        body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = json.load(connection.getresponse())
        connection.close()
        return str(answer["id"])
