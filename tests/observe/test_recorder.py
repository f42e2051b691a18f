"""A record reaches its file while the run goes on, whole and in order."""

from __future__ import annotations

import gzip
import json
import random
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
from tests.core.harness import Harness, make_request
from tests.server.parrot import wait_until

from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.policy import PolicySettings, make_policy
from everystop.core.recording import RecordingScheduler
from everystop.observe import recorder as recorder_module
from everystop.observe.history import Client
from everystop.observe.recorder import CALLS_PER_BATCH, Recorder
from everystop.sim.record import Record
from everystop.sim.replay import history_of_record


def lines_so_far(path: Path) -> list[Any]:
    """Every whole line of a record that is still being written."""
    data = zlib.decompressobj(wbits=31).decompress(path.read_bytes())
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def make_harness(recorder: Recorder) -> Harness:
    cache = KVCache(num_blocks=64, block_size=4, enable_prefix_caching=True)
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64)
    return Harness(RecordingScheduler(limits, cache, make_policy("continuous"), recorder))


def test_what_has_happened_reaches_the_file_though_nothing_more_happens(tmp_path: Path) -> None:
    path = tmp_path / "run.gz"
    recorder = Recorder(path, "continuous", PolicySettings())
    harness = make_harness(recorder)
    harness.add(make_request(0, 8, max_tokens=5))
    harness.run()
    recorder.client(Client("cmpl-0", "", 0, 1, 0, 1, 2, harness.now_ns))
    wait_until(lambda: lines_so_far(path)[-1:] != [] and lines_so_far(path)[-1][0] == "client")
    history = history_of_record(path)
    trail = history.trails[0]
    assert trail.finish is not None
    assert trail.client is not None
    assert trail.client.delivered_ns == harness.now_ns
    before = lines_so_far(path)
    recorder.close()
    assert [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()] == before


def test_no_call_is_lost_doubled_or_moved_while_the_file_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "WRITE_S", 0.0005)
    dice = random.Random("recorder")
    for episode in range(20):
        path = tmp_path / f"{episode}.gz"
        recorder = Recorder(path, "continuous", PolicySettings())
        recorder.started({})
        num_calls, num_clients = (dice.randrange(8 * CALLS_PER_BATCH) for _ in range(2))

        def tell(recorder: Recorder = recorder, num: int = num_clients) -> None:
            for i in range(num):
                recorder.client(Client(f"cmpl-{i}", "", i, 1, i, i))

        thread = threading.Thread(target=tell)
        thread.start()
        pauses = {dice.randrange(num_calls + 1) for _ in range(4)}
        for i in range(num_calls):
            recorder.aborted(i, i)
            if i in pauses:
                assert recorder.flush(60.0)
                told = [line[2] for line in lines_so_far(path)[1:] if line[0] == "abort"]
                assert told == list(range(i + 1))
        thread.join()
        recorder.close()
        header, *lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        assert "everystop_record" in header
        assert [line[2] for line in lines if line[0] == "abort"] == list(range(num_calls))
        assert [line[3] for line in lines if line[0] == "client"] == [f"cmpl-{i}" for i in range(num_clients)]


def test_after_a_flush_the_file_replays_to_its_end_though_requests_run_that_found_their_prompt_cached(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.gz"
    recorder = Recorder(path, "continuous", PolicySettings())
    harness = make_harness(recorder)
    prompt = list(range(16))
    harness.add(make_request(0, prompt, max_tokens=2))
    harness.run()
    harness.add(make_request(1, prompt, max_tokens=40))
    harness.turn()
    harness.add(make_request(2, [7] * 9, max_tokens=3))
    while 2 not in harness.finished:
        harness.turn()
    assert 1 not in harness.finished
    assert recorder.flush(60.0)
    record = Record.read(path)
    assert record.is_truncated
    assert len(record.keys[1]) >= 4
    trails = history_of_record(path).trails
    assert trails[1].admits[0].num_cached_tokens == 12
    assert trails[2].finish is not None
    harness.run()
    recorder.close()
    assert not Record.read(path).is_truncated


def test_a_flush_of_what_nobody_writes_any_more_says_so(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run.gz", "continuous", PolicySettings())
    recorder.started({})
    states = [recorder.is_open]
    recorder.close()
    assert [*states, recorder.is_open] == [True, False]
    assert not recorder.flush(60.0)
