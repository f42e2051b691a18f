"""Official clients against a running server: what they get is what it sent, and they send what was recorded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from tests.conformance.clients import CLIENTS, Site
from tests.conformance.drive import hub, openai_python
from tests.conformance.environments import environment
from tests.conformance.proxy import RecordingProxy
from tests.conformance.record import kinds, recorded, sent, write_tokenizer
from tests.conformance.trial import try_client
from tests.server.parrot import MODEL, ParrotServer, parrot, wait_until
from tests.server.test_model import ServerProcess


@pytest.fixture(scope="module")
def server() -> Iterator[ParrotServer]:
    with parrot() as running:
        yield running


CHATTING = [name for name, kind in CLIENTS.items() if kind.lock == "clients" and name != "lm-eval"]
APART = [name for name, kind in CLIENTS.items() if kind.lock is None]


def url_of(server: ParrotServer) -> str:
    return f"http://127.0.0.1:{server.port}"


@pytest.mark.parametrize(
    ("name", "drive"), [("openai-python", openai_python.drive), ("huggingface_hub", hub.drive)], ids=["openai", "hub"]
)
def test_a_client_of_the_tests_environment_gets_through(
    name: str, drive: Callable[[str, str], None], server: ParrotServer
) -> None:
    """It sends what was recorded of the version that is installed."""
    with RecordingProxy(url_of(server)) as proxy:
        drive(proxy.url, MODEL)
    assert kinds(sent(proxy.exchanges)).keys() == kinds(recorded(name)["requests"]).keys()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CHATTING)
def test_a_client_from_clients_lock_gets_through(name: str, server: ParrotServer, tmp_path: Path) -> None:
    """Its own checks hold, and what it read is what the parrot said: the first bytes of the messages."""
    kind = CLIENTS[name]
    trial = try_client(kind, environment(kind), Site(url_of(server), MODEL, tmp_path, tmp_path))
    assert trial.passed, trial.report()
    assert trial.output.splitlines()[-1] == "Be brief"
    assert kinds(sent(trial.exchanges)).keys() == kinds(recorded(name)["requests"]).keys()


def test_the_openai_client_comes_back_after_429() -> None:
    """It waits as long as `Retry-After` says, and is answered when the queue has moved."""
    statuses: list[int] = []
    with (
        parrot(max_num_seqs=1, max_num_queued_reqs=1) as server,
        openai.OpenAI(base_url=f"{url_of(server)}/v1", api_key="-") as client,
    ):
        client._client.event_hooks["response"] = [lambda response: statuses.append(response.status_code)]
        with server.held(), server.held():  # one runs, one waits
            with pytest.raises(openai.RateLimitError) as caught:
                client.with_options(max_retries=0).completions.create(model=MODEL, prompt="a")
            assert caught.value.code == "queue_full"
            assert int(caught.value.response.headers["retry-after"]) >= 1
            later = ThreadPoolExecutor(1).submit(client.completions.create, model=MODEL, prompt="later")
            wait_until(lambda: len(statuses) == 2)
        assert later.result(60).choices[0].text == "later"
    assert (set(statuses[:-1]), statuses[-1]) == ({429}, 200)


def test_errors_of_the_server_are_the_clients_exceptions() -> None:
    with parrot(api_keys=["key"]) as server:
        client = openai.OpenAI(base_url=f"{url_of(server)}/v1", api_key="another", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        client = openai.OpenAI(base_url=f"{url_of(server)}/v1", api_key="key", max_retries=0)
        assert [model.id for model in client.models.list()] == [MODEL, "alias"]
        server.runner.spoil = lambda request_id, at: "non-finite logits" if at == 2 else None
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model=MODEL, prompt="abcd")
        stream = client.completions.create(model=MODEL, prompt="abcd", stream=True)
        with pytest.raises(openai.APIError, match="non-finite"):
            for _ in itertools.islice(stream, 10):
                pass


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", APART)
def test_a_large_client_gets_through(name: str, tmp_path: Path) -> None:
    """In an environment for it alone, made on first use."""
    kind = CLIENTS[name]
    binaries = environment(kind)
    with ServerProcess() as served:
        trial = try_client(kind, binaries, Site(served.url, "smollm2", write_tokenizer(tmp_path), tmp_path / "out"))
    assert trial.passed, trial.report()
