"""The board of running generations: what goes to the engine, and who gets what comes back. Asyncio thread only."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from everystop.core.errors import RequestError
from everystop.core.request import SamplingParams
from everystop.engine.messages import Abort, StepOutput, Submit
from everystop.server.delivery import Deliveries, DeliveryPart
from everystop.server.errors import GenerationFailed, Overloaded
from everystop.server.prompt_report import PromptReport
from everystop.server.queue import QueueAccount
from everystop.server.texts import Choice, ChoiceText, Part, Texts


class EngineLike(Protocol):
    """What the board needs of an engine."""

    def allocate_ids(self, n: int) -> int:
        """The first of n consecutive request ids."""

    def submit(self, message: Submit) -> int:
        """Queue a request; returns the seed that it is drawn with. Raises EngineDead."""

    def abort(self, message: Abort) -> None:
        """Forget requests; unknown ids are ignored."""


MAX_AT_ONCE = 1024  # outputs that are made into text in one turn of the loop
# What an output takes while it waits for its reader: itself, each token with log-probabilities, and each alternative.
OUTPUT_BYTES, LOGPROBS_BYTES, ALTERNATIVE_BYTES = 360, 180, 128

MakeChoice = Callable[[int, Texts, SamplingParams], Choice]


class Generation:
    """One client request on its way: all choices of all its prompts; iterate with `parts`.

    `seed` is what its last prompt's choices are drawn with, `report` gathers what the answer says of its prompts.
    """

    __slots__ = (
        "_failure",
        "_num_bytes",
        "_pending",
        "_waiter",
        "by_id",
        "choices",
        "first_id",
        "num_prompt_tokens",
        "num_unfinished",
        "report",
        "seed",
        "submitted_ns",
    )

    def __init__(
        self,
        choices: list[Choice],
        first_id: int,
        num_prompt_tokens: int,
        report: PromptReport | None = None,
    ) -> None:
        self.choices = choices
        self.report = report
        self.seed = 0
        self.first_id = first_id
        self.submitted_ns = time.monotonic_ns()
        self.by_id = {first_id + i: choice for i, choice in enumerate(choices)}
        self.num_prompt_tokens = num_prompt_tokens
        self.num_unfinished = len(choices)
        self._num_bytes = 0
        self._pending: list[StepOutput] = []
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def num_pending_bytes(self) -> int:
        """What the outputs take that its reader has yet to take."""
        return self._num_bytes

    def push(self, output: StepOutput) -> bool:
        """Take one output of the engine; the reader is woken once for all that have come since it slept, and whether it
        was is returned.
        """
        self._pending.append(output)
        self._num_bytes += bytes_of(output)
        return self._wake()

    def fail(self, error: Exception) -> None:
        """End the generation for its reader."""
        if self._failure is None:
            self._failure = error
        self._wake()

    def _wake(self) -> bool:
        if self._waiter is None or self._waiter.done():
            return False
        self._waiter.set_result(None)
        return True

    async def outputs(self) -> list[StepOutput]:
        """Outputs since the last call, `MAX_AT_ONCE` at most, waiting for the first; raises what `fail` was given."""
        if not self._pending and self._failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        if self._failure is not None:
            raise self._failure
        taken, self._pending = self._pending[:MAX_AT_ONCE], self._pending[MAX_AT_ONCE:]
        self._num_bytes = self._num_bytes - sum(map(bytes_of, taken)) if self._pending else 0
        return taken


def bytes_of(output: StepOutput) -> int:
    """About how much memory an output takes."""
    if not output.logprobs and not output.prompt_logprobs:
        return OUTPUT_BYTES
    entries = (*output.logprobs, *output.prompt_logprobs)
    return OUTPUT_BYTES + len(entries) * (LOGPROBS_BYTES + len(entries[0].top) * ALTERNATIVE_BYTES)


class Board:
    """Opens, feeds and closes generations.

    `queue` says whether there is room for one more. `aborted` counts the sequences that were ended before their time,
    by the name of the error that ended them.
    """

    def __init__(self, engine: EngineLike, texts: Texts, queue: QueueAccount) -> None:
        self._engine = engine
        self._texts = texts
        self.queue = queue
        self._by_id: dict[int, Generation] = {}
        self.aborted: Counter[str] = Counter()
        self.deliveries = Deliveries()

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine still works on or has in its queue."""
        return len(self._by_id)

    def open(
        self,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams,
        *,
        tenant: str = "",
        priority: int = 0,
        cache_salt: str = "",
        ttft_target_ns: int | None = None,
        itl_target_ns: int | None = None,
        make_choice: MakeChoice = ChoiceText,
        report: PromptReport | None = None,
    ) -> Generation:
        """Submit every prompt with its n choices; choice k of prompt i has index i·n + k.

        Raises Overloaded, EngineDead, and RequestError for more than the queue could ever take.
        """
        num = len(prompts) * params.n
        sizes = [len(prompt) if k == 0 else 1 for prompt in prompts for k in range(params.n)]
        self.queue.check(num, sum(sizes), time.monotonic_ns())
        first_id = self._engine.allocate_ids(num)
        choices = [make_choice(i, self._texts, params) for i in range(num)]
        generation = Generation(choices, first_id, sum(map(len, prompts)), report)
        for i, prompt in enumerate(prompts):
            submit = Submit(
                first_id + i * params.n, prompt, params, tenant, priority, cache_salt, ttft_target_ns, itl_target_ns
            )
            generation.seed = self._engine.submit(submit)
        self._by_id.update(dict.fromkeys(generation.by_id, generation))
        self.queue.enter(dict(zip(generation.by_id, sizes, strict=True)), generation.submitted_ns, tenant)
        return generation

    def deliver(self, outputs: Sequence[StepOutput]) -> None:
        """One step's outputs; those of forgotten requests are dropped."""
        self.deliveries.begin()
        self.queue.catch_up()
        by_id, num_woken = self._by_id, 0
        for output in outputs:
            generation = by_id.get(output.request_id)
            if generation is None:
                continue
            if output.retry_after_s is not None:
                self.queue.tenants.refused(output.request_id, output.retry_after_s, time.monotonic_ns())
            if output.finish_reason is not None or output.refused:
                self._forget(output.request_id)
            num_woken += generation.push(output)
        self.deliveries.handed_out(len(outputs), num_woken)

    def _forget(self, request_id: int) -> bool:
        """Whether it was known; its room in the queue is free again."""
        if self._by_id.pop(request_id, None) is None:
            return False
        self.queue.leave((request_id,))
        return True

    def close(self, generation: Generation, error: type[Exception] = Exception) -> None:
        """Forget a generation; what is unfinished is aborted in the engine, because of an `error` of that kind."""
        self.deliveries.give_turn(generation)
        unfinished = tuple(key for key in generation.by_id if self._forget(key))
        if unfinished:
            self.aborted[error.__name__] += len(unfinished)
            self._engine.abort(Abort(unfinished))

    def end(self, generation: Generation, error: Exception) -> None:
        """As `close`, and the reader ends with `error`."""
        self.close(generation, type(error))
        generation.fail(error)

    def fail_all(self, error: Exception) -> None:
        """End every generation with `error`, and abort what the engine may still run."""
        for generation in set(self._by_id.values()):
            self.end(generation, error)

    async def parts(self, generation: Generation) -> Iterator[Part]:
        """The news since the last call.

        Raises what ended the generation from outside; the iterator raises RequestError or Overloaded (refused by the
        engine) or GenerationFailed after all that came before.
        """
        self.deliveries.give_turn(generation)
        outputs = await generation.outputs()
        self.deliveries.take_turn(generation)
        return self._timed(generation, self._read(generation, outputs))

    def _timed(self, generation: Generation, parts: Iterator[Part]) -> Iterator[Part]:
        """The same; making one is detokenising, and what its reader does with it before the next is encoding."""
        mark = self.deliveries.mark
        for part in parts:
            mark(DeliveryPart.DETOKENISE, generation)
            yield part
            mark(DeliveryPart.ENCODE, generation)
        mark(DeliveryPart.DETOKENISE, generation)

    def _read(self, generation: Generation, outputs: list[StepOutput]) -> Iterator[Part]:
        if generation.report is not None:
            outputs = generation.report.ready(outputs, generation.first_id)
        for output in outputs:
            _raise_failure(output)
            choice = generation.by_id[output.request_id]
            if choice.finish_reason is None:
                yield from self._take(generation, choice, output)

    def _take(self, generation: Generation, choice: Choice, output: StepOutput) -> Iterator[Part]:
        for piece in choice.take(output):
            yield Part(choice.index, piece)
        if choice.finish_reason is not None:
            generation.num_unfinished -= 1
            if self._forget(output.request_id):  # ended here before the engine saw why
                self._engine.abort(Abort((output.request_id,)))
            yield Part(choice.index, None, choice.finish_reason)


def _raise_failure(output: StepOutput) -> None:
    if output.refused:
        message = output.error or "the request cannot be served"
        if output.retry_after_s is not None:
            raise Overloaded(message, output.retry_after_s, output.error_code)
        raise RequestError(message, param=output.error_param, code=output.error_code)
    if output.finish_reason in ("error", "abort"):
        raise GenerationFailed(output.error or "the request was ended by the server")
