"""What one step does, as plain data: `StepPlan` goes to the runner, `StepResult` comes back; both can be written as one
JSON line.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from everystop.core.request import Request, SamplingParams
from everystop.core.rows import Rows

_encode = json.JSONEncoder(separators=(",", ":")).encode


class Admitted(NamedTuple):
    """All that a runner needs to know of a request, sent once when it boards (again after a preemption).

    `token_ids` are prompt and generated tokens; `block_table` covers them and one more; `stop_token_ids` are masked
    until `params.min_tokens` tokens are out.
    """

    request_id: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    params: SamplingParams
    choice_index: int
    stop_token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    slot: int
    adapter: str

    @classmethod
    def of(cls, request: Request) -> Admitted:
        """This request as it boards."""
        return cls(
            request.request_id,
            tuple(request.token_ids),
            request.num_prompt_tokens,
            request.params,
            request.choice_index,
            tuple(sorted(request.stop_ids)),
            tuple(request.block_table),
            request.slot,
            request.adapter,
        )


class NewBlocks(NamedTuple):
    """`block_table[first_index : first_index + len(block_ids)] = block_ids`; it may extend the table or replace entries
    in it.
    """

    request_id: int
    first_index: int
    block_ids: tuple[int, ...]


class PromptLogits(NamedTuple):
    """The logits after each of `num_tokens` prompt tokens from position `start` on are wanted, to score the token that
    comes next; all of them lie in the request's row of the same plan.

    Example, a prompt of 5 tokens in chunks of 3 and 2: (0, 3) scores the tokens at 1, 2 and 3, then (3, 1) the one at
    4; the logits of the last position are for the first token of the output.
    """

    request_id: int
    start: int
    num_tokens: int


@dataclass(slots=True)
class StepPlan:
    """One step, as a delta to what the runner knows.

    Order of execution: drop `released` and `preempted`, take `admitted`, apply `new_blocks`, do the block `copies`
    (source, destination), then the forward pass over `rows`; `prompt_logits` are in the order of their rows. The last
    `num_padded_rows` rows are computed and thrown away (static-padded only). A plan without rows carries bookkeeping,
    or a `wake_at_ns` before which nothing can be done; in a plan with rows it tells only that somebody waits for that
    time. Any `Row`s in their order do for `rows`.
    """

    step_id: int
    rows: Rows = field(default_factory=Rows)
    admitted: list[Admitted] = field(default_factory=list)
    new_blocks: list[NewBlocks] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    num_padded_rows: int = 0
    wake_at_ns: int | None = None
    prompt_logits: list[PromptLogits] = field(default_factory=list)

    def __post_init__(self) -> None:
        if type(self.rows) is not Rows:
            self.rows = Rows(self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this step, padded rows included."""
        return sum(self.rows.nums_tokens)

    @property
    def is_noop(self) -> bool:
        """Nothing for the runner to do."""
        return not (self.rows or self.admitted or self.released or self.preempted or self.new_blocks or self.copies)

    def to_json(self) -> str:
        """One line, the same bytes for the same plan."""
        return _encode(asdict(self) | {"rows": list(self.rows.tuples())})

    def fingerprint(self) -> str:
        """16 hex digits that change with every decision in the plan; token ids and sampling parameters do not enter."""
        admitted = [
            (a.request_id, len(a.token_ids), a.num_prompt_tokens, a.choice_index, a.block_table, a.slot)
            for a in self.admitted
        ]
        decisions = (
            self.step_id,
            list(self.rows.tuples()),
            admitted,
            self.new_blocks,
            self.copies,
            self.released,
            self.preempted,
            self.num_padded_rows,
            self.wake_at_ns,
            *self.prompt_logits,  # nothing where nobody wants any, as in records that know of none
        )
        return hashlib.sha256(_encode(decisions).encode()).hexdigest()[:16]


NO_TOKEN_LEFT = "no_token_left"
"""What a runner says of a row whose request's settings mask every token: its answer ends there, and nothing failed."""


class TokenLogprobs(NamedTuple):
    """Natural log-probabilities, of the raw logits, of one token, sampled or of a prompt, and of the best ones in its
    place, best first.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class StepResult:
    """What a runner brings back; `rows` runs parallel to `StepPlan.rows`.

    Each entry of `rows` is the tuple of sampled token ids (empty for a chunk that samples nothing) or a str: a failure
    code, which fails that request alone, or `NO_TOKEN_LEFT`. `logprobs` holds one entry per sampled token for requests
    that asked, and `prompt_logprobs` one per token that `StepPlan.prompt_logits` scores, for requests that did not
    fail. `stopped` names requests whose stop string ended with this step's token, and which one it was. Of
    `execute_ns`, `sample_ns` went to sampling, `native_ns` to all that needs no interpreter (`native_cpu_ns` of the
    calling thread's processor time), and `gil_wait_ns` to waiting for the interpreter afterwards; 0 where that is not
    known.
    """

    rows: list[tuple[int, ...] | str]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    stopped: dict[int, str] = field(default_factory=dict)
    execute_ns: int = 0
    sample_ns: int = 0
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    native_ns: int = 0
    gil_wait_ns: int = 0
    native_cpu_ns: int = 0
