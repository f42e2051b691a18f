"""The engine thread: takes messages, turns the step loop, hands one batch of outputs a step to whoever serves the
clients.

It owns the scheduler and the runner; nobody else touches them. It knows token ids, never text, except for stop strings,
which must end a request before the scheduler's update.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from everystop.core.durations import NS_PER_S
from everystop.core.errors import EngineDead, RequestError, TenantQueueFull
from everystop.core.events import Event, FinishEvent, StepEvent
from everystop.core.ledger import Ledger, StepPart
from everystop.core.plan import NO_TOKEN_LEFT, StepPlan, StepResult, TokenLogprobs
from everystop.core.request import FinishReason, Request, SamplingParams
from everystop.core.scheduler import Scheduler
from everystop.engine.loop import StepLoop, Turn
from everystop.engine.messages import Abort, StepOutput, Submit
from everystop.engine.stops import StopMatcher
from everystop.runner import ModelRunner
from everystop.runner.codes import FAILURES

log = logging.getLogger("everystop.engine")

T = TypeVar("T")


class TextDecoder(Protocol):
    """Turns one sequence's tokens into text as they come."""

    def feed(self, token_id: int) -> str:
        """The text that this token completes."""
        ...


class MakeTextDecoder(Protocol):
    """Makes a decoder for one sequence."""

    def __call__(self, *, skip_special_tokens: bool) -> TextDecoder:
        """A decoder at the beginning of its text, with control tokens left out of it or not."""
        ...


class _StopWatch:
    """Looks for the stop strings of one request in its text, but in that of its first `min_tokens` tokens."""

    __slots__ = ("_decoder", "_matcher", "_num_early")

    def __init__(self, decoder: TextDecoder, params: SamplingParams) -> None:
        self._decoder = decoder
        self._matcher = StopMatcher(params.stop)
        self._num_early = params.min_tokens

    def feed(self, token_id: int) -> str | None:
        """The stop string that ends with this token."""
        text, may_stop = self._decoder.feed(token_id), self._num_early <= 0
        self._num_early -= 1
        return self._matcher.feed(text, may_stop=may_stop)[1]


