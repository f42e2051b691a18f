"""The flags of the queue and of a request's life reach the server of a real model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.server.test_model import ServerProcess

pytestmark = pytest.mark.model

BODY = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True}


def test_flags_bound_the_queue_and_the_life_of_a_request() -> None:
    options = ("--max-num-seqs", "1", "--max-num-queued-reqs", "1", "--max-request-seconds", "3.5")
    with ServerProcess(*options) as server, ThreadPoolExecutor(4) as pool:

        def ask(_: int) -> tuple[int, dict[str, str], Any]:
            return server.request("POST", "/v1/completions", BODY)

        answers = sorted(pool.map(ask, range(4)), key=lambda answer: answer[0])
        assert {status for status, _, _ in answers} == {429, 504}
        assert b"--max-num-queued-reqs" in answers[0][2]
        assert int(answers[0][1]["retry-after"]) >= 1
        assert b"within 3.5 s (--max-request-seconds)" in answers[-1][2]
        few = {**BODY, "max_tokens": 3}
        assert server.request("POST", "/v1/completions", few)[0] == 200


def test_a_prompt_that_never_fits_says_the_numbers_of_the_cache() -> None:
    with ServerProcess("--kv-cache-memory", "8MiB") as server:
        status, _, body = server.request("POST", "/v1/completions", {"prompt": "word " * 3000, "max_tokens": 1})
        assert status == 400
        assert b"context_length_exceeded" in body
