"""What the live stream has told `everystop top` so far: who did what when, and the last minute's figures.

It draws nothing. A message's fields are those of "The stream" in docs/dashboard.md.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from everystop.core.durations import NS_PER_MS, NS_PER_S
from everystop.observe.recent import bin_of, middle_of
from everystop.observe.step_pace import StepPace

COLUMN_NS = 250 * NS_PER_MS
NUM_COLUMNS = 240  # a minute
SECONDS = 60
NUMBERS_A_ROW = 4
PREFILL, RECOMPUTE, DECODE, SLOW = "prefill", "recompute", "decode", "slow"
PADDED, HELD, SKIPPED, IDLE = "padding", "held", "no token", ""
RANKS = {kind: rank for rank, kind in enumerate((IDLE, SKIPPED, HELD, PADDED, DECODE, SLOW, PREFILL, RECOMPUTE))}
"""In one column the most telling kind wins, a chunk of a prompt over a hundred decodes; but of decode in slow steps and
in others, what took longer.
"""


class Step(NamedTuple):
    """A step as the stream sends it; it began when the one before was back, or when it was planned."""

    step_id: int
    begin_ns: int
    end_ns: int
    num_decode: int
    num_prefill: int
    num_padded: int
    num_running: int
    num_waiting: int
    num_held: int
    num_free_blocks: int
    num_cached_blocks: int
    num_evicted_blocks: int
    rows: list[int]

    @classmethod
    def of(cls, sent: list[Any], last_end_ns: int) -> Step:
        """The step of a message."""
        step_id, scheduled_ns, end_ns, _, *rest = sent
        return cls._make([step_id, max(last_end_ns, scheduled_ns), end_ns, *rest])

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return self.num_decode + self.num_prefill + self.num_padded

    @property
    def took_ns(self) -> int:
        """From its beginning to its end."""
        return self.end_ns - self.begin_ns


@dataclass(slots=True)
class Column:
    """What the steps in 250 ms computed: the largest of them, and the longest."""

    number: int
    largest: Step
    longest_ns: int


class Minute:
    """A figure of each of the last 60 seconds: the highest value noted in it, and the last."""

    def __init__(self) -> None:
        self._seconds: dict[int, tuple[float, float]] = {}

    def note(self, now_ns: int, value: float) -> None:
        """A value at a time; what has happened need not be told in its order."""
        second = now_ns // NS_PER_S
        highest, _ = self._seconds.get(second, (value, value))
        self._seconds[second] = max(highest, value), value
        if len(self._seconds) > 2 * SECONDS:
            newest = max(self._seconds)
            self._seconds = {at: noted for at, noted in self._seconds.items() if at > newest - SECONDS}

    def add(self, now_ns: int, num: int) -> None:
        """Count so many more in that second."""
        self.note(now_ns, self._seconds.get(now_ns // NS_PER_S, (0, 0))[0] + num)

    def highest(self, now_ns: int, num_groups: int) -> list[float | None]:
        """The highest of groups of seconds up to now, `num_groups` in a minute; None for one without a value. Groups
        begin at whole multiples of their length, so that a value stays in its group.
        """
        length = SECONDS // num_groups
        last, values = now_ns // NS_PER_S // length, list[float | None]([None]) * num_groups
        for second, (highest, _) in self._seconds.items():
            index = second // length - last + num_groups - 1
            if 0 <= index < num_groups:
                values[index] = max(highest, values[index] or 0)
        return values

    def levels(self, now_ns: int, num_groups: int) -> list[float | None]:
        """The same of what stays until it changes: a group without a value has the last one before it."""
        length = SECONDS // num_groups
        values, first = self.highest(now_ns, num_groups), now_ns // NS_PER_S // length - num_groups + 1
        last = {second // length - first: self._seconds[second][1] for second in sorted(self._seconds)}
        before = next((last[i] for i in sorted(last, reverse=True) if i < 0), None)
        for i, value in enumerate(values):
            values[i] = before if value is None else value
            before = last.get(i, before)
        return values

    def rates(self, now_ns: int, num_groups: int) -> list[float | None]:
        """The same of what is counted: 0 where nothing was, and nothing yet for a second that is not over."""
        values = self.highest(now_ns, num_groups)
        known = [i for i, value in enumerate(values) if value is not None]
        if known:
            values[known[0] :] = [value or 0 for value in values[known[0] :]]
        if num_groups == SECONDS and values[-1] is not None:
            values[-1] = None
        return values


class RequestGaps:
    """The gaps between each request's tokens, as far as they were seen, within 1 %."""

    def __init__(self) -> None:
        self._last_ns: dict[int, int] = {}
        self._longest: dict[int, int] = {}
        self._bins: dict[int, Counter[int]] = {}
        self._num_tokens: Counter[int] = Counter()

    def has_begun(self, request_id: int) -> bool:
        """A token of it was seen."""
        return request_id in self._num_tokens

    def add(self, request_id: int, now_ns: int, num_outputs: int) -> int | None:
        """Tokens have come; the gap before them, None where the one before was not seen."""
        last_ns = self._last_ns.get(request_id)
        self._last_ns[request_id] = now_ns
        self._num_tokens[request_id] += num_outputs
        if last_ns is None:
            return None
        gap_ns = now_ns - last_ns
        self._longest[request_id] = max(gap_ns, self._longest.get(request_id, 0))
        self._bins.setdefault(request_id, Counter())[bin_of(gap_ns)] += 1
        return gap_ns

    def longest(self, request: dict[str, Any]) -> int | None:
        """The longest, None without: the stream tells it once a second, so a longer one may have been seen since."""
        return max(request["max_gap_ns"] or 0, self._longest.get(request["id"], 0)) or None

    def p99(self, request: dict[str, Any]) -> int | None:
        """What 99 of 100 of its gaps are not above; None where not all its tokens were seen."""
        request_id = request["id"]
        bins = self._bins.get(request_id)
        if not bins or self._num_tokens[request_id] < (request["num_output_tokens"] or 0):
            return None
        num_left = bins.total() * 99 // 100 + 1
        for number in sorted(bins):
            num_left -= bins[number]
            if num_left <= 0:
                break
        return min(middle_of(number), self._longest[request_id])

    def forget(self, request_id: int) -> None:
        """It is over."""
        self._last_ns.pop(request_id, None)
        self._longest.pop(request_id, None)
        self._bins.pop(request_id, None)
        self._num_tokens.pop(request_id, None)

    def forget_times(self) -> None:
        """Steps were left out, so that nobody knows when the last tokens came."""
        self._last_ns.clear()


