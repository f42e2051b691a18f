"""`everystop explain --what-if`: estimates in words and as JSON, and what it refuses."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.core.harness import make_request
from tests.sim.test_what_if import MS, clients_of, crowd, record_run

from everystop.cli import main
from everystop.cli.blame import show
from everystop.cli.what_if import in_words, label_of, lines_of

EXAMPLE: dict[str, Any] = {
    "num_steps": 1234,
    "num_cached_tokens": 0,
    "measured": {"ttft_ns": 5_400 * MS, "e2e_ns": 6_900 * MS},
    "simulated": {"ttft_ns": 5_000 * MS, "e2e_ns": 7_000 * MS, "ttft_error": -0.0741, "e2e_error": 0.0145},
    "estimates": [
        {
            "what": what,
            "recorded": recorded,
            "tried": tried,
            "ttft_ns": ttft_ms * MS,
            "e2e_ns": e2e_ms * MS,
            "why_not": "",
            "is_beyond": False,
        }
        for what, recorded, tried, ttft_ms, e2e_ms in (
            ("alone", None, None, 1_000, 2_800),
            ("policy", "continuous", "static", 60_000, 66_500),
            ("max_num_batched_tokens", 256, 128, 5_000, 7_140),
            ("num_blocks", 64, 128, 2_500, 4_000),
        )
    ],
}


def changed(number: int, **fields: Any) -> dict[str, Any]:
    """The example with other fields in one of its estimates."""
    estimates = [dict(each) for each in EXAMPLE["estimates"]]
    estimates[number] |= fields
    return EXAMPLE | {"estimates": estimates}


def test_estimates_stand_beside_what_was_measured_with_the_error_of_the_model() -> None:
    assert lines_of(EXAMPLE) == [
        "what if? Estimates, from the recorded arrivals in virtual time with step times fitted to 1,234 steps of this "
        "record:",
        "                                             TTFT    change       E2E    change",
        "measured                                    5.4 s               6.9 s",
        "simulated as it was                         5.0 s               7.0 s",
        "alone on the server                         1.0 s      -80%     2.8 s      -60%",
        "--policy static (was continuous)           60.0 s   +1,100%    66.5 s     +850%",
        "--max-num-batched-tokens 128 (was 256)      5.0 s       +0%     7.1 s       +2%",
        "--kv-cache-memory: 128 blocks (was 64)      2.5 s      -50%     4.0 s      -43%",
        "Changes are against the simulation as it was, whose error for this request is -7.4% (TTFT) and +1.5% (E2E); "
        "an estimate may be as far off.",
    ]


def test_a_model_that_is_far_off_says_so() -> None:
    far = EXAMPLE | {"simulated": EXAMPLE["simulated"] | {"e2e_error": -0.31}}
    assert lines_of(far)[-1].endswith("and -31.0% (E2E); that is far off, so take a change for a direction at best.")


def test_remarks_say_what_was_not_tried_what_was_cached_and_what_is_guessed() -> None:
    missing = changed(2, ttft_ns=None, e2e_ns=None, why_not="below_slots") | {"num_cached_tokens": 32}
    missing["estimates"][0]["is_beyond"] = True
    lines = lines_of(missing)
    assert any(line.split()[-2:] == ["-", "-"] for line in lines)
    assert [line for line in lines if line.endswith(".")][:-1] == [
        "--max-num-batched-tokens 128 (was 256): not tried: --max-num-batched-tokens must not be below --max-num-seqs.",
        "Alone it still finds 32 tokens of its prompt in the prefix cache.",
        "* some of its steps have more or fewer rows or tokens than any in the record, so their time is guessed.",
    ]
    assert label_of(missing["estimates"][0]) == "alone on the server *"
    refused = lines_of(changed(1, ttft_ns=None, e2e_ns=None, why_not="not_served"))
    assert "--policy static (was continuous): the request would not have been served." in refused


def test_without_a_first_token_only_the_whole_time_is_told() -> None:
    data = json.loads(json.dumps(EXAMPLE).replace('"ttft_ns": 5400000000', '"ttft_ns": null'))
    data["simulated"] |= {"ttft_ns": None, "ttft_error": None}
    for each in data["estimates"]:
        each["ttft_ns"] = None
    lines = lines_of(data)
    assert lines[2].split() == ["measured", "-", "6.9", "s"]
    assert "for this request is +1.5% (E2E);" in lines[-1]


@pytest.mark.parametrize("width", [40, 120])
def test_they_are_shown_below_the_explanation(width: int, tmp_path: Path) -> None:
    explained = explain(tmp_path, "cmpl-9")
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii") as file:
        show(explained, Console(file=file, width=width, highlight=False))
        file.seek(0)
        text = " ".join(file.read().split())
    assert text.startswith("cmpl-9 (finished)")
    assert "what if? Estimates, from the recorded arrivals" in text
    assert text.endswith("an estimate may be as far off.")


def explain(folder: Path, name: str, **limits: Any) -> dict[str, Any]:
    """What `--json` prints of a request of the crowd."""
    requests = crowd(24)
    record_run(folder / "run.gz", requests, clients=clients_of(requests), **limits)
    with pytest.MonkeyPatch.context() as patch, io.StringIO() as out:
        patch.setattr("sys.stdout", out)
        assert main(["explain", name, "--record", str(folder / "run.gz"), "--what-if", "--json"]) == 0
        return dict(json.loads(out.getvalue()))


def test_json_has_the_explanation_and_what_it_measures_is_the_same(tmp_path: Path) -> None:
    data = explain(tmp_path, "cmpl-9")
    measured = data["what_if"]["measured"]
    assert (measured["ttft_ns"], data["id"]) == (data["ttft_ns"], "cmpl-9")
    assert {"what", "recorded", "tried", "ttft_ns", "e2e_ns", "ttft_error", "e2e_error"} <= data["what_if"][
        "estimates"
    ][0].keys()
    assert [each["what"] for each in data["what_if"]["estimates"]][:3] == ["alone", "policy", "max_num_batched_tokens"]


@pytest.mark.parametrize(
    ("limits", "cause", "what"),
    [
        ({"max_num_seqs": 2}, "queue.no_slot", "max_num_seqs"),
        ({"max_num_seqs": 16, "num_blocks": 16}, "queue.no_blocks", "num_blocks"),
    ],
)
def test_what_is_advised_is_tried(limits: dict[str, int], cause: str, what: str, tmp_path: Path) -> None:
    data = explain(tmp_path, "20", **limits)
    assert max(data["causes"], key=lambda each: each["ns"])["cause"] == cause
    [estimate] = [each for each in data["what_if"]["estimates"] if each["what"] == what]
    assert (estimate["recorded"], estimate["tried"]) == (limits[what], 2 * limits[what])
    assert estimate["ttft_ns"] < data["ttft_ns"]


def test_in_words_has_all_that_is_told_beside_the_figures() -> None:
    told = in_words(changed(1, is_beyond=True))
    lines = lines_of(told)
    assert lines[0] == f"what if? {told['about']}:"
    assert lines[-2:] == told["remarks"]
    assert [each["label"] for each in told["estimates"]] == [line[:42].rstrip() for line in lines[4:-2]]
    assert [each["flag"] for each in told["estimates"]] == [
        "",
        "--policy",
        "--max-num-batched-tokens",
        "--kv-cache-memory",
    ]


def test_too_long_a_record_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(path: Path) -> None:
        raise MemoryError

    monkeypatch.setattr("everystop.sim.replay.past_run", fail)
    assert main(["explain", "r1", "--record", str(tmp_path / "run.gz"), "--what-if"]) == 1
    assert "is too long for the memory there is; record a shorter run" in capsys.readouterr().err


def test_what_cannot_be_estimated_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, requests = tmp_path / "run.gz", crowd()
    record_run(path, requests, aborts={7: 100 * MS})
    lines = gzip.decompress(path.read_bytes()).splitlines()
    header = json.loads(lines[0])
    written = {"new.gz": [json.dumps(header | {"everystop_record": 99}).encode(), *lines[1:]]}
    at = [i for i, line in enumerate(lines) if line.startswith(b'["schedule"')][3]
    written["other.gz"] = [*lines[:at], json.dumps([*json.loads(lines[at])[:-1], "0" * 16]).encode(), *lines[at + 1 :]]
    for name, content in written.items():
        (tmp_path / name).write_bytes(gzip.compress(b"\n".join(content) + b"\n"))
    record_run(tmp_path / "short.gz", [make_request(0, 8, max_tokens=9, arrival_ns=1)])
    for name, request, says in (
        ("run.gz", "r99", "has no request 'r99'"),
        ("run.gz", "r7", "no end of its own (its client left)"),
        ("short.gz", "0", "too few to fit step times to"),
        ("new.gz", "1", "is a record of version 99"),
        ("other.gz", "1", "is not what this version plans; record the run anew"),
        ("absent.gz", "1", "cannot be read"),
    ):
        assert main(["explain", request, "--record", str(tmp_path / name), "--what-if"]) == 1, name
        captured = capsys.readouterr()
        assert says in captured.err
        assert len(captured.err.splitlines()) == 1
        assert not captured.out
