"""The cost of steps: what two looks at a server say, and a measurement of one that has no model."""

from __future__ import annotations

import asyncio
import sys

import pytest

from everystop.cli.bench import text_of
from everystop.trial.crowd import Crowd, CrowdFailed, requests_of
from everystop.trial.own_server import OwnServer, ServerFailed, Thread, read_counters
from everystop.trial.steps import Look, StepsMixed, measure, step_cost

MS = 1_000_000
PARROT = (sys.executable, "-m", "tests.trial.parrot_serve")


def look(num_steps: int, *, num_decodes: int, num_prefills: int = 0) -> Look:
    """After so many steps of 10 ms: 8 native and 2 scheduling, two threads computing and the event loop at 1 ms."""
    text = f"""# HELP everystop_steps_total Steps
everystop_steps_total{{model_name="m"}} {num_steps}.0
everystop_slot_steps_total{{model_name="m",state="decode"}} {num_decodes}.0
everystop_slot_steps_total{{model_name="m",state="prefill"}} {num_prefills}.0
everystop_slot_steps_total{{model_name="m",state="idle"}} 5.0
everystop_step_part_seconds_total{{model_name="m",part="native"}} {num_steps * 0.008}
everystop_step_part_seconds_total{{model_name="m",part="schedule"}} {num_steps * 0.002}
everystop_delivery_part_seconds_total{{model_name="m",part="write"}} {num_steps * 0.001}
everystop_step_native_cpu_seconds_total{{model_name="m"}} {num_steps * 0.008}
everystop_step_seconds_bucket{{le="0.3",model_name="m"}} 3.0
process_cpu_seconds_total 3.5
"""
    threads = {
        1: Thread("python", num_steps * MS),
        2: Thread("python", num_steps * 9 * MS),
        3: Thread("everystop-team", num_steps * 7 * MS),
    }
    return Look(read_counters(text), threads, clients_ns=num_steps * MS // 2, now_ns=num_steps * 10 * MS)


def test_counters_are_read_by_name_and_label() -> None:
    counters = look(7, num_decodes=21).counters
    assert counters["everystop_steps_total", ""] == 7
    assert counters["everystop_slot_steps_total", 'state="decode"'] == 21
    assert counters["process_cpu_seconds_total", ""] == 3.5
    assert not any("bucket" in name for name, _ in counters)


def test_the_cost_of_a_step_is_what_lies_between_two_looks() -> None:
    before, after = look(10, num_decodes=5), look(110, num_decodes=305)
    cost = step_cost(before, after, pid=1, num_rows=3, context=50)
    assert cost.num_steps == 100
    assert cost.engine_ms == pytest.approx({"native": 8.0, "schedule": 2.0})
    assert (cost.step_ms, cost.gap_ms) == pytest.approx((10.0, 2.0))
    assert cost.event_loop_ms == pytest.approx({"write": 1.0})
    cpu = cost.cpu
    assert (cpu.native_ms, cpu.event_loop_ms, cpu.others_ms, cpu.clients_ms) == pytest.approx((15.0, 1.0, 1.0, 0.5))
    assert cpu.outside_share == pytest.approx(2 / 17)
    plain = cost.to_dict()
    assert (plain["gap_share"], plain["cpu_outside_share"]) == pytest.approx((0.2, 2 / 17))
    text = text_of(cost)
    for words in ("3 rows: 100 steps of 10.000 ms", "gap between native calls", "20.00 %", "outside the native call"):
        assert words in text


@pytest.mark.parametrize(
    ("num_steps", "num_decodes", "num_prefills"),
    [(10, 0, 0), (20, 29, 0), (20, 31, 0), (20, 30, 1)],
)
def test_steps_of_other_rows_are_no_measurement(num_steps: int, num_decodes: int, num_prefills: int) -> None:
    after = look(num_steps, num_decodes=num_decodes, num_prefills=num_prefills)
    with pytest.raises(StepsMixed):
        step_cost(look(10, num_decodes=0), after, pid=1, num_rows=3, context=50)


def test_prompts_differ_between_rows_and_are_the_same_again() -> None:
    requests = requests_of(4, 30, 100, seed=1)
    assert len(set(requests)) == 4
    assert requests == requests_of(4, 30, 100, seed=1)
    assert requests != requests_of(4, 30, 100, seed=2)


def test_a_refusal_is_told_whole_in_however_many_pieces_it_comes() -> None:
    crowd, body = Crowd([b""]), b'{"error": {"message": "at most 7"}}'
    (stream,) = crowd._streams
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\nContent-Type: application/json\r\n" % len(body)
    for piece in (head, b"\r\n", body[:20]):
        stream.data_received(piece)
        assert crowd._ended is None
    stream.data_received(body[20:])
    assert crowd._ended is stream
    assert stream.last_words() == body.decode()


def test_a_server_without_a_model_is_measured() -> None:
    with OwnServer([], PARROT) as server:
        spare = 2000  # four seconds and more, in which the clients may be kept from looking
        costs = [asyncio.run(measure(server, rows, num_steps=30, context=20, num_spare=spare)) for rows in (1, 3)]
        with pytest.raises(CrowdFailed, match="at most"):
            asyncio.run(measure(server, 1, num_steps=30, context=100_000))
    for rows, cost in zip((1, 3), costs, strict=True):
        assert cost.num_rows == rows
        assert cost.num_steps >= 30
        assert cost.engine_ms["native"] >= 2.0
        assert cost.step_ms == pytest.approx(sum(cost.engine_ms.values()))
        assert 0 < cost.gap_ms < cost.step_ms
        assert cost.cpu.event_loop_ms > 0
        assert cost.cpu.clients_ms > 0


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(ServerFailed, match="no such option"), OwnServer(["--no-such-option"], PARROT):
        pass
