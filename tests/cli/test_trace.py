"""`everystop trace`: which file it writes, and what it refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from tests.core.harness import Harness, make_request

from everystop import cli
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.policy import PolicySettings, make_policy
from everystop.core.recording import RecordingScheduler
from everystop.observe.recorder import Recorder


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """A record of 300 requests."""
    recorder = Recorder(tmp_path / "run.gz", "continuous", PolicySettings())
    kv = KVCache(num_blocks=24, block_size=4, enable_prefix_caching=True)
    harness = Harness(RecordingScheduler(Limits(max_num_seqs=4), kv, make_policy("continuous"), recorder))
    for i in range(300):
        harness.add(make_request(i, 5, max_tokens=6))
    harness.run()
    recorder.close()
    return tmp_path / "run.gz"


def test_trace_is_written_beside_the_record(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", str(record)]) == 0
    assert "300 requests" in capsys.readouterr().err
    assert record.with_name("run.pftrace").read_bytes()[0] == 0x0A  # a packet of a trace
    assert cli.main(["trace", str(record), "--json"]) == 0
    events = json.loads(record.with_name("run.json").read_bytes())["traceEvents"]
    assert {event["args"]["name"] for event in events if event.get("name") == "thread_name"} >= {"steps", "slot 3"}
    assert sorted(path.name for path in record.parent.iterdir()) == ["run.gz", "run.json", "run.pftrace"]


def test_trace_of_a_cut_record_says_so(record: Path, caplog: pytest.LogCaptureFixture) -> None:
    cut = record.with_name("cut.gz")
    cut.write_bytes(record.read_bytes()[: record.stat().st_size * 2 // 3])
    assert cli.main(["trace", str(cut), "-o", str(record.with_name("other"))]) == 0
    assert "cut.gz is cut off or damaged" in caplog.text
    assert record.with_name("other").exists()


def test_what_cannot_be_traced_is_refused(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = record.read_bytes()
    text = record.with_name("text.gz")
    text.write_bytes(gzip.compress(b"hello\n"))
    for words, status, message in (
        ([str(record), "-o", str(record)], 2, "is the record itself"),
        ([str(record), "-o", str(record.with_name("absent") / "run.pftrace")], 2, "name another file by --out"),
        ([str(record), "-o", str(record.parent)], 2, "is a folder; name a file"),
        ([str(text)], 1, "is not a record of a run"),
        ([str(record.with_name("absent.gz"))], 1, "cannot be read"),
    ):
        assert cli.main(["trace", *words]) == status
        assert message in capsys.readouterr().err
    assert record.read_bytes() == whole
    assert sorted(path.name for path in record.parent.iterdir()) == ["run.gz", "text.gz"]
