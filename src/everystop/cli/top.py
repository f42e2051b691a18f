"""`everystop top`: the live dashboard of a running server in a terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from everystop.cli import settings
from everystop.core.errors import EverystopError, RemoteError

if TYPE_CHECKING:
    from rich.console import Console

    from everystop.cli.remote import Remote
    from everystop.cli.top_view import LiveView

STREAM = "/ui/stream"
POLL_S = 0.1
REDRAW_S = 0.25
MESSAGES_FOR_BLOCKS = 4
QUIT = frozenset("qQ\x04")


def add_parser(commands: Any) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "top",
        usage="everystop top [--url URL] [options]",
        help="watch a running server in the terminal",
        description="Watch a running server in the terminal: what /ui shows in a browser. q ends it.",
        formatter_class=settings.HelpFormatter,
        allow_abbrev=False,
    )
    settings.add_remote_options(parser)
    parser.add_argument(
        "--once", action="store_true", help="print how things stand once, and end (as where the output is no terminal)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show until q, Ctrl-C or the server's end."""
    from rich.console import Console

    from everystop.cli.remote import Remote
    from everystop.trial.interrupts import noted_interrupts

    remote = Remote(arguments.url, arguments.api_key, arguments.ca_file)
    console = Console(highlight=False)
    if arguments.once or not console.is_terminal or console.is_dumb_terminal:
        return _print_once(remote, console)
    try:
        with noted_interrupts() as check:
            return _watch(remote, console, check)
    except KeyboardInterrupt:
        return 0


def _print_once(remote: Remote, console: Console) -> int:
    """All panels, as wide as the terminal; where there is none, as wide as they need to be, or as COLUMNS says."""
    from everystop.cli.top_lines import Ink
    from everystop.cli.top_screen import LiveScreen
    from everystop.cli.top_view import LiveView

    view, num_messages = LiveView(), 0
    for message in remote.events(STREAM):
        view.take(message)
        num_messages += not message["more"]
        if view.blocks is None and 0 < num_messages < MESSAGES_FOR_BLOCKS and "end" not in message:
            continue  # the engine is asked for them when a reader comes, and answers soon
        if num_messages:
            ink = Ink(console)
            for line in LiveScreen(view, remote.url).lines(_width(console), None):
                print(ink.text(line).rstrip())
            return 0
    raise RemoteError(f"the stream of {remote.url} ended before it had told anything")


def _width(console: Console) -> int | None:
    return console.width if console.is_terminal or os.environ.get("COLUMNS", "").isdigit() else None


class _Feed(threading.Thread):
    """Reads the stream beside the screen; `messages` ends with the error that ended it, if the server has not."""

    def __init__(self, remote: Remote) -> None:
        super().__init__(name="everystop-top", daemon=True)
        self._remote = remote
        self.messages: queue.SimpleQueue[dict[str, Any] | EverystopError] = queue.SimpleQueue()

    def run(self) -> None:
        try:
            for message in self._remote.events(STREAM):
                self.messages.put(message)
            self.messages.put(RemoteError(f"the stream of {self._remote.url} broke off"))
        except EverystopError as error:
            self.messages.put(error)


def _watch(remote: Remote, console: Console, check: Callable[[], None]) -> int:
    from everystop.cli.top_view import LiveView

    view, feed = LiveView(), _Feed(remote)
    feed.start()
    first = feed.messages.get()  # an error is said before the screen is taken
    if isinstance(first, EverystopError):
        raise first
    view.take(first)
    end = _show(view, feed, remote.url, console, check)
    if end:
        console.print(f"{remote.url}: {end}")
    return 0


def _show(view: LiveView, feed: _Feed, url: str, console: Console, check: Callable[[], None]) -> str:
    """Redraw while messages come; returns why the server ended it, "" for the user's own wish. `check` raises a Ctrl-C
    that was lost where it came.
    """
    from everystop.cli.top_screen import LiveScreen
    from everystop.cli.top_terminal import Terminal

    screen, next_s = LiveScreen(view, url), 0.0
    with _keys() as keys, Terminal(console) as terminal:
        while True:
            if not view.message["more"] and time.monotonic() >= next_s:
                next_s = time.monotonic() + REDRAW_S
                terminal.show(screen.lines(*terminal.size))
            message = _next(feed)
            check()
            if any(key in QUIT for key in keys()):
                return ""
            if isinstance(message, EverystopError):
                raise message
            if message is not None:
                view.take(message)
                if "end" in message:
                    return str(message["end"])


def _next(feed: _Feed) -> dict[str, Any] | EverystopError | None:
    """The next message, if one comes soon."""
    try:
        return feed.messages.get(timeout=POLL_S)
    except queue.Empty:
        return None


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """A function that returns the keys pressed since it was called last; none where the input is no terminal."""
    if not sys.stdin.isatty():
        yield lambda: ""
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed() -> str:
        is_ready = select.select([descriptor], [], [], 0)[0]
        return os.read(descriptor, 64).decode(errors="replace") if is_ready else ""

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
