"""A small made-up run, as the live stream tells it: requests board, prefill, decode, end, are held or preempted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SLOTS, BUDGET, BLOCKS, BLOCK = 8, 64, 96, 16
MS = 1_000_000
BEGIN_NS = 5_000_000_000_000


@dataclass(slots=True)
class Passenger:
    """One request of the run."""

    id: int
    arrival_ns: int
    prompt: int
    output: int
    name: str | None = ""
    slot: int = -1
    computed: int = 0
    written: int = 0
    state: str = "waiting"
    admit_ns: int | None = None
    first_ns: int | None = None
    finish_ns: int | None = None
    preemptions: int = 0

    def told(self) -> dict[str, Any]:
        """As the stream tells it."""
        is_own = self.name is not None
        return {
            "id": self.id,
            "name": self.name,
            "state": self.state,
            "slot": self.slot,
            "num_prompt_tokens": self.prompt if is_own else None,
            "num_cached_tokens": (16 if self.id % 3 == 0 else 0) if is_own else None,
            "num_output_tokens": self.written if is_own else None,
            "arrival_ns": self.arrival_ns if is_own else None,
            "admit_ns": self.admit_ns,
            "first_token_ns": self.first_ns,
            "finish_ns": self.finish_ns,
            "finish_reason": ("abort" if self.id % 7 == 5 else "length") if self.finish_ns and is_own else None,
            "num_preemptions": self.preemptions if is_own else None,
            "max_gap_ns": 60 * MS if self.written > 1 and is_own else None,
            "blame": "queued: no free slot" if self.finish_ns and is_own else None,
        }


@dataclass(slots=True)
class Run:
    """Makes messages; `names` renames requests, None for one that is somebody else's."""

    num_slots: int = SLOTS
    is_static: bool = False
    names: dict[int, str | None] = field(default_factory=dict)
    now_ns: int = BEGIN_NS
    step_id: int = 0
    all: list[Passenger] = field(default_factory=list)
    slots: list[Passenger | None] = field(default_factory=list)
    acts: list[list[Any]] = field(default_factory=list)
    changed: dict[int, Passenger] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = [None] * self.num_slots

    @property
    def waiting(self) -> list[Passenger]:
        return [one for one in self.all if one.state == "waiting"]

    def message(self, num_steps: int, **extra: Any) -> dict[str, Any]:
        """The next steps as one message."""
        steps = [self._step() for _ in range(num_steps)]
        acts, self.acts = self.acts, []
        changed, self.changed = self.changed, {}
        return {
            "full": False,
            "now_ns": self.now_ns,
            "uptime_s": (self.now_ns - BEGIN_NS) / 1e9,
            "steps": steps,
            "requests": [one.told() for one in changed.values()],
            "waiting": [self._waiter(i, one) for i, one in enumerate(self.waiting)],
            "num_waiting": len(self.waiting),
            "tiles": self._tiles(),
            "kv": {"runs": self._blocks()},
            "acts": acts,
            "cost": {"cpu_share": 0.004},
            "dropped": 0,
            **extra,
        }

    def full(self, num_steps: int = 600, **server: Any) -> dict[str, Any]:
        """The first message."""
        described = {
            "model": "made-up",
            "version": "0.1.0",
            "policy": "static" if self.is_static else "continuous",
            "max_num_seqs": self.num_slots,
            "max_num_batched_tokens": BUDGET,
            "num_blocks": BLOCKS,
            "block_size": BLOCK,
            "sees": "all",
            "can_send_test": False,
        }
        return self.message(num_steps, full=True, server=described | server)

    def _arrive(self) -> None:
        while len(self.all) < self.step_id // 9 + 12:
            i = len(self.all)
            name = self.names.get(i, f"chatcmpl-{i:04d}")
            self.all.append(Passenger(i, self.now_ns - 3 * MS, 20 + 37 * i % 160, 10 + 53 * i % 150, name))

    def _board(self) -> None:
        if self.is_static and any(one is not None and one.state == "running" for one in self.slots):
            return
        for slot, holder in enumerate(self.slots):
            if (holder is None or holder.finish_ns is not None) and self.waiting:
                one = self.waiting[0]
                one.slot, one.state, one.admit_ns = slot, "running", one.admit_ns or self.now_ns
                self.slots[slot] = self.changed[one.id] = one
                self.acts.append([self.now_ns, self.step_id, f"step {self.step_id}: admitted r{one.id}"])

    def _step(self) -> list[Any]:
        self._arrive()
        self._board()
        if self.step_id % 200 == 150:
            self._preempt()
        self.step_id += 1
        scheduled_ns, rows, left = self.now_ns, [], BUDGET
        for one in (one for one in self.slots if one is not None and one.state == "running"):
            num = min(max(one.prompt + one.written - one.computed, 1), left // 2 if left > 2 else left)
            left -= num
            one.computed += num
            out = int(num > 0 and one.computed >= one.prompt + one.written)
            one.written += out
            rows.append((one, num, out))
        dealt = [row for row in rows if row[1] > 0]
        num_prefill = sum(num for _, num, out in dealt if num > 1 or not out)
        took_ns = (14 + (40 if self.step_id % 90 == 0 else 0)) * MS + 300_000 * sum(row[1] for row in dealt)
        self.now_ns += took_ns
        for one, _, out in dealt:
            self._after(one, out)
        return self._told(scheduled_ns, took_ns, dealt, num_prefill)

    def _after(self, one: Passenger, out: int) -> None:
        if out and one.first_ns is None:
            one.first_ns = self.now_ns
        if one.written >= one.output:
            one.state, one.finish_ns = "finished", self.now_ns
            self.acts.append([self.now_ns, self.step_id, f"step {self.step_id}: r{one.id} finished (length)"])
            if not self.is_static:
                self.slots[one.slot] = None
        self.changed[one.id] = one

    def _preempt(self) -> None:
        victim = max(
            (one for one in self.slots if one and one.state == "running"), key=lambda one: one.id, default=None
        )
        if victim is not None:
            self.slots[victim.slot] = None
            victim.state, victim.computed, victim.preemptions = "waiting", 0, victim.preemptions + 1
            self.changed[victim.id] = victim
            self.acts.append([self.now_ns, self.step_id, f"step {self.step_id}: preempted r{victim.id}"])

    def _told(self, scheduled_ns: int, took_ns: int, rows: list[Any], num_prefill: int) -> list[Any]:
        running = sum(one is not None and one.state == "running" for one in self.slots)
        held = sum(one is not None and one.state == "finished" for one in self.slots) if running else 0
        flat = [number for one, num, out in rows for number in (one.slot, one.id, num, out)]
        num_decode = sum(num for _, num, _ in rows) - num_prefill
        used = self._num_used()
        times = [self.step_id, scheduled_ns, self.now_ns, took_ns - MS]
        return [*times, num_decode, num_prefill, 0, running, len(self.waiting), held, BLOCKS - used, 4, 3, flat]

    def _num_used(self) -> int:
        return sum(run[1] for run in self._blocks() if run[0] in "ps")

    def _blocks(self) -> list[list[Any]]:
        runs: list[list[Any]] = [["s", 2, -1]]
        running = [one for one in self.slots if one is not None and one.state == "running"]
        runs += [["p", -(-(one.prompt + one.written) // BLOCK), one.id] for one in running]
        used = sum(run[1] for run in runs)
        return [*runs, ["e", 4, -1], ["f", max(BLOCKS - used - 4, 0), -1]]

    def _waiter(self, place: int, one: Passenger) -> dict[str, Any]:
        told = {"id": one.id, "name": one.name, "num_prompt_tokens": one.prompt, "since_ns": one.arrival_ns}
        if one.name is None:
            nothing = dict.fromkeys(("num_prompt_tokens", "since_ns", "reason", "need", "have", "behind"))
            return told | nothing | {"sentence": "another request"}
        if place == 0:
            return told | {
                "reason": "no_blocks",
                "sentence": "needs 3 more KV blocks",
                "need": 9,
                "have": 6,
                "behind": None,
            }
        first = self.waiting[0].id
        return told | {"reason": "behind", "sentence": f"behind r{first}", "need": 0, "have": 0, "behind": first}

    def _tiles(self) -> dict[str, Any]:
        return {
            "slots_busy": sum(one is not None and one.state == "running" for one in self.slots),
            "slots": self.num_slots,
            "num_waiting": len(self.waiting),
            "oldest_wait_ns": max((self.now_ns - one.arrival_ns for one in self.waiting), default=0),
            "kv_used_share": self._num_used() / BLOCKS,
            "output_tokens_per_s": 143.2,
            "ttft_p50_ns": 310 * MS,
            "ttft_p95_ns": 2_400 * MS,
            "itl_p50_ns": 21 * MS,
            "itl_p99_ns": 96 * MS,
        }
