"""The screen of `everystop top`: what the live stream has told, as tiles, slots, waiting requests and decisions."""

from __future__ import annotations

from collections import deque
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from everystop.core.durations import NS_PER_MS, NS_PER_S
from everystop.words import duration

COLUMN_NS = 250 * NS_PER_MS
NUM_COLUMNS = 240  # a minute
WHO_COLUMNS, TOKENS_COLUMNS = 15, 21
NUM_FIXED_COLUMNS = WHO_COLUMNS + TOKENS_COLUMNS + 8  # of a slot's line, with the slot's number
LEAST_CHART = 10
PREFILL, DECODE, PADDED, HELD, SKIPPED, IDLE = "prefill", "decode", "padded", "held", "skipped", "idle"
MARKS = {  # (character, colour); the character alone tells them apart
    PREFILL: ("▓", "#E69F00"),
    DECODE: ("█", "#0072B2"),
    PADDED: ("▒", "#8B8B8B"),
    HELD: ("x", "#8B8B8B"),
    SKIPPED: ("─", "#56B4E9"),
    IDLE: (" ", ""),
}
RANKS = {kind: rank for rank, kind in enumerate((IDLE, SKIPPED, HELD, PADDED, DECODE, PREFILL))}
LEGEND = (PREFILL, DECODE, SKIPPED, HELD, PADDED)


