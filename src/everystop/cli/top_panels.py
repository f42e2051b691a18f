"""The panels of `everystop top`: each draws what a `LiveView` knows as lines of a given width.

A width of None stands for lines as long as they need to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import sqrt
from typing import Any

from everystop.cli.top_lines import Line, drawn, shares, sparkline, stacked
from everystop.cli.top_view import (
    COLUMN_NS,
    DECODE,
    HELD,
    IDLE,
    NUM_COLUMNS,
    PADDED,
    PREFILL,
    RECOMPUTE,
    SECONDS,
    SKIPPED,
    SLOW,
    Column,
    LiveView,
    Minute,
)
from everystop.core.durations import NS_PER_S
from everystop.observe.block_map import EVICTABLE, FREE, PRIVATE, SHARED
from everystop.observe.wording import ANOTHER, counted, number_name
from everystop.words import duration

MARKS = {  # (character, colour); the character alone tells them apart
    PREFILL: ("▓", "#E69F00"),
    DECODE: ("█", "#0072B2"),
    SLOW: ("▀", "#56B4E9"),
    RECOMPUTE: ("/", "#B33C00"),
    SKIPPED: ("─", "#8B8B8B"),
    HELD: ("x", "#8B8B8B"),
    PADDED: ("▒", "#8B8B8B"),
    IDLE: (" ", ""),
}
STEP_KINDS = (DECODE, PREFILL, PADDED)
BLOCK_MARKS = {
    PRIVATE: ("█", "#0072B2"),
    SHARED: ("▓", "#E69F00"),
    EVICTABLE: ("░", "#8B8B8B"),
    FREE: ("·", "#8B8B8B"),
}
SLOT_KINDS = tuple(kind for kind in MARKS if kind != IDLE)
BLOCK_WORDS = {PRIVATE: "private", SHARED: "shared", EVICTABLE: "evictable", FREE: "free"}
UNBOUNDED_CHART = 120  # columns where lines may be as long as they need to be: 30 s
NUMBER_WIDTH, WHO_WIDTH, TOKENS_WIDTH = 3, 15, 14
LEAST_CHART = 16
TILE_TEXT, TILE_GAP = 26, 2
TWO_TILES_FROM, THREE_TILES_FROM = 76, 150
RULE = "─"
ENDS = {"abort": "⊘", "error": "✕"}


def title(width: int | None, name: str, *, legend: Line | None = None, tail: str = "") -> Line:
    """The line above a panel: its name, what the marks mean, and at the right what there is room for."""
    line = Line(f"{RULE} ", "dim").add(name, "bold")
    if legend is not None:
        line.add("  ").extend(legend)
    if width is None:
        return line.add(f"  {tail}" if tail else "")
    room = width - line.width - 3
    if tail and room > len(tail) + 2:
        return line.add(f" {RULE * (room - len(tail) - 1)} ", "dim").add(tail).add(f" {RULE}", "dim")
    return line.add(f" {RULE * (room + 2)}" if room > 0 else "", "dim")


def legend(kinds: Sequence[str], marks: dict[str, tuple[str, str]]) -> Line:
    """Each mark and its word."""
    line = Line()
    for kind in kinds:
        line.add(" " if line.width else "").add(*marks[kind]).add(f" {kind}")
    return line


def header(view: LiveView, url: str) -> Line:
    """What server it is."""
    server, message = view.server, view.message
    line = Line(f" {server['policy'].upper()} ", "reverse bold").add(f" {server['model']}", "bold")
    line.add(f"  Everystop {server['version']} at {url}, up {uptime(message['uptime_s'])}")
    if server["sees"] == "own":
        line.add("  (your own requests; others without names)")
    if message["dropped"]:
        line.add(f"  {message['dropped']:,} details dropped: this terminal is slow", "bold")
    return line


# ------------------------------------------------------------------ tiles


def tiles(view: LiveView, width: int | None) -> list[Line]:
    """The figures, each with its last minute, in as many columns as there is room for."""
    num_columns = 2 if width is None else 1 + (width >= TWO_TILES_FROM) + (width >= THREE_TILES_FROM)
    tile_width = None if width is None else (width - TILE_GAP * (num_columns - 1)) // num_columns
    drawn_tiles = [_tile(view, *tile, tile_width) for tile in _tiles(view)]
    lines = []
    for i in range(0, len(drawn_tiles), num_columns):
        line = Line()
        for tile in drawn_tiles[i : i + num_columns]:
            line.add(" " * TILE_GAP if line.width else "").extend(tile)
        lines.append(line)
    return lines


def _tiles(view: LiveView) -> Iterator[tuple[list[str], Minute, str]]:
    """Words, of which every second one is the figure; its last minute; and the method that gives its values."""
    now = view.message["tiles"]
    oldest = f", oldest {time_of(now['oldest_wait_ns'])}" if now["num_waiting"] else ""
    yield ["slots busy ", f"{now['slots_busy']}/{now['slots']}"], view.running, "levels"
    yield ["out ", f"{now['output_tokens_per_s']:,.0f}", " tok/s"], view.tokens, "rates"
    yield ["waiting ", f"{now['num_waiting']:,}", oldest], view.queued, "levels"
    yield ["TTFT p50 ", time_of(now["ttft_p50_ns"]), " p95 ", time_of(now["ttft_p95_ns"])], view.ttft, "highest"
    yield ["KV in use ", f"{now['kv_used_share']:.0%}"], view.kv, "levels"
    yield ["ITL p50 ", time_of(now["itl_p50_ns"]), " p99 ", time_of(now["itl_p99_ns"])], view.itl, "highest"


def _tile(view: LiveView, words: list[str], minute: Minute, method: str, width: int | None) -> Line:
    line = Line()
    for i, word in enumerate(words):
        line.add(word, "bold" if i % 2 else "")
    line.pad(TILE_TEXT).add(" ")
    room = SECONDS if width is None else width - line.width
    num = next((num for num in (60, 30, 20, 15, 12, 10, 6) if num <= room), 0)
    if num:
        values = getattr(minute, method)(view.now_ns, num)
        top = view.message["tiles"]["slots"] if minute is view.running else 1.0 if minute is view.kv else 0.0
        line.add(sparkline(values, max([top, *(value for value in values if value is not None)])), "#56B4E9")
    return line.pad(width or 0)


# ------------------------------------------------------------------ slots and steps


def chart_columns(width: int | None) -> int:
    """How many columns of 250 ms slots and steps have."""
    return UNBOUNDED_CHART if width is None else max(0, min(NUM_COLUMNS, width - gutter_width(width)))


def gutter_width(width: int | None) -> int:
    """What stands left of the charts: number, name and tokens of who is in the slot, as far as there is room."""
    widths = NUMBER_WIDTH + 1, WHO_WIDTH + 1, TOKENS_WIDTH + 1
    return next((sum(widths[:n]) for n in (3, 2) if width is None or sum(widths[:n]) + LEAST_CHART <= width), widths[0])


def chart_seconds(width: int | None) -> str:
    """How far back the charts go."""
    return f"last {chart_columns(width) * COLUMN_NS / NS_PER_S:.0f} s"


def slots(view: LiveView, width: int | None, most: int) -> list[Line]:
    """A line for each slot; the busy ones first, if there is no room for all."""
    shown, num_slots = _shown_slots(view, most), view.server["max_num_seqs"]
    lines = [_slot(view, slot, width) for slot in shown]
    if len(shown) < num_slots:
        num_busy = sum(slot in view.holders for slot in set(range(num_slots)).difference(shown))
        lines.append(Line(f"{'':{NUMBER_WIDTH}} {num_slots - len(shown):,} more, {num_busy:,} of them taken", "dim"))
    return lines


def _shown_slots(view: LiveView, most: int) -> list[int]:
    every = range(view.server["max_num_seqs"])
    if len(every) <= most:
        return list(every)
    return sorted(sorted(every, key=lambda slot: (slot not in view.holders, slot))[: most - 1])


def _slot(view: LiveView, slot: int, width: int | None) -> Line:
    who, tokens = "", ""
    request = view.requests.get(view.holders.get(slot, -1))
    if request is not None and request["name"] is None:
        who = ANOTHER
    elif request is not None:
        who = number_name(request["id"])
        tokens = f"{request['num_prompt_tokens']:,} + {request['num_output_tokens']:,}"
    line = Line(f"{slot:>{NUMBER_WIDTH}} ")
    gutter = gutter_width(width)
    if gutter > NUMBER_WIDTH + 1:
        line.add(f"{who:<{WHO_WIDTH}} ")
    if gutter > NUMBER_WIDTH + WHO_WIDTH + 2:
        line.add(f"{tokens:>{TOKENS_WIDTH}} ")
    num_columns = chart_columns(width)
    first = view.now_ns // COLUMN_NS - num_columns + 1
    kinds = [IDLE] * num_columns
    for column, kind in view.cells.get(slot, ()):
        if 0 <= column - first < num_columns:
            kinds[column - first] = kind
    return line.extend(drawn(kinds, MARKS))


def steps(view: LiveView, width: int | None, most: int) -> list[Line]:
    """What steps computed, a column for the largest of each 250 ms against the budget, below how long the longest took.

    The scale is a square root, or a few decodes would not be seen beside the budget.
    """
    num_columns, budget = chart_columns(width), view.server["max_num_batched_tokens"]
    first = view.now_ns // COLUMN_NS - num_columns + 1
    columns = {c.number - first: c for c in view.columns if 0 <= c.number - first < num_columns}
    num_rows = max(1, most - 1)
    top = max([budget, *(column.largest.num_tokens for column in columns.values())])
    picture = [_stack(columns.get(i), num_rows, top) for i in range(num_columns)]
    budget_row = max(0, round(num_rows * sqrt(budget / top)) - 1)
    longest = max((column.longest_ns for column in columns.values()), default=0)
    words = [*_step_words(view), *[""] * num_rows]
    lines = []
    for row in reversed(range(num_rows)):
        line = _gutter(words[num_rows - 1 - row], width)
        rule = "┄" if row == budget_row else " "
        for kind, run in groupby((column[row] for column in picture), key=lambda cell: cell[0] if cell[1] else IDLE):
            text = "".join(mark or rule for _, mark in run)
            line.add(text, MARKS[kind][1] if kind else "dim")
        lines.append(line)
    took = [columns[i].longest_ns if i in columns else None for i in range(num_columns)]
    said = f"step {time_of(view.last_busy.took_ns)}, longest {time_of(longest)}" if view.last_busy else "no step yet"
    lines.append(_gutter(said, width).add(sparkline(took, longest)))
    return lines[-most:]


def _step_words(view: LiveView) -> list[str]:
    step = view.last_busy
    if step is None:
        return []
    padded = f", {step.num_padded:,} padding" if step.num_padded else ""
    return [
        f"last: {step.num_decode:,} decode, {step.num_prefill:,} prefill{padded}",
        counted(step.num_tokens, "token"),
    ]


def _gutter(words: str, width: int | None) -> Line:
    room = gutter_width(width)
    return Line(words if room > WHO_WIDTH else "").cut(room - 1).pad(room)


def _stack(column: Column | None, num_rows: int, top: int) -> list[tuple[str, str]]:
    """(kind, character) of each row from the bottom up; where only decodes are, the uppermost in eighths."""
    if column is None:
        return [(IDLE, "")] * num_rows
    step = column.largest
    nums, parts, total = (step.num_decode, step.num_prefill, step.num_padded), [], 0
    for kind, num in zip(STEP_KINDS, nums, strict=True):
        total += num
        if num:
            parts.append((kind, num_rows * sqrt(total / top)))
    if [kind for kind, _ in parts] == [DECODE]:
        height = parts[0][1]
        marks = [sparkline([height - row], 1) if height > row else "" for row in range(num_rows)]
        return [(DECODE, mark) for mark in marks]
    return [(kind, MARKS[kind][0] if kind else "") for kind in stacked(parts, num_rows)]


# ------------------------------------------------------------------ KV cache


def kv_legend(view: LiveView) -> Line:
    """How many blocks are what."""
    line = Line()
    for kind, num in _blocks(view).items():
        line.add(" " if line.width else "").add(*BLOCK_MARKS[kind]).add(f" {BLOCK_WORDS[kind]} {num:,}")
    num_evicted = 0 if view.last_step is None else view.last_step.num_evicted_blocks
    return line.add(f" of {view.server['num_blocks']:,} blocks").add(f", {num_evicted:,} evicted" * bool(num_evicted))


def kv_bar(view: LiveView, width: int | None) -> Line:
    """All blocks as one bar."""
    blocks = _blocks(view)
    given = shares(list(blocks.values()), UNBOUNDED_CHART if width is None else width)
    kinds = [kind for kind, num in zip(blocks, given, strict=True) for _ in range(num)]
    return drawn(kinds, BLOCK_MARKS)


def _blocks(view: LiveView) -> dict[str, int]:
    """As the stream tells it; before the engine has been asked, all that is held counts as private."""
    if view.blocks is not None:
        return {kind: view.blocks[kind] for kind in BLOCK_MARKS}
    num_blocks, step = view.server["num_blocks"], view.last_step
    num_free = num_blocks if step is None else step.num_free_blocks
    num_cached = 0 if step is None else step.num_cached_blocks
    return {PRIVATE: num_blocks - num_free, SHARED: 0, EVICTABLE: num_cached, FREE: num_free - num_cached}


# ------------------------------------------------------------------ requests


def waiting(view: LiveView, most: int) -> list[Line]:
    """The first to board, and why each is not on board."""
    if not view.waiting:
        return [Line("nobody waits", "dim")]
    return [_waiter(one, view.now_ns) for one in view.waiting[:most]]


def _waiter(one: dict[str, Any], now_ns: int) -> Line:
    if one["name"] is None:
        return Line(ANOTHER)
    length = "" if one["num_prompt_tokens"] is None else f"{one['num_prompt_tokens']:,} tokens"
    since = f"for {time_of(now_ns - one['since_ns'])}"
    return Line(f"{number_name(one['id']):<7} {length:<13} {since:<11} {one['sentence']}")


# (head, width, how important; the least important ones go first where lines are short)
REQUEST_COLUMNS = (
    ("request", 7, 0),
    ("state", 8, 5),
    ("prompt", 7, 6),
    ("output", 6, 4),
    ("queued", 7, 7),
    ("TTFT", 7, 1),
    ("ITL p99", 7, 8),
    ("max gap", 7, 2),
    ("E2E", 7, 3),
)
CAUSE_WIDTH = 20


def recent(view: LiveView, width: int | None, most: int) -> list[Line]:
    """The newest requests under a line of heads; those of others are not listed."""
    known = sorted((one for one in view.requests.values() if one["name"] is not None), key=lambda one: -one["id"])
    texts = [_request_texts(view, one) for one in known[: max(0, most - 1)]]
    shown = _shown_columns(width)
    heads = [*(head for head, _, _ in REQUEST_COLUMNS), "main cause"]
    lines = [Line(_row(heads, shown), "dim")]
    if not texts:
        return [*lines, Line("none in the last minute", "dim")][:most]
    return [*lines, *(Line(_row(text, shown)) for text in texts)]


def _shown_columns(width: int | None) -> list[int]:
    room = None if width is None else width - CAUSE_WIDTH
    shown = list[int]()
    for i in sorted(range(len(REQUEST_COLUMNS)), key=lambda i: REQUEST_COLUMNS[i][2]):
        room = None if room is None else room - REQUEST_COLUMNS[i][1] - 1
        if room is not None and room < 0 and shown:
            break
        shown.append(i)
    return sorted(shown)


def _row(texts: Sequence[str], shown: Sequence[int]) -> str:
    cells = [f"{texts[i]:{'<' if i < 2 else '>'}{REQUEST_COLUMNS[i][1]}}" for i in shown]
    return " ".join([*cells, texts[-1]])


def _request_texts(view: LiveView, one: dict[str, Any]) -> list[str]:
    arrival_ns, is_over = one["arrival_ns"], one["finish_ns"] is not None
    reason = one["finish_reason"] or "finished"
    return [
        number_name(one["id"]),
        f"{ENDS.get(reason, '●')} {reason}" if is_over else one["state"],
        f"{one['num_prompt_tokens']:,}",
        f"{one['num_output_tokens']:,}",
        _between(arrival_ns, one["admit_ns"]),
        _between(arrival_ns, one["first_token_ns"]),
        time_of(view.gaps.p99(one)),
        time_of(view.gaps.longest(one)),
        _between(arrival_ns, one["finish_ns"]),
        one["blame"] or ("–" if is_over else ""),
    ]


def _between(from_ns: int | None, to_ns: int | None) -> str:
    return time_of(None if from_ns is None or to_ns is None else to_ns - from_ns)


def decisions(view: LiveView, most: int) -> list[Line]:
    """The last sentences, the newest below."""
    return [Line(text) for text in list(view.acts)[-most:]] if view.acts else [Line("none yet", "dim")]


def time_of(ns: int | None) -> str:
    """A duration as explanations write it; a dash for none."""
    return "–" if ns is None else duration(ns)


def uptime(seconds: float) -> str:
    """How long the server has been there: 2.3 s, 4 min 5 s, 5 h 33 min."""
    minutes = round(seconds) // 60
    return duration(round(seconds * NS_PER_S)) if minutes < 120 else f"{minutes // 60:,} h {minutes % 60} min"
