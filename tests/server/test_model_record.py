"""A server's record tells of each HTTP request what the server itself told while it ran."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.observe.scrapes import Sample, from_events, samples_of
from tests.server.parrot import wait_until
from tests.server.test_model import END_S, ServerProcess

from everystop import cli
from everystop.observe.prometheus import render
from everystop.sim.recount import metrics_of_record
from everystop.sim.replay import history_of_record

pytestmark = pytest.mark.model
TEXT = "Once upon a time there was a bus that stopped wherever somebody wanted to get on. "


def ask(server: ServerProcess, name: str) -> Any:
    return json.loads(server.get(f"/v1/requests/{name}/explain")[1])


def test_record_explains_requests_as_the_server_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.gz"

    def send(number: int) -> str:
        body = {"prompt": TEXT * (1 + 5 * (number % 2)), "max_tokens": 12, "ignore_eos": True}
        body |= {"stream": number % 3 == 0, "n": 1 + number // 4}
        status, headers, _ = server.request("POST", "/v1/completions", body, {"x-request-id": f"job-{number}"})
        assert (status, headers["x-request-id"]) == (200, f"job-{number}")
        return f"job-{number}"

    with ServerProcess("--max-model-len", "1024", "--max-num-seqs", "2", "--record", str(path)) as server:
        with ThreadPoolExecutor(6) as pool:
            names = list(pool.map(send, range(6)))
        body = {"prompt": TEXT, "min_tokens": 2, "allowed_token_ids": [2], "stop_token_ids": [2]}
        status, _, answer = server.request("POST", "/v1/completions", body)
        assert (status, json.loads(answer)["error"]["param"]) == (400, "min_tokens")
        wait_until(lambda: not any(ask(server, name)["is_live"] for name in names))
        told = {name: ask(server, name) for name in names}
        live = samples_of(server.get("/metrics")[1])
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(END_S)
    history = history_of_record(path)
    assert sorted(history.clients) == sorted(client for client in history.clients if client.startswith("cmpl-"))
    assert len(history.clients) == 7
    assert sum(trail.refusal is not None for trail in history.trails.values()) == 1
    for name in names:
        assert cli.main(["explain", told[name]["id"], "--record", str(path), "--json"]) == 0
        again = json.loads(capsys.readouterr().out)
        assert sum(cause["ns"] for cause in again["causes"]) == again["e2e_ns"]
        for key in ("e2e_ns", "ttft_ns", "queue_ns", "num_output_tokens", "causes", "segments", "tokens", "sentence"):
            assert again[key] == told[name][key], key
    model = next(dict(labels)["model_name"] for name, labels in live if name == "everystop_slots")
    counted_again = samples_of(render(metrics_of_record(path), model))
    assert without_blame(from_events(live)) == without_blame(from_events(counted_again))


def without_blame(found: dict[Sample, float]) -> dict[Sample, float]:
    """The server may have had no time to find out where the time of all went."""
    return {key: value for key, value in found.items() if "blame" not in key[0]}
