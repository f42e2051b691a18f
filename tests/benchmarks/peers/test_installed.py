"""Peers that are installed in the user's own folder: each starts, streams and ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.peers.__main__ import PEERS, main
from benchmarks.peers.peer import Place

from benchmarks.peers import records
from everystop.model.home import Home


@pytest.mark.peers
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PEERS)
def test_a_few_requests_of_each_setting_are_answered_in_full(name: str, tmp_path: Path) -> None:
    if fault := PEERS[name].fault(Place(Home.from_environment().root / "peers")):
        pytest.skip(fault)
    out = tmp_path / "runs.jsonl"
    assert main(["run", "--sweep", "--peer", name, "--workload", "chat", "--limit", "4", "--out", str(out)]) == 0
    found = records.read(out)
    assert [record["setting"] for record in found] == [setting.name for setting in PEERS[name].settings]
    for record in found:
        assert record["kind"] == "workload", record
        assert records.is_good(record), record
        assert record["figures"]["events_per_token"] >= 0.95
