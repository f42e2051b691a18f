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
import tty
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from everystop.cli import settings
from everystop.core.errors import EverystopError, RemoteError

if TYPE_CHECKING:
    from rich.console import Console

    from everystop.cli.remote import Remote
    from everystop.cli.top_screen import LiveScreen

STREAM = "/ui/stream"
POLL_S = 0.1
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

    remote = Remote(arguments.url, arguments.api_key, arguments.ca_file)
    console = Console(highlight=False)
    if arguments.once or not console.is_terminal:
        return _print_once(remote, console)
    try:
        return _watch(remote, console)
    except KeyboardInterrupt:
        return 0


def _print_once(remote: Remote, console: Console) -> int:
    from everystop.cli.top_screen import LiveScreen

    screen = LiveScreen(remote.url)
    for message in remote.events(STREAM):
        screen.take(message)
        if not message["more"]:
            console.print(screen.render(console.width, _height(console)))
            return 0
    raise RemoteError(f"the stream of {remote.url} ended before it had told anything")


def _height(console: Console) -> int:
    """Lines to fill; enough for the essentials where the output is no terminal."""
    return console.height if console.is_terminal else 48


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


def _watch(remote: Remote, console: Console) -> int:
    from everystop.cli.top_screen import LiveScreen

    screen, feed = LiveScreen(remote.url), _Feed(remote)
    feed.start()
    first = feed.messages.get()  # an error is said before the screen is taken
    if isinstance(first, EverystopError):
        raise first
    screen.take(first)
    end = _show(screen, feed, console)
    if end:
        console.print(f"{remote.url}: {end}")
    return 0


def _show(screen: LiveScreen, feed: _Feed, console: Console) -> str:
    """Redraw at each message; returns why the server ended it, "" for the user's own wish."""
    from rich.live import Live

    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen.render(console.width, console.height), refresh=True)
            while (message := _next(feed)) is None:
                if any(key in QUIT for key in keys()):
                    return ""
            if isinstance(message, EverystopError):
                raise message
            screen.take(message)
            if "end" in message:
                return str(message["end"])
            if any(key in QUIT for key in keys()):
                return ""


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
