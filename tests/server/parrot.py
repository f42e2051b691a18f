"""A server in a thread over the real engine and a runner without a model: it repeats its prompt, then ends.

Token i below 256 is byte i; 256 is the end token, 257 a control token that is never shown. So a test writes the answer
it wants as the prompt. With `ignore_eos` the prompt is repeated for ever: without `max_tokens` it slows down before it
reaches the longest that the model knows, so that only the test ends it.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import uvloop

from everystop.config import Config
from everystop.core.errors import ChatTemplateError
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.plan import PromptLogits, StepPlan, StepResult, TokenLogprobs
from everystop.core.policy import make_policy
from everystop.core.recording import RecordingScheduler
from everystop.core.request import SamplingParams
from everystop.core.rows import Row
from everystop.core.scheduler import Scheduler
from everystop.engine.engine import Engine
from everystop.model.messages import PLAIN, ChatOptions
from everystop.observe.recorder import Recorder
from everystop.server.listener import listen
from everystop.server.opening import tenant_limits
from everystop.server.protocol import Accepted
from everystop.server.queue import QueueLimits
from everystop.server.service import Service
from everystop.server.state import EngineLimits, ServedModel

EOS, CONTROL, VOCAB = 256, 257, 258
CONTROL_TEXTS = {EOS: b"<end>", CONTROL: b"<control>"}
MODEL = "parrot"
DEADLINE_S = 60.0  # so long a loaded machine may take for what takes an idle one a moment
LINGER_FROM, LINGER_S = 300, 0.05


class ParrotDecoder:
    """Incremental UTF-8 over byte tokens."""

    def __init__(self, *, skip_special_tokens: bool = True) -> None:
        self._skips = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        if token_id < 256:
            return self._decoder.decode(bytes([token_id]))
        return "" if self._skips else CONTROL_TEXTS[token_id].decode()

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ParrotTexts:
    """What the server needs of a tokenizer."""

    control_ids = frozenset({EOS, CONTROL})

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else CONTROL_TEXTS[token_id]

    def text_decoder(self, *, skip_special_tokens: bool = True) -> ParrotDecoder:
        return ParrotDecoder(skip_special_tokens=skip_special_tokens)

    def with_control_stops(self, params: SamplingParams) -> SamplingParams:
        ids = tuple(i for i, text in CONTROL_TEXTS.items() if text.decode() in params.stop)
        return replace(params, stop_token_ids=(*params.stop_token_ids, *ids))

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        shown = [i for i in ids if not (skip_special_tokens and i in self.control_ids)]
        return b"".join(map(self.token_bytes, shown)).decode(errors="replace")

    def spans(self, text: str, *, add_special: bool = True) -> list[tuple[int, int, int]]:
        return [(byte, i, i + 1) for i, character in enumerate(text) for byte in character.encode()]


class ParrotRunner:
    """Output k of a request is token k of its prompt, then EOS; `before_step` may wait or raise."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.before_step: Callable[[StepPlan], None] = lambda plan: None
        self.spoil: Callable[[int, int], str | None] = lambda request_id, position: None
        self._prompts: dict[int, tuple[tuple[int, ...], SamplingParams]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        for request_id in (*plan.released, *plan.preempted):
            del self._prompts[request_id]
        for admitted in plan.admitted:
            prompt = admitted.token_ids[: admitted.num_prompt_tokens]
            self._prompts[admitted.request_id] = (prompt, admitted.params)
        self.before_step(plan)
        step_s = max(self.step_s, LINGER_S) if any(map(self._lingers, plan.rows)) else self.step_s
        if step_s:
            time.sleep(step_s)
        result = StepResult(rows=[], execute_ns=int(step_s * 1e9))
        for row in plan.rows:
            prompt, params = self._prompts[row.request_id]
            if row.logits_from >= row.num_tokens:
                result.rows.append(())
                continue
            position = row.start + row.num_tokens - len(prompt)
            failure = self.spoil(row.request_id, position)
            token = prompt[position % len(prompt)] if params.ignore_eos or position < len(prompt) else EOS
            result.rows.append((token,) if failure is None else failure)
            if params.logprobs is not None:
                top = tuple(((token + i) % 256, -0.5 - i) for i in range(params.logprobs))
                result.logprobs[row.request_id] = [TokenLogprobs(-0.5, 0, top)]
        for each in plan.prompt_logits:
            if not isinstance(result.rows[plan.rows.request_ids.index(each.request_id)], str):
                result.prompt_logprobs[each.request_id] = self._score(each)
        return result

    def hold_after_first_token(self) -> threading.Event:
        """Have steps that go on with an answer wait for the event that is returned; first tokens come as ever."""
        gate = threading.Event()

        def wait(plan: StepPlan) -> None:
            if any(row.start >= len(self._prompts[row.request_id][0]) for row in plan.rows):
                gate.wait(DEADLINE_S)

        self.before_step = wait
        return gate

    def _lingers(self, row: Row) -> bool:
        prompt, params = self._prompts[row.request_id]
        return params.ignore_eos and params.max_tokens is None and row.start > len(prompt) + LINGER_FROM

    def _score(self, wanted: PromptLogits) -> list[TokenLogprobs]:
        """The prompt's token at position p has -p/8 and rank 2, the one after it in the alphabet is the best."""
        prompt, params = self._prompts[wanted.request_id]
        scores = []
        for position in range(wanted.start + 1, wanted.start + wanted.num_tokens + 1):
            token, logprob = prompt[position], -position / 8
            top = (
                ((token + 1) % 256, -0.0625),
                (token, logprob),
                *(((token + i) % 256, -9.0 - i) for i in range(2, 20)),
            )
            scores.append(TokenLogprobs(logprob, 2, top[: params.prompt_logprobs]))
        return scores

    def close(self) -> None:
        """Nothing to release."""


def encode_chat(messages: Sequence[Mapping[str, Any]], options: ChatOptions = PLAIN) -> list[int]:
    """The contents of all messages, one after the other; refuses two turns of one role in a row.

    What the options change is written behind them.
    """
    for one, next_one in itertools.pairwise(messages):
        if one["role"] == next_one["role"]:
            raise ChatTemplateError("roles must alternate")
    changed = {
        field.name: value
        for field in fields(options)
        if (value := getattr(options, field.name)) != getattr(PLAIN, field.name)
    }
    return list(
        ("".join(message["content"] for message in messages) + (json.dumps(changed) if changed else "")).encode()
    )


def _settings_in(options: dict[str, Any]) -> dict[str, Any]:
    """Take out what belongs into a `Config`; `tenants` are an object here, and there a file."""
    names = {field.name for field in fields(Config)} - {"tenants"}
    return {name: options.pop(name) for name in names & options.keys()}


class ParrotServer:
    """A running server; `runner` may be tampered with, `request` asks it. Options are those of the engine, of `Config`
    and of `Service`, by their names.
    """

    def __init__(self, **options: Any) -> None:
        self.runner = ParrotRunner()
        self.says: list[str] = []
        self.exit_code: int | None = None
        self.num_blocks = options.pop("num_blocks", 64)
        self._max_model_len = options.pop("max_model_len", 1024)
        self._max_num_seqs = options.pop("max_num_seqs", 16)
        self._policy = options.pop("policy", None) or make_policy("continuous")
        self._policy_name = type(self._policy).__name__.lower()
        tenants = options.get("tenants")
        self._queue = QueueLimits(
            options.pop("max_num_queued_reqs", 4096),
            options.pop("max_num_queued_tokens", 1 << 20),
            {} if tenants is None else tenant_limits(tenants),
        )
        self._tenant_names = tuple(tenants.by_name) if tenants is not None else ()
        self._has_priorities = options.pop("has_priorities", False)
        self._has_targets = options.pop("has_targets", False)
        self._gives_metrics = options.pop("gives_metrics", False)
        self._recorder: Recorder | None = options.pop("recorder", None)
        self._names_tenants = tenants is not None and tenants.user
        self.load_gate = threading.Event()
        self.before_long_encode: Callable[[], None] = lambda: None
        if not options.pop("hold_loading", False):
            self.load_gate.set()
        self._sock = listen("127.0.0.1", 0)
        self.port: int = self._sock.getsockname()[1]
        config = Config(**{"on_engine_failure": "stay", **_settings_in(options)})
        self.service = Service(self._sock, self._load, config, **{"say": self.says.append, **options})
        self.engine: Engine
        self.loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _load(self) -> ServedModel:
        self.load_gate.wait(DEADLINE_S)
        kv = KVCache(num_blocks=self.num_blocks, block_size=16, enable_prefix_caching=True)
        limits = Limits(max_num_seqs=self._max_num_seqs, max_num_batched_tokens=64, max_model_len=self._max_model_len)
        recorder = self._recorder
        if recorder is None:
            self.scheduler = Scheduler(limits, kv, self._policy)
        else:
            self.scheduler = RecordingScheduler(limits, kv, self._policy, recorder)
        self.engine = Engine(
            self.scheduler,
            self.runner,
            eos_token_ids=(EOS,),
            make_text_decoder=ParrotDecoder,
            on_stop=None if recorder is None else recorder.close,
        )
        return ServedModel(
            engine=self.engine,
            texts=ParrotTexts(),
            accepted=Accepted(
                (MODEL, "alias"),
                VOCAB,
                self._max_model_len,
                has_priorities=self._has_priorities,
                has_targets=self._has_targets,
                names_tenants=self._names_tenants,
                gives_metrics=self._gives_metrics,
            ),
            encode=self._encode,
            encode_chat=encode_chat,
            limits=EngineLimits(
                policy=self._policy_name, max_num_seqs=self._max_num_seqs, max_num_batched_tokens=64, block_size=16
            ),
            num_blocks=self.num_blocks,
            fingerprint="fp_parrot",
            queue=self._queue,
            tenant_names=self._tenant_names,
            recorder=recorder,
        )

    def _encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The bytes, and "(bare)" behind them where nothing special is to be added."""
        if len(text) > 10_000:
            self.before_long_encode()
        return list(text.encode() + (b"" if add_special else b"(bare)"))

    def run_here(self) -> int:
        """Serve on this thread, which handles signals if it is the main one; returns the exit code."""
        self._run()
        assert self.exit_code is not None
        return self.exit_code

    def _run(self) -> None:
        async def main() -> int:
            self.loop = asyncio.get_running_loop()
            return await self.service.run()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            self.exit_code = runner.run(main())

    def __enter__(self) -> ParrotServer:
        self._thread.start()
        if self.load_gate.is_set():
            wait_until(lambda: self.get("/health")[0] == 200)
        return self

    def __exit__(self, *exc: object) -> None:
        self.load_gate.set()
        self.runner.before_step = lambda plan: None
        self.stop()
        self.stop()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def let_tick(self, num: int) -> None:
        """Wait until the service has looked after its affairs so many times more."""
        clock = self.service.state.stall_clock
        for _ in range(num):
            before_ns = clock._turned_ns
            wait_until(lambda before_ns=before_ns: clock._turned_ns != before_ns)  # type: ignore[misc]

    def stop(self) -> None:
        """What a signal does."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.service.request_stop)

    def join(self) -> int:
        """Wait for the end; returns the exit code."""
        self._thread.join(DEADLINE_S)
        assert self.exit_code is not None
        return self.exit_code

    @property
    def num_free_blocks(self) -> int:
        return self.scheduler.kv.pool.num_free

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (names in lower case) and body."""
        connection = self.connect()
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        with contextlib.closing(connection):
            connection.request(method, path, data, dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        status, _, body = self.request("GET", path, headers=headers)
        return status, body

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        """Status and parsed JSON."""
        status, _, answer = self.request("POST", path, body, headers)
        return status, json.loads(answer)

    def complete(self, prompt: Any, **fields: Any) -> tuple[int, Any]:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def chat(self, content: Any, **fields: Any) -> tuple[int, Any]:
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"messages": messages, **fields})

    @contextlib.contextmanager
    def held(self, headers: Mapping[str, str] | None = None, **fields: Any) -> Iterator[http.client.HTTPConnection]:
        """A request that has reached the engine and never ends by itself; its client leaves with the context."""
        before = set(self.scheduler.requests)  # which may end meanwhile
        body = json.dumps({"prompt": "abc", "ignore_eos": True, **fields})
        with contextlib.closing(self.connect()) as connection:
            connection.request("POST", "/v1/completions", body, dict(headers or {}))
            wait_until(lambda: not before.issuperset(self.scheduler.requests.copy()))
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result()  # the turn that submitted it is over
            yield connection

    def events(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """The events of a streamed answer; the last is "[DONE]"."""
        status, headers, answer = self.request("POST", path, {**body, "stream": True})
        assert status == 200, answer
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        return parse_events(answer)

    def metric(self, name: str, label: str = "", headers: Mapping[str, str] | None = None) -> float:
        """The sum of a metric's samples that have this label."""
        lines = self.get("/metrics", headers)[1].decode().splitlines()
        named = [line for line in lines if line.partition("{")[0] == f"everystop_{name}" and label in line]
        values = [float(line.rpartition(" ")[2]) for line in named]
        assert values, name
        return sum(values)


def parse_events(body: bytes) -> list[Any]:
    """Strict: every event is one `data:` line, and lines end where `splitlines` of any client would end them."""
    text = body.decode()
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    events: list[Any] = []
    for block in blocks:
        assert block.splitlines() == [block]
        assert block.startswith("data: ")
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


def wait_until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


@contextlib.contextmanager
def parrot(**options: Any) -> Iterator[ParrotServer]:
    with ParrotServer(**options) as server:
        yield server
