"""Explanations of requests to the embedded model, behind a server in its own process."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import openai
import pytest
from tests.server.parrot import wait_until
from tests.server.test_model import END_S, ServerProcess
from tests.server.test_requests import check_sum

pytestmark = pytest.mark.model
KEY_A = {"authorization": "Bearer key-of-a"}
OPTIONS = ("--api-key", "key-of-a", "--api-key", "key-of-b", "--admin-key", "key-of-root")
TEXT = "Once upon a time there was a bus that stopped wherever somebody wanted to get on. "


@pytest.fixture(scope="module")
def served() -> Iterator[ServerProcess]:
    with ServerProcess("--max-model-len", "2048", "--max-num-seqs", "3", "--slow-log", "1", *OPTIONS) as server:
        yield server


def post(served: ServerProcess, body: dict[str, Any], **headers: str) -> tuple[int, str, bytes]:
    """Status, x-request-id and body of an answer."""
    status, answered, answer = served.request("POST", "/v1/completions", body, KEY_A | headers)
    return status, answered["x-request-id"], answer


def ask(served: ServerProcess, name: str, key: str = "key-of-a") -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}"}
    status, _, body = served.request("GET", f"/v1/requests/{name}/explain", headers=headers)
    return status, json.loads(body)


def explained(served: ServerProcess, name: str) -> Any:
    """The explanation of a request, once its end has been noted."""
    wait_until(lambda: not ask(served, name)[1].get("is_live", False))
    status, told = ask(served, name)
    assert status == 200
    check_sum(told)
    return told


def test_time_that_the_client_saw_is_explained(served: ServerProcess) -> None:
    """Eight requests at once for three places: streamed, whole, of several choices, with long prompts."""
    start = threading.Barrier(8)

    def send(number: int) -> tuple[str, int]:
        body = {"prompt": TEXT * (1 + 8 * (number % 2)), "max_tokens": 20, "ignore_eos": True}
        body |= {"stream": number % 3 == 0, "n": 1 + number // 6}
        start.wait(60)
        began_ns = time.monotonic_ns()
        status, name, _ = post(served, body, **{"x-request-id": f"job-{number}"})
        assert (status, name) == (200, f"job-{number}")
        return name, time.monotonic_ns() - began_ns

    with ThreadPoolExecutor(8) as pool:
        sent = list(pool.map(send, range(8)))
    causes: set[str] = set()
    for name, took_ns in sent:
        told = explained(served, name)
        shares = {cause["cause"]: cause["ns"] for cause in told["causes"]}
        assert told["e2e_ns"] - shares["delivery"] <= took_ns  # the last byte may be read before the server's clock is
        assert told["num_output_tokens"] == len(told["tokens"]) == 20
        assert told["ttft_ns"] <= told["e2e_ns"]
        causes |= set(shares)
    assert {"receive", "prefill", "decode", "others_prefill", "queue.no_slot", "delivery"} <= causes


def test_client_that_leaves_and_one_that_is_refused_are_explained(served: ServerProcess) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=END_S)) as connection:
        body = {"prompt": TEXT, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), KEY_A)
        with connection.getresponse() as answer:
            name = answer.headers["x-request-id"]
            answer.readline()
    assert explained(served, name)["state"] == "aborted"
    fields = {"min_tokens": 2, "max_tokens": 9, "allowed_token_ids": [2]}  # <|im_end|> alone, and not yet
    status, name, _ = post(served, {"prompt": TEXT, **fields})
    assert status == 400
    assert explained(served, name)["state"] == "refused"


def test_official_client_asks_by_the_id_that_it_has_and_sees_no_comments(
    served: ServerProcess,
) -> None:
    request: dict[str, Any] = {"model": "smollm2", "prompt": TEXT, "max_tokens": 60, "temperature": 0}
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="key-of-b", max_retries=0) as client:
        whole = client.completions.create(**request)
        assert whole._request_id == whole.id
        assert ask(served, whole.id, "key-of-b")[1]["id"] == whole.id

        def stream(_: int) -> str:
            options: Any = {"include_progress": True}
            events = client.completions.create(**request, stream=True, stream_options=options)
            return "".join(event.choices[0].text for event in events)

        with ThreadPoolExecutor(9) as pool:
            assert set(pool.map(stream, range(9))) == {whole.choices[0].text}


def test_slow_log_names_reasons_and_no_secrets(served: ServerProcess) -> None:
    names: list[str] = []

    def is_told() -> bool:
        """Only so many are explained as there is time for, and many have come before."""
        names.append(post(served, {"prompt": TEXT, "max_tokens": 5})[1])
        time.sleep(0.5)
        return any(f"slow request {names[-1]}, " in line for line in served.complaints)

    wait_until(is_told)
    name = names[-1]
    said = "".join(served.complaints) + "".join(served.screen)
    assert "key-of-" not in said
    assert "upon a time" not in said
    assert len([line for line in served.complaints if f"slow request {name}, " in line]) == 1
    wait_until(lambda: any(f" request id={name} " in line for line in served.complaints))


def test_others_see_nothing_but_an_administrator_all(served: ServerProcess) -> None:
    _, name, _ = post(served, {"prompt": TEXT, "max_tokens": 2})
    statuses = {key: ask(served, name, f"key-of-{key}")[0] for key in ("a", "b", "root", "nobody")}
    assert statuses == {"a": 200, "b": 404, "root": 200, "nobody": 401}