class Engine:
    """Runs requests submitted from other threads; `start` it, and `stop` it in the end.

    `on_outputs` gets one list of outputs a step, `on_events` the step's events, `on_failure` the error that ended the
    engine; all three are called on the engine's thread. `submit`, `abort`, `ask_blocks`, `ask_line` and
    `stalled_ns` may be called from any thread, `allocate_ids` from one only.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        eos_token_ids: Sequence[int],
        make_text_decoder: MakeTextDecoder | None = None,
        seed: int | None = None,
        depth: int = 0,
        on_stop: Callable[[], None] | None = None,
    ) -> None:
        self.on_outputs: Callable[[list[StepOutput]], None] = lambda outputs: None
        self.on_events: Callable[[list[Event]], None] = lambda events: None
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self.error: BaseException | None = None
        self._progress_ns = time.monotonic_ns()  # when a step last came back, or the present work began
        self._is_at_rest = True  # asleep, with nothing to do
        self._wake_at_ns = 0  # until when the policy wants to wait
        self._scheduler = scheduler
        self._runner = runner
        self._eos_token_ids = tuple(eos_token_ids)
        self._make_text_decoder = make_text_decoder
        self._seed = seed
        self._on_stop = on_stop
        self._ledger = Ledger()
        self._loop = StepLoop(
            scheduler, runner, time.monotonic_ns, depth=depth, inspect=self._find_stops, ledger=self._ledger
        )
        self._inbox: deque[Submit | Abort] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._is_asked_blocks = False
        self._num_asked_in_line = 0
        self._next_id = 0
        self._stop_watches: dict[int, _StopWatch] = {}
        self._refused: list[StepOutput] = []
        self._thread = threading.Thread(target=self._run, name="everystop-engine", daemon=True)

    # Called by other threads.

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def allocate_ids(self, num: int) -> int:
        """The first of `num` consecutive request ids, in order of arrival."""
        first, self._next_id = self._next_id, self._next_id + num
        return first

    def submit(self, message: Submit) -> int:
        """Queue a request; its outputs follow by `on_outputs`. Returns its seed. Raises EngineDead."""
        if self.error is not None or self._stopping:
            raise EngineDead("the engine has stopped; restart the server" + (f" ({self.error})" if self.error else ""))
        params, seed = message.params, message.params.seed
        if seed is None:
            seed = self._seed_for(message.first_request_id)
            message = message._replace(params=replace(params, seed=seed))
        if self._is_at_rest and not self._inbox:
            self._progress_ns = time.monotonic_ns()
        self._inbox.append(message)
        self._wake.set()
        return seed

    def abort(self, message: Abort) -> None:
        """Queue the end of requests whose client has gone."""
        self._inbox.append(message)
        self._wake.set()

    def ask_blocks(self) -> None:
        """Have a `BlockEvent` among the events of the turn in progress, or of the next one."""
        self._is_asked_blocks = True
        self._wake.set()

    def ask_line(self, num: int) -> None:
        """Have a `LineEvent` of the first `num` likewise."""
        self._num_asked_in_line = max(num, self._num_asked_in_line)
        self._wake.set()

    def stalled_ns(self, now_ns: int) -> int:
        """How long there has been work and no step has come back; 0 without work, or while the policy wants to wait.

        What counts is that work gets done: a thread that lives, or turns its loop in vain, is no progress.
        """
        if not (self._inbox or self._scheduler.requests):
            return 0
        return max(0, now_ns - max(self._wake_at_ns, self._progress_ns))  # a wake-up that is due takes some time

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread after the step in progress and release the runner; unfinished requests get no more."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._runner.close()
            if self._on_stop is not None:
                self._on_stop()

    def _seed_for(self, request_id: int) -> int:
        """A seed for a request that names none: random, or made from `--seed` and the arrival index."""
        if self._seed is None:
            return secrets.randbits(63)
        digest = hashlib.sha256(f"{self._seed}:{request_id}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1

    # On the engine's thread.

    def _run(self) -> None:
        self._ledger.resume(time.monotonic_ns())
        try:
            while True:
                self._wake.clear()  # before anything is looked at: what comes later is not slept through
                if self._stopping:
                    return
                self._take_messages()
                turn = self._loop.turn()
                if not turn.is_idle or not self._scheduler.requests:
                    self._progress_ns = time.monotonic_ns()
                self._look_around(turn.events)
                self._ledger.mark(StepPart.OTHER, time.monotonic_ns())
                self._deliver(turn)
                self._ledger.mark(StepPart.DELIVER, time.monotonic_ns())
                if turn.is_idle and not self._inbox:
                    self._sleep(turn.wake_at_ns)
        except BaseException as error:  # whatever ends the thread ends the engine, and is told
            log.error("the engine has failed", exc_info=error)
            self.error = error
            self._guard(self.on_failure, error)

    def _sleep(self, wake_at_ns: int | None) -> None:
        """Wait for a message, or until the policy wants to be asked again."""
        self._wake_at_ns = wake_at_ns or 0
        self._is_at_rest = not self._scheduler.requests
        timeout_s = None if wake_at_ns is None else max(0.0, (wake_at_ns - time.monotonic_ns()) / NS_PER_S)
        self._wake.wait(timeout_s)
        self._is_at_rest = False
        self._ledger.resume(time.monotonic_ns())
        if wake_at_ns is not None:  # what was waited for counts from now on
            self._progress_ns = time.monotonic_ns()
            self._wake_at_ns = 0

    def _take_messages(self) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            now_ns = time.monotonic_ns()
            if isinstance(message, Abort):
                for request_id in message.request_ids:
                    self._scheduler.abort(request_id, now_ns)
            else:
                self._add(message, now_ns)

    def _add(self, message: Submit, now_ns: int) -> None:
        params = message.params
        prompt_token_ids = array("i", message.prompt_token_ids)  # once: each choice takes a copy of it, which is quick
        for choice_index in range(params.n):
            request = Request(
                request_id=message.first_request_id + choice_index,
                prompt_token_ids=prompt_token_ids,
                params=params,
                arrival_ns=now_ns,
                eos_token_ids=self._eos_token_ids,
                group_id=message.first_request_id,
                choice_index=choice_index,
                tenant=message.tenant,
                priority=message.priority,
                cache_salt=message.cache_salt,
                ttft_target_ns=message.ttft_target_ns,
                itl_target_ns=message.itl_target_ns,
            )
            try:
                self._check_some_token_may_begin(request, now_ns)
                self._scheduler.add(request, now_ns)
            except RequestError as error:
                self._refused.append(_refusal(request.request_id, error))
                continue
            if params.stop and self._make_text_decoder is not None:
                decoder = self._make_text_decoder(skip_special_tokens=params.skip_special_tokens)
                self._stop_watches[request.request_id] = _StopWatch(decoder, params)

    def _look_around(self, events: list[Event]) -> None:
        """Add who holds the blocks, and who boards in which order, to a turn's events, if somebody has asked."""
        if self._is_asked_blocks:
            self._is_asked_blocks = False
            events.append(self._scheduler.block_event(time.monotonic_ns()))
        if self._num_asked_in_line:
            num, self._num_asked_in_line = self._num_asked_in_line, 0
            events.append(self._scheduler.line_event(num, time.monotonic_ns()))

    def _check_some_token_may_begin(self, request: Request, now_ns: int) -> None:
        """Raise RequestError, and record it, where every token that the request allows is masked at the beginning."""
        params = request.params
        allowed = params.allowed_token_ids
        if not allowed or not (params.min_tokens or params.bad_word_ids):
            return
        ends = request.stop_ids if params.min_tokens > 0 else frozenset[int]()
        bad = {ids[0] for ids in params.bad_word_ids if len(ids) == 1}
        if ends.issuperset(allowed):
            error = RequestError(
                f"min_tokens is {params.min_tokens}, but allowed_token_ids names only tokens that end the answer, and "
                "none of them may be the first; allow another token, or set min_tokens to 0",
                param="min_tokens",
                code="no_token_allowed",
            )
        elif (ends | bad).issuperset(allowed):
            error = RequestError(
                "bad_words leave none of the tokens in allowed_token_ids that could be the first; allow another token, "
                "or take a word out",
                param="bad_words",
                code="no_token_allowed",
            )
        else:
            return
        self._scheduler.note_refusal(request, error, now_ns)
        raise error

    def _find_stops(self, plan: StepPlan, result: StepResult) -> None:
        """Tell the scheduler which requests end with this step's token because of a stop string."""
        if not self._stop_watches:
            return
        for row, tokens in zip(plan.rows, result.rows, strict=True):
            watch = self._stop_watches.get(row.request_id)
            if watch is None or isinstance(tokens, str):
                continue
            for token in tokens:
                matched = watch.feed(token)
                if matched is not None:
                    result.stopped[row.request_id] = matched
                    break

    def _deliver(self, turn: Turn) -> None:
        outputs, self._refused = self._refused, []
        if turn.events:
            outputs += _outputs(turn)
            for output in outputs:
                if output.finish_reason is not None:
                    self._stop_watches.pop(output.request_id, None)
        self._close_ledger(turn.events)
        if turn.events:
            self._guard(self.on_events, turn.events)
        if outputs:
            self._guard(self.on_outputs, outputs)

    def _close_ledger(self, events: list[Event]) -> None:
        """Say where the time of the step has gone that was executed; handing that over is the next one's."""
        now_ns = time.monotonic_ns()
        self._ledger.mark(StepPart.DELIVER, now_ns)
        ledger = self._ledger.close(now_ns)
        if ledger is not None:
            events.append(ledger)

    def _guard(self, callback: Callable[[T], None], argument: T) -> None:
        """Whoever watches must not be able to end the engine."""
        try:
            callback(argument)
        except Exception:
            log.exception("a callback of the engine failed")