class LiveView:
    """Folds messages in with `take`."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}
        self._clear({})

    def _clear(self, server: dict[str, Any]) -> None:
        self.server = server
        self.waiting: list[dict[str, Any]] = []
        self.requests: dict[int, dict[str, Any]] = {}
        self.holders: dict[int, int] = {}  # request by slot
        self.cells: dict[int, deque[tuple[int, str]]] = {}  # (column, kind) by slot
        self.columns: deque[Column] = deque(maxlen=NUM_COLUMNS)
        self.acts: deque[str] = deque(maxlen=200)
        self.blocks: Counter[str] | None = None  # how many of each kind; None before that was told
        self.last_step: Step | None = None
        self.last_busy: Step | None = None  # the last that had rows
        self.gaps = RequestGaps()
        self.tokens, self.running, self.queued, self.kv, self.ttft, self.itl = (Minute() for _ in range(6))
        # by slot, of its last column: the time of slow decode steps less that of others
        self._slower_ns: dict[int, int] = {}
        self._pace = StepPace()
        self._num_dropped = 0

    @property
    def now_ns(self) -> int:
        """When the last message was made, by the server's clock."""
        now_ns: int = self.message["now_ns"]
        return now_ns

    def take(self, message: dict[str, Any]) -> None:
        """One message of the stream."""
        if message["full"]:
            self._clear(message["server"])
        self.message = message
        self.waiting = message.get("waiting", self.waiting)
        if message["dropped"] > self._num_dropped:
            self._num_dropped = message["dropped"]
            self.gaps.forget_times()
        for request in message["requests"]:
            self._take_request(request)
        for sent in message["steps"]:
            self._take_step(Step.of(sent, 0 if self.last_step is None else self.last_step.end_ns))
        if "kv" in message:
            self.blocks = Counter[str]()
            for kind, num, *_ in message["kv"]["runs"]:
                self.blocks[kind] += num
        self.acts.extend(text for _, _, text in message["acts"])
        self._note_tiles(message["tiles"])
        if not message["more"]:
            self._clear_slots()
        self._forget(message["now_ns"] - COLUMN_NS * NUM_COLUMNS)

    def _take_request(self, request: dict[str, Any]) -> None:
        before = self.requests.get(request["id"])
        self.requests[request["id"]] = request
        first_ns, arrival_ns = request["first_token_ns"], request["arrival_ns"]
        if first_ns is not None and arrival_ns is not None and (before is None or before["first_token_ns"] is None):
            self.ttft.note(first_ns, first_ns - arrival_ns)

    def _take_step(self, step: Step) -> None:
        num_rows = len(step.rows) // NUMBERS_A_ROW
        is_slow = self._pace.is_slow(num_rows, step.took_ns)
        seen, num_outputs = set[int](), 0
        for slot, request_id, num_tokens, num_new, is_padded in _rows(step):
            seen.add(slot)
            self.holders[slot] = request_id
            kind = PADDED if is_padded else self._kind(step, request_id, num_tokens, num_new, is_slow=is_slow)
            self._mark(slot, step, kind)
            if num_new and not is_padded:
                num_outputs += num_new
                gap_ns = self.gaps.add(request_id, step.end_ns, num_new)
                if gap_ns is not None:
                    self.itl.note(step.end_ns, gap_ns)
        if num_rows:
            self.last_busy = step
            self._mark_others(step, seen)
            if step.num_prefill == 0:
                self._pace.add_decode(num_rows, step.took_ns)
        self.tokens.add(step.end_ns, num_outputs)
        self._note_counts(step)
        self.last_step = step

    def _kind(self, step: Step, request_id: int, num_tokens: int, num_outputs: int, *, is_slow: bool) -> str:
        """What a row did. One that has begun to answer and computes more than it brings out computes it again."""
        request = self.requests.get(request_id)
        first_ns = None if request is None else request["first_token_ns"]
        has_begun = self.gaps.has_begun(request_id) or (first_ns is not None and first_ns < step.end_ns)
        decode = SLOW if is_slow else DECODE
        if request is not None and request["finish_ns"] is not None and request["finish_ns"] < step.end_ns:
            return PADDED  # it was on its way when its request ended
        if has_begun:
            return decode if 0 < num_tokens <= num_outputs else RECOMPUTE
        return decode if request is None and num_tokens == num_outputs == 1 else PREFILL

    def _mark_others(self, step: Step, seen: set[int]) -> None:
        """Slots without a row: held by a finished request, or on board without a token."""
        for slot in [slot for slot in self.holders if slot not in seen]:
            request = self.requests.get(self.holders[slot])
            finish_ns = None if request is None else request["finish_ns"]
            is_over = request is None or (finish_ns is not None and finish_ns <= step.begin_ns + 1)
            if is_over and step.num_held:
                self._mark(slot, step, HELD)
            elif is_over or request is None or request["slot"] != slot or request["state"] != "running":
                del self.holders[slot]
            else:
                self._mark(slot, step, SKIPPED)

    def _clear_slots(self) -> None:
        """Whoever is over has no slot, unless its batch holds it."""
        last = self.last_step
        if last is not None and last.num_held and self.message["tiles"]["slots_busy"]:
            return
        for slot, request_id in list(self.holders.items()):
            request = self.requests.get(request_id)
            if request is None or request["finish_ns"] is not None:
                del self.holders[slot]

    def _mark(self, slot: int, step: Step, kind: str) -> None:
        cells = self.cells.setdefault(slot, deque(maxlen=NUM_COLUMNS))
        for column in _columns(step):
            if not cells or cells[-1][0] < column:
                cells.append((column, IDLE))
                self._slower_ns[slot] = 0
            before, shown = cells[-1][1], kind
            if kind in (DECODE, SLOW):
                lasted_ns = min(step.end_ns, (column + 1) * COLUMN_NS) - max(step.begin_ns, column * COLUMN_NS)
                self._slower_ns[slot] += lasted_ns if kind == SLOW else -lasted_ns
                shown = SLOW if self._slower_ns[slot] > 0 else DECODE
                before = IDLE if before in (DECODE, SLOW) else before
            if RANKS[shown] > RANKS[before]:
                cells[-1] = (column, shown)

    def _note_counts(self, step: Step) -> None:
        for number in _columns(step):
            if not self.columns or self.columns[-1].number < number:
                self.columns.append(Column(number, step, step.took_ns))
                continue
            column = self.columns[-1]
            column.longest_ns = max(column.longest_ns, step.took_ns)
            if step.num_tokens > column.largest.num_tokens:
                column.largest = step
        self.running.note(step.end_ns, step.num_running)
        self.queued.note(step.end_ns, step.num_waiting)
        self.kv.note(step.end_ns, 1 - step.num_free_blocks / self.server["num_blocks"])

    def _note_tiles(self, tiles: dict[str, Any]) -> None:
        """How things stand between two steps; while the last minute is caught up with, the steps say it."""
        now_ns = self.now_ns
        self.tokens.add(now_ns, 0)
        if not self.message["more"]:
            self.running.note(now_ns, tiles["slots_busy"])
            self.queued.note(now_ns, tiles["num_waiting"])
            self.kv.note(now_ns, tiles["kv_used_share"])

    def _forget(self, before_ns: int) -> None:
        for request_id, request in list(self.requests.items()):
            if request["finish_ns"] is not None and request["finish_ns"] < before_ns:
                del self.requests[request_id]
                self.gaps.forget(request_id)


def _rows(step: Step) -> Iterator[tuple[int, int, int, int, bool]]:
    """Slot, request, tokens computed and brought out of each row, and whether it is padding: those stand last."""
    rows = step.rows
    first_padded = len(rows) - NUMBERS_A_ROW * step.num_padded
    for i in range(0, len(rows), NUMBERS_A_ROW):
        yield rows[i], rows[i + 1], rows[i + 2], rows[i + 3], i >= first_padded


def _columns(step: Step) -> range:
    """The columns that a step lies in, of a minute at most."""
    last = max(step.begin_ns, step.end_ns - 1) // COLUMN_NS
    return range(max(step.begin_ns // COLUMN_NS, last - NUM_COLUMNS + 1), last + 1)
