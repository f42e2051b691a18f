"""A peer that needs no installing: the OpenVINO front over a pipeline that counts, in a process of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.openvino_front import Front
from benchmarks.peers.peer import Crowd, Launch, Place, Say, Setting

ROOT = Path(__file__).parents[3]
STEP_S = 0.001


class CountingHandle:
    """Gives one token a step, from the prompt's first one on; ends early if `is_short`."""

    def __init__(self, first: int, max_tokens: int, *, is_short: bool) -> None:
        self._next, self._left = first, max_tokens - is_short
        self.is_dropped = False

    def take(self) -> tuple[list[int], bool]:
        self._next, self._left = self._next + 1, self._left - 1
        return [self._next - 1], self._left == 0

    def drop(self) -> None:
        self.is_dropped = True


def make_front(port: int, *, every: int = 1, is_short: bool = False) -> Front:
    """Each token has text, or only each `every`-th one."""

    def make_decoder() -> Callable[[int], str | None]:
        count = iter(range(1, 1 << 30))
        return lambda token: f"{token} " if next(count) % every == 0 else None

    return Front(
        port,
        lambda prompt, max_tokens: CountingHandle(prompt[0], max_tokens, is_short=is_short),
        lambda: time.sleep(STEP_S),
        make_decoder,
    )


class FakePeer:
    """`settings` name what is wrong with it, if anything is."""

    title = "A fake"
    is_swept = True
    settings = (Setting("good"), Setting("batches"), Setting("short"), Setting("broken"))
    remarks = ("fake: it only counts.",)

    def __init__(self, name: str = "fake", *, is_swept: bool = True) -> None:
        self.name, self.is_swept = name, is_swept
        self.reason: str | None = None

    def install(self, place: Place, say: Say) -> None:
        say("nothing to install")

    def fault(self, place: Place) -> str | None:
        return self.reason

    def version(self, place: Place) -> str:
        return "1.0"

    def launch(self, place: Place, setting: Setting, crowd: Crowd, port: int) -> Launch:
        command = (sys.executable, "-m", "tests.benchmarks.peers.fake", str(port), setting.name)
        return Launch(
            command=command,
            environment={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            stats_path="/stats",
            start_timeout_s=60,
        )


if __name__ == "__main__":
    if sys.argv[2] == "broken":
        raise SystemExit("no such thing as a working fake")
    make_front(int(sys.argv[1]), every=2 if sys.argv[2] == "batches" else 1, is_short=sys.argv[2] == "short").serve()
