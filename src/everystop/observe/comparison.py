"""One workload run several times under each of some policies: what every request saw, and what the scheduler did.

Seconds count from the start of a run; times of the engine are nanoseconds of its clock, in which `Run.start_ns` is that
start. It knows who was sent when and when tokens came, never a text or a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from everystop.core.durations import NS_PER_S
from everystop.observe.history import History
from everystop.observe.history_data import history_as_data, history_from_data

VERSION = 1
DIGITS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLine:
    """One request of one run. `index` is its place in the workload, `scheduled_s` when it was to be sent (None: when a
    client was free), `sent_s` when it was, `token_s` when each token came, or each piece of text from a server,
    `end_s` when it was over; one that was never sent or never ended has -1 there and an `error`.

    `digest` is equal for equal outputs, `request_id` its id in the history, None where there is none.
    """

    index: int
    group: str
    num_prompt_tokens: int
    num_output_tokens: int
    scheduled_s: float | None
    sent_s: float
    token_s: tuple[float, ...]
    end_s: float
    error: str | None
    digest: str
    request_id: int | None

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first token; None without one."""
        return self.token_s[0] - self.sent_s if self.token_s else None

    @property
    def e2e_s(self) -> float:
        """From sending to the end."""
        return self.end_s - self.sent_s

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last; None without one."""
        return self.token_s[-1] - self.token_s[0] if self.token_s else None

    @property
    def itl_s(self) -> list[float]:
        """The gaps between its tokens."""
        return [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Time for each token after the first: (E2E − TTFT) / (n − 1), as vLLM has it; None with fewer than two."""
        if self.num_output_tokens < 2 or not self.token_s:
            return None
        return (self.end_s - self.token_s[0]) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The workload once under one policy; `requests` in the order of the workload. `history` is None where only the
    clients' side is known, and then `max_num_seqs` and `start_ns` are 0.
    """

    policy: str
    repeat: int
    duration_s: float
    requests: tuple[RequestLine, ...]
    start_ns: int
    max_num_seqs: int
    history: History | None

    @property
    def good(self) -> list[RequestLine]:
        """The requests that ended without an error."""
        return [line for line in self.requests if line.error is None]

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all requests that ended without an error."""
        return sum(line.num_output_tokens for line in self.good)

    def seconds(self, now_ns: int) -> float:
        """A time of the engine's clock in seconds from the run's start."""
        return (now_ns - self.start_ns) / NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Equality:
    """Whether requests had the same output in all runs: `different` are the indices of those that had not, and
    `num_uncompared` counts those with an error in some run, or with only one run.
    """

    num_equal: int
    different: tuple[int, ...]
    num_uncompared: int

    @property
    def holds(self) -> bool:
        """No output differed."""
        return not self.different


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All runs in their order, policy by policy within each repeat; an interrupted one has fewer than were asked for.

    `settings` says how it was measured: machine, model, version, flags, command, date. `policies[0]` is the baseline.
    """

    workload: str
    policies: tuple[str, ...]
    runs: tuple[Run, ...]
    settings: Mapping[str, Any]
    num_repeats_asked: int

    def runs_of(self, policy: str) -> list[Run]:
        """The runs of a policy, by repeat."""
        return [run for run in self.runs if run.policy == policy]

    def pairs(self, policy: str, other: str) -> Iterator[tuple[Run, Run]]:
        """The runs of both policies of each repeat that has both."""
        others = {run.repeat: run for run in self.runs_of(other)}
        return ((run, others[run.repeat]) for run in self.runs_of(policy) if run.repeat in others)

    @property
    def is_complete(self) -> bool:
        """Every policy ran as often as was asked for."""
        return len(self.runs) == self.num_repeats_asked * len(self.policies)

    @property
    def groups(self) -> list[str]:
        """Names of the groups of requests, in the order of their first requests."""
        return list(dict.fromkeys(line.group for run in self.runs for line in run.requests))

    @property
    def num_errors(self) -> int:
        """Requests that ended with an error, over all runs."""
        return sum(len(run.requests) - len(run.good) for run in self.runs)

    @property
    def served(self) -> tuple[str, ...]:
        """The policies under which at least one request ended without an error."""
        return tuple(policy for policy in self.policies if any(run.good for run in self.runs_of(policy)))

    def errors(self, policy: str) -> list[tuple[str, int]]:
        """What failed requests ended with and how often, over all runs of a policy, the most frequent first."""
        lines = (line for run in self.runs_of(policy) for line in run.requests)
        return Counter(line.error for line in lines if line.error is not None).most_common()

    def equality(self) -> Equality:
        """Whether each request had the same output under every policy and in every repeat."""
        digests: dict[int, list[str | None]] = {}
        for run in self.runs:
            for line in run.requests:
                digests.setdefault(line.index, []).append(None if line.error is not None else line.digest)
        comparable = {i: seen for i, seen in digests.items() if len(seen) > 1 and None not in seen}
        different = tuple(i for i, seen in comparable.items() if len(set(seen)) > 1)
        return Equality(
            num_equal=len(comparable) - len(different),
            different=different,
            num_uncompared=len(digests) - len(comparable),
        )


def to_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain data, from which it can be drawn again; times to a tenth of a microsecond."""
    return {
        "version": VERSION,
        "workload": comparison.workload,
        "policies": list(comparison.policies),
        "num_repeats_asked": comparison.num_repeats_asked,
        "settings": dict(comparison.settings),
        "runs": [_run_as_data(run) for run in comparison.runs],
    }


def from_json(data: Mapping[str, Any]) -> Comparison:
    """The inverse of `to_json`; raises ValueError for another version, KeyError or TypeError for what is none."""
    if data["version"] != VERSION:
        raise ValueError(f"the comparison has version {data['version']}; this program reads version {VERSION}")
    return Comparison(
        workload=data["workload"],
        policies=tuple(data["policies"]),
        runs=tuple(_run_from_data(run) for run in data["runs"]),
        settings=data["settings"],
        num_repeats_asked=data["num_repeats_asked"],
    )


def _run_as_data(run: Run) -> dict[str, Any]:
    return {
        "policy": run.policy,
        "repeat": run.repeat,
        "duration_s": round(run.duration_s, DIGITS),
        "start_ns": run.start_ns,
        "max_num_seqs": run.max_num_seqs,
        "requests": {name: [_plain(getattr(line, name)) for line in run.requests] for name in _LINE_FIELDS},
        "history": None if run.history is None else history_as_data(run.history),
    }


def _run_from_data(data: Mapping[str, Any]) -> Run:
    columns: Mapping[str, Sequence[Any]] = data["requests"]
    rows = zip(*(columns[name] for name in _LINE_FIELDS), strict=True)
    lines = (dict(zip(_LINE_FIELDS, row, strict=True)) for row in rows)
    history = data["history"]
    return Run(
        policy=data["policy"],
        repeat=data["repeat"],
        duration_s=data["duration_s"],
        requests=tuple(RequestLine(**line | {"token_s": tuple(line["token_s"])}) for line in lines),
        start_ns=data["start_ns"],
        max_num_seqs=data["max_num_seqs"],
        history=None if history is None else history_from_data(history),
    )


_LINE_FIELDS = tuple(field.name for field in fields(RequestLine))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    return [round(item, DIGITS) for item in value] if isinstance(value, tuple) else value
