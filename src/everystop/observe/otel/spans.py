"""The spans of one answered request, as plain data: the whole of it, and the phases that it went through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from everystop.core.durations import NS_PER_S
from everystop.observe.causes import Cause
from everystop.observe.explain import state_of
from everystop.observe.history import Client, History, Trail
from everystop.observe.life import Life, Piece
from everystop.observe.otel import names

QUEUE, PREFILL, DECODE, PREEMPTED = PHASES = ("queue", "prefill", "decode", "preempted")
_OF_CAUSE = {Cause.PREFILL: PREFILL, Cause.DECODE: DECODE, Cause.PREEMPTED: PREEMPTED}
_APART = (Cause.RECEIVE, Cause.DELIVERY, Cause.UNATTRIBUTED)  # in the whole only
OPERATIONS = {"chatcmpl": "chat"}
Attribute = str | int | float | Sequence[str]


@dataclass(slots=True)
class Span:
    """A stretch of time with a name; times are the engine's clock, in nanoseconds."""

    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Attribute] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Its length."""
        return (self.end_ns - self.start_ns) / NS_PER_S


def phases_of(life: Life) -> list[Span]:
    """Queue, prefill, decode and preempted, as they followed each other; what comes between belongs to the one before.

    Time before the engine was told, after the last token, and time of which nothing is known is in none.
    """
    spans: list[Span] = []
    is_apart = True
    for piece in life.pieces:
        name = None if piece.cause in _APART else _phase(piece, spans[-1].name if spans and not is_apart else QUEUE)
        if name is None:
            is_apart = True
        elif spans and not is_apart and spans[-1].name == name:
            spans[-1].end_ns = piece.end_ns
        else:
            is_apart = False
            spans.append(Span(name, piece.start_ns, piece.end_ns))
    _count_steps(spans, life)
    return spans


def _phase(piece: Piece, before: str) -> str:
    if piece.cause.is_queue:
        return QUEUE
    if piece.served is not None:
        return _OF_CAUSE[piece.served.activity]
    return _OF_CAUSE.get(piece.cause, before)


def _count_steps(spans: list[Span], life: Life) -> None:
    """How many steps served it in each phase, and how many tokens of its own they computed."""
    on_board = [span for span in spans if span.name != QUEUE]
    place = 0
    for served in life.served:
        while place < len(on_board) - 1 and on_board[place].end_ns <= served.begin_ns:
            place += 1
        if on_board:
            attributes = on_board[place].attributes
            for name, num in ((names.STEPS, 1), (names.COMPUTED_TOKENS, served.num_tokens)):
                known = attributes.get(name, 0)
                assert isinstance(known, int)
                attributes[name] = known + num


def whole_of(history: History, client: Client, life: Life | None, model: str) -> Span:
    """The span of an HTTP request; without its life, what the client and the ends of its sequences say."""
    trails = [trail for i in client.request_ids if (trail := history.trails.get(i)) is not None]
    end_ns = client.received_ns if client.delivered_ns is None else client.delivered_ns
    return Span(
        names.SPAN_REQUEST,
        client.received_ns,
        end_ns,
        {**_identity(client, model), **_usage(client, trails), **_error(trails), **_latencies(client, life)},
    )


def _identity(client: Client, model: str) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        names.OPERATION: OPERATIONS.get(client.name.partition("-")[0], "text_completion"),
        names.PROVIDER: "everystop",
        names.SYSTEM_OLD: "everystop",
        names.REQUEST_MODEL: model,
        names.RESPONSE_MODEL: model,
        names.RESPONSE_ID: client.name,
        names.REQUEST_ID_VLLM: client.name,
    }
    if client.given_name:
        attributes[names.GIVEN_ID] = client.given_name
    return attributes


def _usage(client: Client, trails: Sequence[Trail]) -> dict[str, Attribute]:
    arrivals = [trail.arrival for trail in trails if trail.arrival is not None]
    if not arrivals:
        return {}
    ends = [trail.finish for trail in trails if trail.finish is not None]
    firsts = {arrival.request_id: arrival for arrival in arrivals if arrival.choice_index == 0}  # as in `usage`
    num_input = sum(arrival.num_prompt_tokens for arrival in firsts.values())
    num_cached = sum(end.num_cached_tokens for end in ends if end.request_id in firsts)
    num_output = sum(end.num_output_tokens for end in ends)
    return {
        names.MAX_TOKENS: max(arrival.max_tokens for arrival in arrivals),
        names.CHOICES: client.num,
        names.CHOICES_VLLM: client.num,
        names.INPUT_TOKENS: num_input,
        names.INPUT_TOKENS_OLD: num_input,
        names.OUTPUT_TOKENS: num_output,
        names.OUTPUT_TOKENS_OLD: num_output,
        names.CACHED_TOKENS: num_cached,
        names.FINISH_REASONS: [end.reason.value for end in ends],
        names.PREEMPTIONS: sum(end.num_preemptions for end in ends),
    }


def _error(trails: Sequence[Trail]) -> Mapping[str, Attribute]:
    """The worst that happened to one of its sequences, if anything did."""
    states = [state_of(trail) for trail in trails]
    refusal = next((trail.refusal for trail in trails if trail.refusal is not None), None)
    if refusal is not None:
        return {names.ERROR: refusal.code}
    worst = next((state for state in ("failed", "aborted") if state in states), None)
    return {} if worst is None else {names.ERROR: worst}


def _latencies(client: Client, life: Life | None) -> dict[str, Attribute]:
    if life is None:
        return {}
    spans, sums = phases_of(life), life.ns_by_cause()
    seconds = {name: sum(span.seconds for span in spans if span.name == name) for name in PHASES}
    attributes: dict[str, Attribute] = {
        names.IN_QUEUE_VLLM: seconds[QUEUE],
        names.E2E_VLLM: life.e2e_ns / NS_PER_S,
        names.IN_PREFILL_VLLM: seconds[PREFILL],
        names.IN_DECODE_VLLM: seconds[DECODE],
        names.IN_INFERENCE_VLLM: seconds[PREFILL] + seconds[DECODE] + seconds[PREEMPTED],
        names.RECOMPUTED_TOKENS: life.num_recomputed_tokens,
        **{names.SECONDS_OF + cause.value: ns / NS_PER_S for cause, ns in sums.items()},
    }
    if life.first_token_ns is not None:
        attributes[names.FIRST_TOKEN_VLLM] = (life.first_token_ns - client.received_ns) / NS_PER_S
    if sums:
        attributes[names.MAIN_CAUSE] = max(sums, key=sums.__getitem__).value
    return attributes
