"""`everystop explain` as a user runs it."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from rich.console import Console
from tests.observe.runs import Run

from everystop.cli import main
from everystop.cli.blame import cells_of, show


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
    bar = next(line for line in text.splitlines() if line.startswith("P"))
    assert set(bar) == {"P", "D", "o"}
    assert len(bar) <= width


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
