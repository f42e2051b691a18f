"""How long the benchmark may take, and what was left out for it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

Say = Callable[[str], None]


class Budget:
    """Runs parts one after the other while there is time; `results` by name, None where a part was left out. `keep` is
    called after each, for a device may be taken away at any time.
    """

    def __init__(self, limit_s: float, say: Say, keep: Callable[[], None] = lambda: None) -> None:
        self._end_s = time.monotonic() + limit_s
        self._say = say
        self._keep = keep
        self.results: dict[str, Any] = {}
        self.notes: list[str] = []

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self._end_s - time.monotonic()

    def run(self, name: str, needs_s: float, part: Callable[[], Any]) -> Any:
        """Run a part that takes about `needs_s`; a failure is noted, said with where it came from, and ends that part
        alone.
        """
        if self.left_s < needs_s:
            self.notes.append(f"{name} was left out: {self.left_s:.0f} s were left, and it takes about {needs_s:.0f}")
            self._say(self.notes[-1])
            self.results[name] = None
            self._keep()
            return None
        began_s = time.monotonic()
        try:
            self.results[name] = part()
        except Exception as error:
            self.notes.append(f"{name} failed: {type(error).__name__}: {error}")
            self.results[name] = None
            self._say(traceback.format_exc())
        self._keep()
        self._say(f"{name}: {time.monotonic() - began_s:.1f} s; {self.results[name]}")
        return self.results[name]
