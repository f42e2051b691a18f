"""The board of running generations: what goes to the engine, and who gets what comes back. Asyncio thread only."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

from everystop.core.errors import RequestError
from everystop.core.request import SamplingParams
from everystop.engine.messages import Abort, StepOutput, Submit
from everystop.server.errors import ClientGone, GenerationFailed, Overloaded
from everystop.server.texts import ChoiceText, Part, TextDecoder


class EngineLike(Protocol):
    """What the board needs of an engine."""

    def allocate_ids(self, n: int) -> int:
        """The first of n consecutive request ids."""

    def submit(self, message: Submit) -> None:
        """Queue a request; raises EngineDead."""

    def abort(self, message: Abort) -> None:
        """Forget requests; unknown ids are ignored."""


class Texts(Protocol):
    """What the board needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text."""

    def text_decoder(self) -> TextDecoder:
        """A fresh incremental decoder."""


class Generation:
    """One client request on its way: all choices of all its prompts; iterate with `parts`."""

    __slots__ = (
        "_failure",
        "_pending",
        "_waiter",
        "by_id",
        "choices",
        "first_id",
        "num_prompt_tokens",
        "num_unfinished",
        "submitted_ns",
    )

    def __init__(self, choices: list[ChoiceText], first_id: int, num_prompt_tokens: int) -> None:
        self.choices = choices
        self.first_id = first_id
        self.submitted_ns = time.monotonic_ns()
        self.by_id = {first_id + i: choice for i, choice in enumerate(choices)}
        self.num_prompt_tokens = num_prompt_tokens
        self.num_unfinished = len(choices)
        self._pending: list[StepOutput] = []
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, output: StepOutput) -> None:
        """Take one output of the engine; the reader is woken once for all that have come since it slept."""
        self._pending.append(output)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the generation for its reader."""
        if self._failure is None:
            self._failure = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def outputs(self) -> list[StepOutput]:
        """All outputs since the last call, waiting for the first; raises what `fail` was given."""
        if not self._pending and self._failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        if self._failure is not None:
            raise self._failure
        pending, self._pending = self._pending, []
        return pending


class Board:
    """Opens, feeds and closes generations.

    `max_sequences` bounds what the engine holds, running or queued; more is refused (`Overloaded`). `aborted` counts
    the sequences that were ended before their time, by the name of the error that ended them.
    """

    def __init__(self, engine: EngineLike, texts: Texts, max_sequences: int) -> None:
        self._engine = engine
        self._texts = texts
        self._max_sequences = max_sequences
        self._by_id: dict[int, Generation] = {}
        self.aborted: Counter[str] = Counter()

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
    ) -> Generation:
        """Submit every prompt with its n choices; choice k of prompt i has index i·n + k.

        Raises Overloaded, EngineDead.
        """
        num = len(prompts) * params.n
        if len(self._by_id) + num > self._max_sequences:
            raise Overloaded(
                f"{len(self._by_id):,} sequences are running or queued; with these {num:,} there would be more than "
                f"{self._max_sequences:,}; try again later",
                retry_after_s=1,
            )
        first_id = self._engine.allocate_ids(num)
        texts = self._texts
        choices = [ChoiceText(i, texts.text_decoder(), params.stop, texts.token_bytes) for i in range(num)]
        generation = Generation(choices, first_id, sum(map(len, prompts)))
        for i, prompt in enumerate(prompts):
            submit = Submit(
                first_id + i * params.n, prompt, params, tenant, priority, cache_salt, ttft_target_ns, itl_target_ns
            )
            self._engine.submit(submit)
        self._by_id.update(dict.fromkeys(generation.by_id, generation))
        return generation

    def deliver(self, outputs: Sequence[StepOutput]) -> None:
        """One step's outputs; those of forgotten requests are dropped."""
        by_id = self._by_id
        for output in outputs:
            generation = by_id.get(output.request_id)
            if generation is None:
                continue
            if output.finish_reason is not None or output.refused:
                del by_id[output.request_id]
            generation.push(output)

    def close(self, generation: Generation, error: type[Exception] = Exception) -> None:
        """Forget a generation; what is unfinished is aborted in the engine, because of an `error` of that kind."""
        unfinished = tuple(key for key in generation.by_id if self._by_id.pop(key, None) is not None)
        if unfinished:
            self.aborted[error.__name__] += len(unfinished)
            self._engine.abort(Abort(unfinished))

    def abandon(self, generation: Generation) -> None:
        """The client has gone: as `close`, and the reader ends with ClientGone."""
        self.close(generation, ClientGone)
        generation.fail(ClientGone())

    def fail_all(self, error: Exception) -> None:
        """End every generation with `error`, and abort what the engine may still run."""
        for generation in set(self._by_id.values()):
            self.close(generation, type(error))
            generation.fail(error)

    async def parts(self, generation: Generation) -> Iterator[Part]:
        """The news since the last call.

        Raises what ended the generation from outside; the iterator raises RequestError or Overloaded (refused by the
        engine) or GenerationFailed after all that came before.
        """
        return self._read(generation, await generation.outputs())

    def _read(self, generation: Generation, outputs: list[StepOutput]) -> Iterator[Part]:
        for output in outputs:
            _raise_failure(output)
            choice = generation.by_id[output.request_id]
            if choice.finish_reason is None:
                yield from self._take(generation, choice, output)

    def _take(self, generation: Generation, choice: ChoiceText, output: StepOutput) -> Iterator[Part]:
        for piece in choice.take(output):
            yield Part(choice.index, piece)
        if choice.finish_reason is not None:
            generation.num_unfinished -= 1
            if self._by_id.pop(output.request_id, None) is not None:  # ended here before the engine saw why
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
