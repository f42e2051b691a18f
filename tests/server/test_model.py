"""The embedded model behind a server in its own process, asked by the official client and by raw sockets."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.server.parrot import parse_events, wait_until

from everystop import __version__, _native
from everystop.model.checkpoint import inspect_model
from everystop.model.home import Home
from everystop.model.pull import resolve_model
from everystop.model.tokenizer import RenderedPrompt, Tokenizer
from everystop.model.tokenizer_files import load_tokenizer
from everystop.server.opening import fingerprint

pytestmark = pytest.mark.model
START_S, END_S = 120, 60
ROOT = Path(__file__).parents[2]


class ServerProcess:
    """`everystop serve smollm2 --port 0` with more options; ends with the context."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "everystop", "serve", "smollm2", "--port", "0", "--threads", "2", *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.screen: list[str] = []
        self.complaints: list[str] = []
        self._readers = [
            threading.Thread(target=lambda: self.screen.extend(self.process.stdout or ()), daemon=True),
            threading.Thread(target=lambda: self.complaints.extend(self.process.stderr or ()), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> ServerProcess:
        wait_until(lambda: self._url() is not None or self.process.poll() is not None, START_S)
        assert self.process.poll() is None, self.complaints
        return self

    def _url(self) -> str | None:
        found = re.search(r"Serving on (http://\S+)", "".join(self.screen))
        return None if found is None else found[1]

    @property
    def url(self) -> str:
        url = self._url()
        assert url is not None
        return url

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(END_S)
        finally:
            self.process.kill()
            for reader in self._readers:
                reader.join(END_S)
            for pipe in (self.process.stdout, self.process.stderr):
                assert pipe is not None
                pipe.close()

    def get(self, path: str) -> tuple[int, bytes]:
        status, _, body = self.request("GET", path)
        return status, body

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (names in lower case) and body."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=END_S)) as connection:
            connection.request(method, path, None if body is None else json.dumps(body), dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()

    def metric(self, name: str) -> float:
        for line in self.get("/metrics")[1].decode().splitlines():
            if line.startswith(f"everystop_{name}{{"):
                return float(line.rpartition(" ")[2])
        raise AssertionError(name)

    def open_stream(self, **fields: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=END_S)
        body = {"prompt": "Once upon a time", "stream": True, "ignore_eos": True, **fields}
        connection.request("POST", "/v1/completions", json.dumps(body))
        return connection, connection.getresponse()


@pytest.fixture(scope="module")
def served() -> Iterator[ServerProcess]:
    with ServerProcess("--max-model-len", "1024", "--max-num-seqs", "32") as server:
        yield server


@pytest.fixture(scope="module")
def client(served: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(inspect_model(resolve_model("smollm2", Home.from_environment())))


QUESTION: list[Any] = [{"role": "user", "content": "Which city is the capital of France? Give only its name."}]


def test_start_up_says_what_is_served(served: ServerProcess) -> None:
    screen = "".join(served.screen)
    for word in (
        "smollm2",
        "int8",
        "threads",
        "blocks of 32 tokens in int8",
        "requests of 1,024 tokens",
        "temperature",
        "http://",
    ):
        assert word in screen


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=20)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_chat_equals_the_whole_one(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 20}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    usage = chunks[-1].usage
    assert usage is not None
    assert whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    with_text = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(with_text) == usage.completion_tokens - 1, "each token is its own event, but for the one that ends"


def test_completions_of_text_and_ids(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 6}
    text = client.completions.create(prompt=["The capital of France is", "1, 2, 3, 4,"], **request)
    assert "Paris" in text.choices[0].text
    assert "5, 6" in text.choices[1].text
    tokens = client.completions.create(prompt="1, 2, 3, 4,", logprobs=0, **request)
    assert tokens.choices[0].logprobs is not None
    assert "".join(tokens.choices[0].logprobs.tokens or []) == tokens.choices[0].text == text.choices[1].text


def test_n_choices_with_a_seed_differ_and_repeat(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        answer = client.completions.create(
            model="smollm2", prompt="My favourite animal is", n=3, temperature=1, seed=seed, max_tokens=12
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.text for choice in answer.choices]

    first = texts(1)
    assert len(set(first)) == 3
    assert texts(1) == first
    assert texts(2) != first


def test_logprobs_of_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    for token in logprobs.content:
        assert token.logprob == token.top_logprobs[0].logprob <= 0, "greedy takes the best"
        assert len(token.top_logprobs) == 3
        assert [top.logprob for top in token.top_logprobs] == sorted(
            (t.logprob for t in token.top_logprobs), reverse=True
        )
        assert bytes(token.bytes or []).decode() == token.token


def test_stop_strings(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "smollm2", "prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 30}
    free = client.completions.create(**request)
    assert " 7," in free.choices[0].text
    stopped = client.completions.create(**request, stop=[" 7,", "never"])
    assert stopped.choices[0].text == free.choices[0].text.partition(" 7,")[0]
    assert stopped.choices[0].finish_reason == "stop"
    streamed = client.completions.create(**request, stop=" 7,", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == stopped.choices[0].text


def test_logit_bias_forces_a_token_and_end_tokens_end(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "smollm2", "prompt": "The sky is", "temperature": 0, "max_tokens": 3}
    forced = client.completions.create(**request, logit_bias={"7042": 100}, logprobs=0)
    assert forced.choices[0].logprobs is not None
    assert len(set(forced.choices[0].logprobs.tokens or [])) == 1
    for end in ("0", "2"):
        ended = client.completions.create(**request, logit_bias={end: 100})
        assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")
        assert ended.usage is not None
        assert ended.usage.completion_tokens == 1
        going_on = client.completions.create(**request, logit_bias={end: 100}, extra_body={"ignore_eos": True})
        assert (going_on.choices[0].text, going_on.choices[0].finish_reason) == ("", "length")


def test_penalties_and_filters_have_an_effect(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "smollm2", "prompt": "ha ha ha ha ha ha", "max_tokens": 24}
    plain = client.completions.create(**request, temperature=0).choices[0].text
    assert client.completions.create(**request, temperature=0, frequency_penalty=2).choices[0].text != plain
    assert client.completions.create(**request, temperature=0, presence_penalty=2).choices[0].text != plain
    assert (
        client.completions.create(**request, temperature=0, extra_body={"repetition_penalty": 3}).choices[0].text
        != plain
    )
    for narrow in ({"top_k": 1}, {"min_p": 1.0}):
        answer = client.completions.create(**request, temperature=5, seed=1, extra_body=narrow)
        assert answer.choices[0].text == plain
    assert client.completions.create(**request, temperature=5, seed=1, top_p=1e-9).choices[0].text == plain
    assert client.completions.create(**request, temperature=5, seed=1).choices[0].text != plain


def test_errors_are_the_clients_own_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="1,024 tokens") as refusal:
        client.completions.create(model="smollm2", prompt=[100] * 1024)
    assert refusal.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="smollm2", prompt="a", temperature=-1)
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        client.completions.create(model="gpt-5", prompt="a")
    assert [model.id for model in client.models.list()] == ["smollm2"]


@pytest.mark.parametrize("text", ["🙂🙃👍", "สวัสดี", "你好，世界", "naïve café"])
def test_characters_of_several_tokens_are_never_split(
    client: openai.OpenAI, served: ServerProcess, tokenizer: Tokenizer, text: str
) -> None:
    """Only tokens of `text` may be chosen, so that halves of characters come as often as whole ones."""
    answer = client.completions.create(model="smollm2", prompt=text, max_tokens=1)
    assert answer.usage is not None
    ids = tokenizer.encode(text)
    assert answer.usage.prompt_tokens == len(ids)
    fields = {"prompt": text, "max_tokens": 40, "temperature": 1, "seed": 3, "allowed_token_ids": sorted(set(ids))}
    connection, response = served.open_stream(**fields)
    events = parse_events(response.read())
    connection.close()
    deltas = [choice["text"] for event in events[:-1] for choice in event["choices"] if choice["text"]]
    whole = client.completions.create(
        model="smollm2",
        prompt=text,
        max_tokens=40,
        temperature=1,
        seed=3,
        logprobs=0,
        extra_body={"allowed_token_ids": sorted(set(ids)), "ignore_eos": True},
    )
    logprobs: Any = whole.choices[0].logprobs
    raw = b"".join(bytes(token) for token in logprobs.bytes)
    assert whole.choices[0].text == raw.decode(errors="replace")
    assert "".join(deltas) == whole.choices[0].text


def test_a_prompt_that_ends_inside_a_character_leaks_nothing(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello สวัสดี")
    cut = next(i for i in range(len(ids), 0, -1) if tokenizer.decode(ids[:i]).endswith("\ufffd"))
    answer = client.completions.create(model="smollm2", prompt=ids[:cut], max_tokens=8, temperature=0, logprobs=0)
    logprobs: Any = answer.choices[0].logprobs
    raw = b"".join(bytes(token) for token in logprobs.bytes)
    assert answer.choices[0].text == raw.decode(errors="replace")
    assert "Hello" not in answer.choices[0].text


def test_an_answer_goes_on_where_the_last_message_ends(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 24}
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in a sentence."}]
    whole = client.chat.completions.create(**request, messages=messages).choices[0].message.content
    assert whole is not None
    first = whole[: whole.index(" ", len(whole) // 3)]
    messages.append({"role": "assistant", "content": first})
    rest = client.chat.completions.create(**request, messages=messages, extra_body={"continue_final_message": True})
    assert rest.choices[0].message.content is not None
    assert (first + rest.choices[0].message.content)[: len(whole)] == whole
    new = client.chat.completions.create(**request, messages=messages)
    assert new.usage is not None
    assert rest.usage is not None
    assert new.usage.prompt_tokens > rest.usage.prompt_tokens, "the turn was ended, and another one opened"


def test_variables_that_the_template_does_not_know_are_refused(client: openai.OpenAI) -> None:
    for name in ("enable_thinking", "messages"):
        with pytest.raises(openai.BadRequestError, match=r"it has: none") as caught:
            client.chat.completions.create(
                model="smollm2", messages=QUESTION, extra_body={"chat_template_kwargs": {name: True}}
            )
        assert caught.value.param == f"chat_template_kwargs.{name}"


def test_control_tokens_are_shown_or_stop_on_request(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    end = tokenizer.encode_rendered(RenderedPrompt(text="<|im_end|>"))
    only_ends = {"allowed_token_ids": end, "ignore_eos": True}

    def complete(**extra: Any) -> Any:
        answer = client.completions.create(
            model="smollm2", prompt="Hello", max_tokens=3, stop=extra.pop("stop", None), extra_body=only_ends | extra
        )
        return answer.choices[0].text, answer.usage.completion_tokens if answer.usage is not None else 0

    assert complete() == ("", 3)
    assert complete(skip_special_tokens=False) == ("<|im_end|>" * 3, 3)
    assert complete(stop="<|im_end|>") == ("", 1)
    assert complete(stop="<|im_end|>", skip_special_tokens=False, include_stop_str_in_output=True) == ("<|im_end|>", 1)


@pytest.mark.parametrize("stream", [False, True])
def test_settings_that_leave_no_token_end_the_answer(client: openai.OpenAI, tokenizer: Tokenizer, stream: bool) -> None:
    ids = [tokenizer.encode("the")[-1], tokenizer.encode(" the")[-1]]
    fields: dict[str, Any] = {
        "model": "smollm2",
        "prompt": "Say",
        "max_tokens": 9,
        "extra_body": {"allowed_token_ids": ids, "bad_words": ["the the", "thethe"], "logprobs": 2},
    }
    if stream:
        choices = [chunk.choices[0] for chunk in client.completions.create(**fields, stream=True)]
    else:
        choices = client.completions.create(**fields).choices
    assert choices[-1].finish_reason == "stop"
    assert "".join(choice.text for choice in choices) in ("the", " the", " thethe", "the the", " the the")


def test_the_fingerprint_is_that_of_version_model_and_arithmetic(client: openai.OpenAI) -> None:
    digest = Home.from_environment().sha256(resolve_model("smollm2", Home.from_environment()))
    answer = client.completions.create(model="smollm2", prompt="Hello", max_tokens=1)
    assert answer.system_fingerprint == fingerprint(__version__, digest, "int8", "int8", _native.isa())
    assert answer.system_fingerprint != fingerprint(__version__, digest, "int8", "float16", _native.isa())


def test_a_float16_cache_holds_less_and_answers_by_itself() -> None:
    """In 16 MiB there is room for 42 blocks of 382.5 KiB in int8, and for 22 of 720 in float16."""
    digest = Home.from_environment().sha256(resolve_model("smollm2", Home.from_environment()))
    with (
        ServerProcess("--kv-cache-dtype", "float16", "--kv-cache-memory", "16MiB") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        assert "22 blocks of 32 tokens in float16, 15 MiB" in "".join(server.screen)
        assert server.metric("kv_cache_blocks") == 22
        answer = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=20)
        assert "Paris" in (answer.choices[0].message.content or "")
        assert answer.system_fingerprint == fingerprint(__version__, digest, "int8", "float16", _native.isa())


def test_a_second_turn_finds_the_first_in_the_cache(client: openai.OpenAI) -> None:
    question = "Tell me about the history of bread, " + ", ".join(f"and of dish number {i}" for i in range(12)) + "."
    messages: list[Any] = [{"role": "user", "content": question}]
    first = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=70)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Go on."},
    ]
    second = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=1)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    known = first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens == known // 32 * 32


def test_the_same_prompt_cold_and_cached_gives_the_same(client: openai.OpenAI) -> None:
    for num_tokens in (63, 64, 65):
        request: dict[str, Any] = {"model": "smollm2", "prompt": list(range(1000, 1000 + num_tokens)), "max_tokens": 8}
        cold = client.completions.create(
            **request, temperature=0, logprobs=2, extra_body={"cache_salt": str(num_tokens)}
        )
        warm = client.completions.create(
            **request, temperature=0, logprobs=2, extra_body={"cache_salt": str(num_tokens)}
        )
        assert cold.usage is not None
        assert warm.usage is not None
        assert cold.usage.prompt_tokens_details is not None
        assert warm.usage.prompt_tokens_details is not None
        assert cold.usage.prompt_tokens_details.cached_tokens == 0
        assert warm.usage.prompt_tokens_details.cached_tokens == (num_tokens - 1) // 32 * 32
        assert warm.choices == cold.choices


def test_300_streams_closed_early_leave_nothing(served: ServerProcess, client: openai.OpenAI) -> None:
    descriptors = Path(f"/proc/{served.process.pid}/fd")
    wait_until(lambda: served.metric("num_requests_running") == 0)
    before = len(list(descriptors.iterdir()))
    for i in range(300):
        connection, answer = served.open_stream(max_tokens=200)
        for _ in range(1 + i % 3):
            assert answer.readline().startswith(b"data: ")
            answer.readline()
        answer.close()
        connection.close()
    wait_until(lambda: served.metric("num_requests_running") + served.metric("num_requests_waiting") == 0, END_S)
    assert served.metric("kv_cache_usage_perc") == 0
    wait_until(lambda: len(list(descriptors.iterdir())) <= before, END_S)
    assert client.completions.create(model="smollm2", prompt="ok", max_tokens=1).usage is not None


def test_a_burst_computes_a_common_prefix_once(served: ServerProcess, client: openai.OpenAI) -> None:
    before = served.metric("computed_prompt_tokens_total")
    common = [3000 + i % 997 for i in range(512)]
    prompts = [common + [4000 + 41 * i + k for k in range(20)] for i in range(12)]
    answer = client.completions.create(model="smollm2", prompt=prompts, max_tokens=1, temperature=0)
    assert answer.usage is not None
    computed = served.metric("computed_prompt_tokens_total") - before
    assert computed <= 512 + 12 * (20 + 32)
    assert answer.usage.prompt_tokens == 12 * 532


def test_sigterm_lets_running_and_queued_finish() -> None:
    """3 running, 3 queued: all end whole, health says draining, newcomers are sent away, exit 0."""
    flags = ("--max-num-seqs", "3", "--max-model-len", "1024", "--shutdown-timeout", "600")
    with ServerProcess(*flags) as server:
        bodies: list[bytes] = []

        def read() -> None:
            connection, answer = server.open_stream(max_tokens=450)
            bodies.append(answer.read())
            connection.close()

        threads = [threading.Thread(target=read) for _ in range(6)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.metric("num_requests_running") == 3 and server.metric("num_requests_waiting") == 3)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/health") == (503, b'{"status":"draining"}'))
        connection, answer = server.open_stream()
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) > 0
        connection.close()
        for thread in threads:
            thread.join(END_S)
        assert server.process.wait(END_S) == 0
        for body in bodies:
            events = parse_events(body)
            assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert len(bodies) == 6


def test_a_second_sigterm_ends_at_once_with_error_events() -> None:
    with ServerProcess("--max-num-seqs", "2", "--max-model-len", "4096") as server:
        connection, answer = server.open_stream(max_tokens=4000)
        answer.readline()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/health")[0] == 503)
        server.process.send_signal(signal.SIGTERM)
        rest = answer.read()
        connection.close()
        assert b'"code": "draining"' in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert server.process.wait(END_S) == 0


def test_a_taken_port_is_found_before_the_model_is_looked_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        command = [sys.executable, "-m", "everystop", "serve", "no-such-model.gguf", "--port", port]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=END_S, check=False)
    assert done.returncode != 0
    assert f"port {port} on 127.0.0.1 is taken" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_port_0_prints_the_real_port(served: ServerProcess) -> None:
    assert served.port > 0
    assert served.get("/health") == (200, b'{"status":"ok"}')


def test_an_idle_server_computes_nothing(served: ServerProcess) -> None:
    wait_until(lambda: served.metric("num_requests_running") == 0)
    clock = Path(f"/proc/{served.process.pid}/stat")

    def cpu_s() -> float:
        fields = clock.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    steps, used = served.metric("steps_total"), cpu_s()
    time.sleep(2)
    assert served.metric("steps_total") == steps
    assert cpu_s() - used < 0.5, "two seconds of idling took that much CPU time"