class LiveScreen:
    """Folds messages in with `take`; `render` draws what is known for a terminal of a given size."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._server: dict[str, Any] = {}
        self._message: dict[str, Any] = {}
        self._queue: list[dict[str, Any]] = []
        self._requests: dict[int, dict[str, Any]] = {}
        self._holders: dict[int, int] = {}  # request by slot
        self._cells: dict[int, deque[tuple[int, str]]] = {}  # (column, kind) by slot
        self._acts: deque[str] = deque(maxlen=200)

    def take(self, message: dict[str, Any]) -> None:
        """One message of the stream."""
        if message["full"]:
            self._server = message["server"]
            self._requests.clear()
        self._message = message
        self._queue = message.get("waiting", self._queue)
        for request in message["requests"]:
            self._requests[request["id"]] = request
        for step in message["steps"]:
            self._take_step(step)
        self._acts.extend(text for _, _, text in message["acts"])
        self._forget(message["now_ns"] - COLUMN_NS * NUM_COLUMNS)

    def _take_step(self, step: list[Any]) -> None:
        now_ns, num_padded, num_held, rows = step[2], step[6], step[9], step[13]
        first_padded, seen = len(rows) - 4 * num_padded, set()
        for i in range(0, len(rows), 4):
            slot, request_id, num_tokens, num_outputs = rows[i : i + 4]
            seen.add(slot)
            self._holders[slot] = request_id
            kind = DECODE if num_tokens == 1 and num_outputs else PREFILL
            self._mark(slot, now_ns, PADDED if i >= first_padded else kind)
        for slot in [slot for slot in self._holders if slot not in seen]:
            request = self._requests.get(self._holders[slot])
            if request is not None and request["state"] == "running":
                self._mark(slot, now_ns, SKIPPED)
            elif num_held:
                self._mark(slot, now_ns, HELD)
            else:
                del self._holders[slot]

    def _mark(self, slot: int, now_ns: int, kind: str) -> None:
        """In one column the most telling kind wins: a chunk of a prompt over a hundred decodes."""
        column, cells = now_ns // COLUMN_NS, self._cells.setdefault(slot, deque(maxlen=NUM_COLUMNS))
        if cells and cells[-1][0] == column:
            if RANKS[kind] > RANKS[cells[-1][1]]:
                cells[-1] = (column, kind)
        else:
            cells.append((column, kind))

    def _forget(self, before_ns: int) -> None:
        for request_id, request in list(self._requests.items()):
            if request["finish_ns"] is not None and request["finish_ns"] < before_ns:
                del self._requests[request_id]

    # ------------------------------------------------------------------ draw

    def render(self, width: int, height: int) -> RenderableType:
        """The whole screen; slots, then waiting requests, then decisions get what lines there are."""
        tiles = self._message["tiles"]
        num_free = max(0, height - 12)
        slots = self._shown_slots(max(3, num_free * 3 // 5))
        num_waiting = min(len(self._queue), max(1, num_free // 5))
        num_acts = max(2, num_free - len(slots) - num_waiting)
        return Group(
            self._header(),
            self._tiles(tiles),
            Panel(
                self._slots(slots, width - 4), title=f"slots {tiles['slots_busy']}/{tiles['slots']}", title_align="left"
            ),
            Panel(self._waiting(num_waiting), title=f"waiting {self._message['num_waiting']:,}", title_align="left"),
            Panel(self._decisions(num_acts), title="decisions", title_align="left"),
        )

    def _header(self) -> Text:
        server, message = self._server, self._message
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(f" {server['policy'].upper()} ", style="reverse bold")
        text.append(f" {server['model']}", style="bold")
        text.append(f"  Everystop {server['version']} at {self._url}, up {uptime(message['uptime_s'])}")
        if server["sees"] == "own":
            text.append("  (your own requests; others without names)")
        if message["dropped"]:
            text.append(f"  {message['dropped']:,} details dropped: this terminal is slow", style="bold")
        return text

    def _tiles(self, tiles: dict[str, Any]) -> Table:
        oldest = f", oldest {time_of(tiles['oldest_wait_ns'])}" if tiles["num_waiting"] else ""
        row = [
            f"slots busy [bold]{tiles['slots_busy']}/{tiles['slots']}[/]",
            f"waiting [bold]{tiles['num_waiting']:,}[/]{oldest}",
            f"KV [bold]{tiles['kv_used_share']:.0%}[/]",
            f"out [bold]{tiles['output_tokens_per_s']:,.0f}[/] tok/s",
            f"TTFT p50 [bold]{time_of(tiles['ttft_p50_ns'])}[/] p95 [bold]{time_of(tiles['ttft_p95_ns'])}[/]",
            f"ITL p50 [bold]{time_of(tiles['itl_p50_ns'])}[/] p99 [bold]{time_of(tiles['itl_p99_ns'])}[/]",
        ]
        table = Table.grid(padding=(0, 3))
        table.add_row(*row[:4])
        lower = Table.grid(padding=(0, 3))
        lower.add_row(*row[4:], "over the last 60 s")
        whole = Table.grid()
        whole.add_row(table)
        whole.add_row(lower)
        return whole

    def _shown_slots(self, most: int) -> list[int]:
        """The busy ones first, if there is no room for all."""
        slots = range(self._server["max_num_seqs"])
        if len(slots) <= most:
            return list(slots)
        return sorted(sorted(slots, key=lambda slot: (slot not in self._holders, slot))[: most - 1])

    def _slots(self, slots: list[int], width: int) -> Table:
        table = Table.grid(padding=(0, 1))
        table.add_column(justify="right", no_wrap=True)
        table.add_column(width=WHO_COLUMNS, no_wrap=True)
        table.add_column(justify="right", width=TOKENS_COLUMNS, no_wrap=True)
        table.add_column(no_wrap=True)
        num_columns = max(LEAST_CHART, min(NUM_COLUMNS, width - NUM_FIXED_COLUMNS))
        for slot in slots:
            who, tokens = self._rider(slot)
            table.add_row(str(slot), who, tokens, self._chart(slot, num_columns))
        num_more = self._server["max_num_seqs"] - len(slots)
        more = f"{num_more} more" if num_more else ""
        table.add_row("", more, "", self._legend(num_columns))
        return table

    def _rider(self, slot: int) -> tuple[str, str]:
        request = self._requests.get(self._holders.get(slot, -1))
        if request is None:
            return "", ""
        if request["name"] is None:
            return "another request", ""
        return f"r{request['id']}", f"{request['num_prompt_tokens']:,} + {request['num_output_tokens']:,} tokens"

    def _chart(self, slot: int, num_columns: int) -> Text:
        last = self._message["now_ns"] // COLUMN_NS
        kinds = [IDLE] * num_columns
        for column, kind in self._cells.get(slot, ()):
            index = column - (last - num_columns + 1)
            if 0 <= index < num_columns:
                kinds[index] = kind
        text = Text(no_wrap=True)
        for kind, run in groupby(kinds):
            mark, colour = MARKS[kind]
            text.append(mark * sum(1 for _ in run), style=colour)
        return text

    def _legend(self, num_columns: int) -> Text:
        text = Text(no_wrap=True, overflow="ellipsis")
        for kind in LEGEND:
            mark, colour = MARKS[kind]
            text.append(mark, style=colour).append(f" {kind}  ")
        return text.append(f"last {num_columns * COLUMN_NS / NS_PER_S:.0f} s")

    def _waiting(self, most: int) -> RenderableType:
        if not self._queue:
            return Text("nobody waits", style="dim")
        table = Table.grid(padding=(0, 2))
        now_ns = self._message["now_ns"]
        for one in self._queue[:most]:
            if one["name"] is None:
                table.add_row("another request")
                continue
            length = "" if one["num_prompt_tokens"] is None else f"{one['num_prompt_tokens']:,} tokens"
            table.add_row(f"r{one['id']}", length, f"for {time_of(now_ns - one['since_ns'])}", one["sentence"])
        return table

    def _decisions(self, most: int) -> Text:
        lines = list(self._acts)[-most:]
        return Text("\n".join(lines) if lines else "none yet", no_wrap=True, overflow="ellipsis")


def time_of(ns: int | None) -> str:
    """A duration as explanations write it; a dash for none."""
    return "–" if ns is None else duration(ns)


def uptime(seconds: float) -> str:
    """How long the server has been there: 2.3 s, 4 min 5 s, 5 h 33 min."""
    minutes = round(seconds) // 60
    return duration(round(seconds * NS_PER_S)) if minutes < 120 else f"{minutes // 60:,} h {minutes % 60} min"
