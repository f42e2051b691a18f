"""The progress bar of `everystop compare`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everystop.trial.repeats import Watcher


@contextlib.contextmanager
def progress_bars(num_repeats: int, *, show: bool) -> Iterator[Watcher]:
    """One bar on standard error for the run in progress; silent where nobody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    layout = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*layout, console=console, transient=True, disable=not show, refresh_per_second=2) as bars:
        task = bars.add_task("the model is being loaded", total=None)
        yield Bars(partial(bars.update, task), num_repeats)


@dataclass(slots=True)
class Bars:
    """Shows how far a comparison has come."""

    update: Callable[..., None]
    num_repeats: int

    def begin(self, policy: str, repeat: int | None) -> None:
        """A run begins."""
        which = "warm-up" if repeat is None else f"{policy}, repeat {repeat + 1} of {self.num_repeats}"
        self.update(description=which, completed=0)

    def advance(self, num_over: int, num_all: int) -> None:
        """So many of its requests are over."""
        self.update(completed=num_over, total=num_all)
