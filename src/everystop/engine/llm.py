"""`LLM`: the engine as a Python object, without a server."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from everystop.assembly import build_engine, load_weights
from everystop.config import Config
from everystop.config.setting import NETWORK
from everystop.core.errors import ConfigError, EngineDead, EverystopError, RequestError
from everystop.core.plan import TokenLogprobs
from everystop.core.request import SamplingParams
from everystop.engine.arguments import check_ids, checked_params
from everystop.engine.messages import Abort, StepOutput, Submit
from everystop.engine.stops import StopMatcher, shown_control_stop
from everystop.model.chat_template import load_chat_template
from everystop.model.checkpoint import inspect_model
from everystop.model.generation_config import load_generation_defaults
from everystop.model.home import Home
from everystop.model.pull import resolve_model
from everystop.model.tokenizer_files import load_tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class Completion:
    """One choice: its text, its tokens (a stop token included), and why it ended (stop or length)."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """What `generate` returns for one prompt: `outputs` holds its n choices.

    `num_cached_tokens` are those of the prompt that the first choice found in the prefix cache. Where they were asked
    for, `prompt_logprobs` has an entry for each token of the prompt, None for the first.
    """

    prompt_token_ids: tuple[int, ...]
    outputs: list[Completion]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)


class LLM:
    """A loaded model with its own engine. `settings` are the fields of `Config` that are no server's, such as
    `dtype="float32"`.

        llm = LLM("smollm2", max_num_seqs=16)
        [answer] = llm.generate("The capital of France is", SamplingParams(max_tokens=5))
        answer.outputs[0].text

    All prompts of one call are batched continuously; calls from several threads take turns. Raises EverystopError.
    """

    def __init__(self, model: str = "smollm2", **settings: Any) -> None:
        _refuse_foreign(settings)
        config = Config(model=model, **settings)
        home = Home.from_environment()
        checkpoint = inspect_model(resolve_model(config.model, home))
        self.tokenizer = load_tokenizer(checkpoint, home)
        template = None if config.chat_template is None else Path(config.chat_template)
        self.chat_template = load_chat_template(checkpoint, self.tokenizer, template)
        defaults: dict[str, Any] = load_generation_defaults(checkpoint, config.generation_config).values()
        self.default_params = SamplingParams(**defaults)
        self.num_valid_tokens = min(self.tokenizer.num_ids, checkpoint.spec.vocab_size)
        loaded = load_weights(config, checkpoint, home)
        self.engine, self.capacity, _ = build_engine(
            config,
            loaded,
            eos_token_ids=self.tokenizer.eos_ids,
            num_valid_tokens=self.num_valid_tokens,
            make_text_decoder=self.tokenizer.text_decoder,
        )
        self._turn = threading.Lock()
        self._inbox: queue.SimpleQueue[list[StepOutput] | BaseException] = queue.SimpleQueue()
        self.engine.on_outputs = self._inbox.put
        self.engine.on_failure = self._inbox.put
        self._end = weakref.finalize(self, self.engine.stop)  # also when the program ends
        self.engine.start()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Complete each prompt, text or token ids, and return the answers in the order of the prompts.

        `params` is one `SamplingParams` for all, or one a prompt; None is `default_params`, what the model's authors
        recommend. A prompt that cannot be served raises RequestError, and the others of the call are given up.
        """
        listed: Sequence[Any] = [prompts] if isinstance(prompts, str) or _is_ids(prompts) else prompts
        return self._run([self._encode(prompt) for prompt in listed], params)

    def _encode(self, prompt: Any) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        if isinstance(prompt, bytes) or not hasattr(prompt, "__iter__"):
            raise RequestError(f"a prompt is {prompt!r:.60}; it must be text or token ids", param="prompt")
        return check_ids("prompt", prompt, self.num_valid_tokens)

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer each conversation, a list of `{"role": …, "content": …}`, through the model's chat template."""
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        listed: Sequence[Any] = [conversations] if single else conversations
        rendered = [self.chat_template.render(messages) for messages in listed]
        return self._run([tuple(self.tokenizer.encode_rendered(prompt)) for prompt in rendered], params)

    def _run(
        self, prompts: list[tuple[int, ...]], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestOutput]:
        params = [self._default(prompt) for prompt in prompts] if given is None else _one_each(given, len(prompts))
        params = [checked_params(sampling, self.num_valid_tokens) for sampling in params]
        params = [self.tokenizer.with_control_stops(sampling) for sampling in params]
        answers = [
            RequestOutput(prompt, [Completion(k) for k in range(sampling.n)])
            for prompt, sampling in zip(prompts, params, strict=True)
        ]
        with self._turn:
            self._compute(answers, params)
        for answer, sampling in zip(answers, params, strict=True):
            if sampling.prompt_logprobs is not None:
                answer.prompt_logprobs.insert(0, None)
            for choice in answer.outputs:
                choice.text = self._text(choice, sampling)
        return answers

    def _default(self, prompt: tuple[int, ...]) -> SamplingParams:
        """`default_params`, with the recommended length of an answer cut to what fits."""
        length = self.default_params.max_tokens
        if length is None:
            return self.default_params
        return replace(self.default_params, max_tokens=max(1, min(length, self.capacity.max_model_len - len(prompt))))

    def _compute(self, answers: list[RequestOutput], params: list[SamplingParams]) -> None:
        """Submit all and wait for all; whatever interrupts this, the engine forgets what is unfinished."""
        by_id: dict[int, tuple[RequestOutput, Completion]] = {}
        try:
            for answer, sampling in zip(answers, params, strict=True):
                first = self.engine.allocate_ids(sampling.n)
                by_id.update({first + k: (answer, choice) for k, choice in enumerate(answer.outputs)})
                self.engine.submit(Submit(first, answer.prompt_token_ids, sampling))
            self._collect(by_id)
        finally:
            self.engine.abort(Abort(tuple(by_id)))

    def _collect(self, by_id: dict[int, tuple[RequestOutput, Completion]]) -> None:
        """Take outputs until every request has ended; raises for the first that failed or was refused."""
        while by_id:
            outputs = self._inbox.get()
            if isinstance(outputs, BaseException):
                raise EngineDead(f"the engine has ended: {outputs}") from outputs
            for output in outputs:
                if output.request_id in by_id:  # others belong to a call that was given up
                    self._take(output, by_id)

    def _take(self, output: StepOutput, by_id: dict[int, tuple[RequestOutput, Completion]]) -> None:
        answer, choice = by_id[output.request_id]
        answer.prompt_logprobs += output.prompt_logprobs
        choice.token_ids += output.token_ids
        choice.logprobs += output.logprobs
        if choice.index == 0:  # the others find what it has computed itself
            answer.num_cached_tokens = max(answer.num_cached_tokens, output.num_cached_tokens)
        if output.refused or output.finish_reason is not None:
            choice.finish_reason = output.finish_reason or "error"
            choice.stop_reason = output.stop_reason
            del by_id[output.request_id]
        if output.error is not None:
            raise RequestError(output.error, param=output.error_param, code=output.error_code)

    def _text(self, choice: Completion, params: SamplingParams) -> str:
        is_at_string, shows_stop = isinstance(choice.stop_reason, str), params.include_stop_str_in_output
        drops_last = isinstance(choice.stop_reason, int) and not shows_stop
        decoder = self.tokenizer.text_decoder(skip_special_tokens=params.skip_special_tokens)
        token_ids = choice.token_ids[:-1] if drops_last else choice.token_ids
        early = decoder.push(token_ids[: params.min_tokens])
        rest = decoder.push(token_ids[params.min_tokens :]) + decoder.flush()
        rest += shown_control_stop(params, choice.stop_reason, self.tokenizer.token_bytes)
        if not is_at_string:
            return early + rest
        matcher = StopMatcher(params.stop, shows_stop=shows_stop)
        return matcher.feed(early, may_stop=False)[0] + matcher.feed(rest)[0]

    def close(self) -> None:
        """End the engine and free its memory; a call in another thread ends with EngineDead."""
        self._end()
        self._inbox.put(EngineDead("it was closed"))

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_ids(prompts: Any) -> bool:
    return hasattr(prompts, "__len__") and len(prompts) > 0 and hasattr(prompts[0], "__index__")


def _refuse_foreign(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings that do not exist, or that only a server could honour."""
    foreign = {setting.name for setting in fields(Config) if setting.metadata.get("group") == NETWORK}
    known = {setting.name for setting in fields(Config)} - foreign - {"model"}
    for name in settings:
        if name in foreign:
            raise ConfigError(f"{name} concerns the server alone, and LLM starts none; leave it out")
        if name not in known:
            raise ConfigError(f"there is no setting {name!r}; there are: {', '.join(sorted(known))}")


def _one_each(params: SamplingParams | Sequence[SamplingParams], num: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams) or not isinstance(params, Sequence):
        return [params] * num
    if len(params) != num:
        raise EverystopError(f"{num} prompts, but {len(params)} sampling parameters; give one, or one each")
    return list(params)
