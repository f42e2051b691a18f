"""Looks at a harness after each of its turns, also within an episode of the fuzzer."""

from __future__ import annotations

from collections.abc import Callable

from tests.core.harness import Harness

from everystop.engine.loop import Turn


def after_each_turn(harness: Harness, look: Callable[[Harness], None]) -> None:
    """Call `look` whenever the harness has turned."""
    turn = harness.turn

    def turn_and_look() -> Turn:
        done = turn()
        look(harness)
        return done

    harness.turn = turn_and_look  # type: ignore[method-assign]