def _refusal(request_id: int, error: RequestError) -> StepOutput:
    return StepOutput(
        request_id,
        (),
        error=str(error),
        error_code=error.code,
        error_param=error.param,
        refused=True,
        retry_after_s=error.retry_after_s if isinstance(error, TenantQueueFull) else None,
    )


def _outputs(turn: Turn) -> list[StepOutput]:
    """One output for each request that got a token or ended in this turn, and one before for each whose prompt was
    scored; those scores are taken out of the result, which a record may keep for a while.
    """
    finished = {event.request_id: event for event in turn.events if isinstance(event, FinishEvent)}
    logprobs = turn.result.logprobs if turn.result is not None else {}
    outputs = []
    if turn.result is not None and turn.result.prompt_logprobs:
        scored, turn.result.prompt_logprobs = turn.result.prompt_logprobs, {}
        outputs += [StepOutput(i, (), prompt_logprobs=tuple(scores)) for i, scores in scored.items()]
    for event in turn.events:
        if isinstance(event, StepEvent):
            for request_id, tokens in zip(event.plan.rows.request_ids, event.tokens, strict=True):
                end = finished.pop(request_id, None) if finished else None
                if tokens or end is not None:
                    chosen = tuple(logprobs.get(request_id, ())[: len(tokens)])
                    outputs.append(_output(request_id, tokens, chosen, end))
    outputs += [_output(request_id, (), (), end) for request_id, end in finished.items()]
    return outputs


def _output(
    request_id: int, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], end: FinishEvent | None
) -> StepOutput:
    if end is None:
        return StepOutput(request_id, tokens, logprobs)
    error = None
    if end.reason is FinishReason.ERROR:
        error = f"no token could be chosen ({end.detail}): {FAILURES.get(str(end.detail), 'the runner failed')}"
    is_stop = end.reason is FinishReason.STOP and end.detail != NO_TOKEN_LEFT
    stop_reason = end.detail if is_stop else None
    return StepOutput(request_id, tokens, logprobs, end.reason.value, stop_reason, end.num_cached_tokens, error)
