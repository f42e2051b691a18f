"""The screen of `everystop top` at several sizes, and the parts that it is made of."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
from rich.console import Console
from tests.cli.streams import MS, START_NS, S, first, request, step

from everystop.cli.top_lines import Ink, Line, shares, sparkline, stacked
from everystop.cli.top_panels import MARKS
from everystop.cli.top_screen import LiveScreen
from everystop.cli.top_terminal import Terminal
from everystop.cli.top_view import LiveView

SENTENCE = "step 1042: kept 7 decodes, admitted r17 (256 of 900 prompt tokens); r12 waits: it needs 3 more KV blocks"
PANELS = ("slots 2/8", "waiting 1", "decisions", "KV cache", "recent requests", "steps, budget of 256 tokens")


def busy(**server: Any) -> LiveView:
    """A server for 5 s of 50 steps: r3 decodes and is preempted, r4 reads its prompt, r5 is over, r12 waits."""
    steps = []
    for i in range(50):
        begin_ns = START_NS + i * 100 * MS
        row = (3, 3, 64, 0) if 40 <= i < 44 else (3, 3, 1, 1)
        rows = [row, (4, 4, 100, 0)] if i % 10 == 0 else [row]
        steps.append(step(begin_ns, begin_ns + 100 * MS, rows, num_waiting=1))
    now_ns = START_NS + 5 * S
    over = {"state": "finished", "finish_reason": "length", "first_token_ns": START_NS + 250 * MS}
    requests = [
        request(3, first_token_ns=START_NS - S, num_output_tokens=46, max_gap_ns=340 * MS),
        request(4),
        request(5, **over, finish_ns=now_ns - MS, num_output_tokens=20, blame="others' prefill in its steps"),
        request(-2, name=None, slot=6, num_prompt_tokens=None, num_output_tokens=None, arrival_ns=None),
    ]
    waiter = {"id": 12, "name": "x", "num_prompt_tokens": 900, "since_ns": now_ns - 1_400 * MS, "sentence": "no slot"}
    blocks = {"runs": [["p", 25, 3], ["f", 50, -1], ["s", 5, 4], ["e", 20, -1]]}
    view = LiveView()
    told = {"steps": steps, "requests": requests, "acts": [[now_ns, 1042, SENTENCE]], "kv": blocks}
    view.take(first(now_ns, server=server, num_waiting=1, waiting=[waiter], **told))
    return view


def texts(width: int | None, height: int | None, **server: Any) -> list[str]:
    return [line.plain for line in LiveScreen(busy(**server), "http://127.0.0.1:8000").lines(width, height)]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60)])
def test_all_panels_fit_and_nothing_is_wider_or_higher(width: int, height: int) -> None:
    lines = LiveScreen(busy(), "http://127.0.0.1:8000").lines(width, height)
    assert len(lines) == height
    assert max(line.width for line in lines) <= width
    assert all(line.width == len(line.plain) for line in lines)
    screen = "\n".join(line.plain for line in lines)
    for words in (*PANELS, "CONTINUOUS  parrot", "out 312 tok/s", "TTFT p50 45 ms p95 340 ms", "no slot"):
        assert words in screen, screen
    assert "private 25 ▓ shared 5 ░ evictable 20 · free 50 of 100 blocks" in screen
    assert "last: 1 decode, 0 prefill" in screen


def test_without_a_terminal_nothing_is_cut() -> None:
    screen = "\n".join(texts(None, None))
    assert "…" not in screen
    assert SENTENCE in screen
    assert "last 30 s" in screen
    assert "\n  7 " in screen
    for words in (*PANELS, "others' prefill in its steps", "r12     900 tokens    for 1.4 s   no slot"):
        assert words in screen, screen
    assert "others' prefill in its steps" in next(line for line in screen.splitlines() if line.startswith("r5 "))


def test_a_terminal_cuts_what_is_too_long() -> None:
    line = next(line for line in texts(80, 24) if line.startswith("step 1042"))
    assert len(line) == 80
    assert line.endswith("…")


def test_what_there_is_no_room_for_is_left_out_in_order() -> None:
    shown = []
    for height in range(1, 41):
        lines = texts(80, height)
        assert len(lines) == height
        shown.append({name for name in PANELS if any(line.startswith(f"─ {name}") for line in lines)})
    for fewer, more in itertools.pairwise(shown):
        assert fewer <= more
    order = [name for height in range(40) for name in PANELS if name in shown[height] - shown[max(0, height - 1)]]
    assert order == list(PANELS)


@pytest.mark.parametrize("width", [1, 5, 20, 40, 55, 75, 76, 77, 149, 150, 500])
def test_no_width_breaks_it(width: int) -> None:
    for height in (1, 5, 24, 100):
        lines = texts(width, height)
        assert len(lines) == height
        assert max(map(len, lines)) <= width


def test_lines_stay_where_they_are_whatever_happens() -> None:
    quiet = LiveView()
    quiet.take(first(START_NS))

    def places(view: LiveView) -> list[int]:
        lines = LiveScreen(view, "http://x").lines(120, 40)
        return [i for i, line in enumerate(lines) if line.plain.startswith("─ ")]

    assert places(quiet) == places(busy())


def test_a_server_that_has_done_nothing_has_a_whole_screen() -> None:
    view = LiveView()
    view.take(first(START_NS))
    screen = "\n".join(line.plain for line in LiveScreen(view, "http://x").lines(120, 40))
    for words in ("nobody waits", "none yet", "none in the last minute", "no step yet", "free 100 of 100 blocks"):
        assert words in screen, screen


def test_busy_slots_come_first_where_there_are_too_many() -> None:
    lines = texts(80, 30, max_num_seqs=64)
    begin = next(i for i, line in enumerate(lines) if line.startswith("─ slots"))
    end = next(i for i, line in enumerate(lines) if line.startswith("─ steps"))
    shown = [line.split()[0] for line in lines[begin + 1 : end - 1]]
    assert {"3", "4"} <= set(shown)
    assert lines[end - 1].split() == [str(64 - len(shown)), "more,", "0", "of", "them", "taken"]


def test_each_kind_has_a_mark_of_its_own_and_recompute_is_drawn() -> None:
    assert len({mark for mark, _ in MARKS.values()}) == len(MARKS)
    line = next(line for line in texts(120, 40) if line.startswith("  3 "))
    assert "r3" in line
    assert "100 + 46" in line
    assert "/" in line
    assert "█" in line


def test_composition_shows_prefill_above_decode_below_the_budget() -> None:
    lines = [line.ljust(155) for line in texts(None, None)]
    begin = next(i for i, line in enumerate(lines) if line.startswith("─ steps"))
    rows = [line[35:] for line in lines[begin + 1 : begin + 8]]
    columns = ["".join(reversed(column)) for column in zip(*rows, strict=True)]
    assert len(columns) == 120  # of 250 ms; each square root of the share of the budget, in 7 rows
    assert set(columns) == {"█▓▓▓  ┄", "▓▓▓▓▓▓┄", "▓▓▓▓  ┄", "▄     ┄", "      ┄"}
    assert columns[-1] == "      ┄"  # now: the last step ended as the column before did
    assert columns[-2] == "▄     ┄"


def test_nothing_is_shown_of_requests_of_others() -> None:
    screen = texts(None, None, sees="own")
    assert "your own requests; others without names" in screen[0]
    heads = next(i for i, line in enumerate(screen) if line.startswith("─ recent requests"))
    assert "your own" in screen[heads]
    assert [line.split()[0] for line in screen[heads + 2 : heads + 5]] == ["r5", "r4", "r3"]
    assert not any("r-2" in line for line in screen)


def test_what_a_server_says_cannot_command_the_terminal() -> None:
    assert Line("a\x1b[2Jb\nc").plain == "a\ufffd[2Jb\ufffdc"


def test_lines_are_cut_between_and_inside_pieces() -> None:
    line = Line("abc", "bold").add("def")
    assert [line.cut(width).plain for width in (0, 1, 3, 4, 5, 6)] == ["", "…", "ab…", "abc…", "abcd…", "abcdef"]
    assert Line("日本語").cut(4).plain == "日 …"


def test_sparklines_have_a_mark_for_each_value() -> None:
    assert sparkline([None, 0, 1, 4, 8, 9], 8) == " ▁▁▄██"
    assert sparkline([0, None], 0) == "▁ "


@pytest.mark.parametrize(
    ("nums", "width", "given"),
    [
        ([1, 60, 39], 10, [1, 6, 3]),
        ([0, 0, 0, 2048], 80, [0, 0, 0, 80]),
        ([1, 1, 1, 2045], 4, [1, 1, 1, 1]),
        ([0, 0], 10, [0, 0]),
        ([5], 0, [0]),
        ([14, 0, 0, 2034], 120, [1, 0, 0, 119]),
        ([1, 1, 1, 1], 3, [0, 1, 1, 1]),
    ],
)
def test_shares_of_a_bar(nums: list[int], width: int, given: list[int]) -> None:
    assert shares(nums, width) == given


def test_stacked_kinds_each_get_a_row_where_there_is_room() -> None:
    assert stacked([("d", 0.1), ("p", 3.0)], 4) == ["d", "p", "p", ""]
    assert stacked([("d", 0.1), ("p", 0.2), ("x", 0.3)], 3) == ["d", "p", "x"]
    assert stacked([("d", 3.9), ("p", 4.0)], 4) == ["d", "d", "d", "p"]
    assert stacked([("d", 1.0), ("p", 2.0)], 1) == ["p"]
    assert stacked([], 2) == ["", ""]


def terminal(**options: Any) -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=20, height=3, color_system="truecolor", **options)
    return console, written


def test_only_lines_that_have_changed_are_written() -> None:
    console, written = terminal()
    screen = Terminal(console)
    screen.show([Line("a"), Line("b"), Line("c"), Line("d")])
    assert written.getvalue().count("H") == 3  # as many as there is room for
    written.truncate(written.seek(0))
    screen.show([Line("a"), Line("x"), Line("c")])
    assert written.getvalue() == "\x1b[2;1Hx" + " " * 19
    written.truncate(written.seek(0))
    screen.show([Line("a"), Line("x"), Line("c")])
    assert written.getvalue() == ""


def test_no_color_leaves_bold_and_no_colours() -> None:
    coloured, _ = terminal()
    plain, _ = terminal(no_color=True)
    line = Line("a", "bold").add("b", "#E69F00")
    assert "38;2;230;159;0" in Ink(coloured).text(line)
    assert Ink(plain).text(line) == "\x1b[1ma\x1b[0mb"
    assert Ink(Console(file=io.StringIO())).text(line) == "ab"
