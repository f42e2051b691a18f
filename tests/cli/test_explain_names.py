"""`everystop explain`: by which names a request is found, in a record and on a real server."""

from __future__ import annotations

import json

import pytest
from tests.core.harness import Harness, make_request, make_scheduler
from tests.server.parrot import parrot

from everystop.cli import main
from everystop.cli.explain import find
from everystop.observe.history import Client, History


def test_a_request_is_found_by_the_id_of_its_answer_its_own_name_and_its_number() -> None:
    history, harness = History(), Harness(make_scheduler())
    history.add_client(Client("cmpl-a", "", 0, 2, 0, 0, given_name="job-7"))
    for i in range(3):
        harness.add(make_request(i, 8, max_tokens=2))
    harness.run()
    history.receive(harness.events)
    history.catch_up()
    for name in ("cmpl-a", "job-7", "0", "1", "r1"):
        assert find(history, name) == [0, 1], name
    assert find(history, "2") == find(history, "r2") == [2], "nobody's, as in a record of a run without a server"
    for name in ("3", "r", "", "-1", "job", "9" * 40, "٣"):
        assert find(history, name) == [], name


def test_a_server_explains_to_whom_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    with parrot(api_keys=("a", "b")) as server:
        url = f"http://127.0.0.1:{server.port}"
        headers = {"authorization": "Bearer a", "x-request-id": "job/7"}
        status, body = server.post("/v1/completions", {"prompt": "abc"}, headers)
        assert status == 200
        assert main(["explain", "job/7", "--url", url, "--api-key", "a", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["id"] == body["id"]
        assert main(["explain", body["id"], "--url", url, "--api-key", "a"]) == 0
        assert body["id"] in capsys.readouterr().out
        for options, says in (([], "wants a key"), (["--api-key", "b"], "no request 'job/7'")):
            assert main(["explain", "job/7", "--url", url, *options]) == 1
            assert says in capsys.readouterr().err
