"""`everystop explain` as a user runs it."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.core.harness import Harness, make_request
from tests.observe.runs import Run

from everystop.cli import main
from everystop.cli.blame import LABEL_COLUMNS, MODELLED, cells_of, show
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.policy import PolicySettings, make_policy
from everystop.core.recording import RecordingScheduler
from everystop.core.step_time import UNKNOWN_STEP_TIMES
from everystop.observe.causes import Cause
from everystop.observe.history import Client
from everystop.observe.recorder import Recorder


def example() -> dict[str, Any]:
    """The explanation of a request that waits, is stretched by another one's prompt, and ends."""
    run = Run(max_num_seqs=2, max_num_batched_tokens=64, num_blocks=400)
    run.add(0, 8, 20)
    run.add(1, 8, 60)
    run.add(2, 100, 30)
    run.add(3, 600, 4)
    run.finish()
    return json.loads(json.dumps(run.explain(1).as_data()))  # type: ignore[no-any-return]


def drawn(data: dict[str, Any], *, width: int = 120, encoding: str = "utf-8") -> str:
    """What a terminal of that width shows, without colours."""
    with io.TextIOWrapper(io.BytesIO(), encoding=encoding) as file:
        show(data, Console(file=file, width=width, highlight=False))
        file.seek(0)
        return file.read()


def test_a_terminal_shows_sentence_bar_lanes_late_tokens_and_advice() -> None:
    data = example()
    lines = drawn(data).splitlines()
    assert lines[0] == "r1  (finished)"
    assert " ".join(lines).count(data["sentence"].split(" (")[0]) == 1
    bar = next(line for line in lines if line.startswith("▓"))
    assert len(bar) == 42 + 58
    assert {"▓", "█", "▒"} == set(bar)
    for cause in data["causes"]:
        lane = next(line for line in lines if line.startswith(cause["label"]))
        assert f"{cause['share']:.1%}" in lane
    assert any("tokens came late" in line for line in lines)
    assert any("of r3's prompt in step" in line for line in lines)


@pytest.mark.parametrize("width", [30, 80, 200])
def test_every_width_is_drawn_and_ascii_where_there_is_no_more(width: int) -> None:
    text = drawn(example(), width=width, encoding="ascii")
    bar = text.split("\n\n")[1].splitlines()[0]
    assert {"D", "o"} <= set(bar) <= {"P", "D", "o"}
    assert len(bar) <= width


def test_every_label_fits_its_column() -> None:
    assert all(len(cause.label + MODELLED * cause.is_modelled) < LABEL_COLUMNS for cause in Cause)


def test_what_has_taken_no_time_yet_is_a_sentence() -> None:
    data = {**example(), "e2e_ns": 0, "causes": [], "segments": [], "tokens": [], "advice": []}
    assert drawn(data).splitlines()[1].startswith("199 ms for 60 output tokens")


def test_a_lane_fills_the_parts_in_which_a_cause_took_half_and_shows_the_least_cause_somewhere() -> None:
    segments = [
        {"cause": "prefill", "start_ns": 0, "end_ns": 1},
        {"cause": "decode", "start_ns": 1, "end_ns": 60},
        {"cause": "host", "start_ns": 60, "end_ns": 100},
    ]
    assert cells_of("prefill", segments, 100, 4) == [True, False, False, False]
    assert cells_of("decode", segments, 100, 4) == [True, True, False, False]
    assert cells_of("host", segments, 100, 4) == [False, False, True, True]


@pytest.fixture
def server() -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """A server that knows one request, and what it has been asked."""
    asked: list[tuple[str, str | None]] = []
    data = json.dumps(example()).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers.get("authorization")))
            is_known = self.path == "/v1/requests/a%2Fb/explain"
            body = data if is_known else b'{"error": {"message": "no request has that id"}}'
            self.send_response(200 if is_known else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", asked
        http.shutdown()
        thread.join()


def test_a_server_is_asked_by_the_quoted_id_with_the_key_in_a_header(
    server: tuple[str, list[tuple[str, str | None]]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, asked = server
    assert main(["explain", "a/b", "--url", url, "--api-key", "secret", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == example()
    assert asked == [("/v1/requests/a%2Fb/explain", "Bearer secret")]
    assert main(["explain", "a/b", "--url", url]) == 0
    assert "r1  (finished)" in capsys.readouterr().out
    assert main(["explain", "c", "--url", url]) == 1
    assert "no request has that id" in capsys.readouterr().err


def test_a_record_is_read_by_the_answers_id_or_by_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, settings = tmp_path / "run.gz", PolicySettings()
    recorder = Recorder(path, "continuous", settings)
    cache = KVCache(num_blocks=64, block_size=16, enable_prefix_caching=True)
    policy = make_policy("continuous", settings)
    harness = Harness(RecordingScheduler(Limits(max_num_seqs=1), cache, policy, recorder, UNKNOWN_STEP_TIMES))
    for i in range(3):
        harness.add(make_request(i, 8, max_tokens=10, ignore_eos=True))
    harness.run()
    recorder.client(Client("chatcmpl-x", "", 1, 1, 0, 0, 0, harness.now_ns))
    recorder.close()
    assert main(["explain", "chatcmpl-x", "--record", str(path), "--json"]) == 0
    by_name = json.loads(capsys.readouterr().out)
    assert (by_name["id"], by_name["e2e_ns"]) == ("chatcmpl-x", harness.now_ns)
    for number in ("1", "r1"):
        assert main(["explain", number, "--record", str(path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == by_name
    assert main(["explain", "2", "--record", str(path)]) == 0
    assert "queued because the slot was taken until chatcmpl-x (10 tokens) ended" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["explain", "7", "--record", str(path)]) == 1
    assert "has no request '7'; it has 3" in capsys.readouterr().err
    assert main(["explain", "1", "--record", str(path), "--api-key", "k"]) == 2
    assert "--record reads a file" in capsys.readouterr().err
