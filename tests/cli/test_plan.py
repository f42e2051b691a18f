"""`everystop plan` on a small trace, from the words to the files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from everystop import cli
from everystop.cli import settings
from everystop.cli.plan import parse_rates, parse_replicas
from everystop.core.errors import ConfigError
from everystop.sim.cost import CostModel

# Every 100 ms a request of 4 tokens; a step takes 10 ms, so two slots serve 50 a second.
TRACE = "arrival_s,input_tokens,output_tokens\n" + "".join(f"{i / 10},8,4\n" for i in range(100))
PLAN = (
    "plan", "--trace", "trace.csv", "--cost", "cost.json", "--max-num-seqs", "2", "--max-num-batched-tokens", "64",
    "--requests", "40", "--jobs", "1", "--rate", "60", "--slo-ttft-p95-ms", "100",
)  # fmt: skip
WANTED = (*PLAN, "--replicas", "1..2", "--rates", "30,60", "--no-search")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("EVERYSTOP_CONFIG", "EVERYSTOP_POLICY", "EVERYSTOP_MAX_NUM_SEQS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("EVERYSTOP_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.csv").write_text(TRACE)
    CostModel(step_ns=10e6, source='a "test"').write(tmp_path / "cost.json")


def test_answer_comes_first_and_then_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*WANTED, "--price", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 replicas carry 60 requests/s: TTFT p95 ")
    assert lines[1].startswith("That costs 4.00 EUR an hour, ")
    head, one, two = lines[3:6]
    assert head.split()[-2:] == ["EUR/1M", "tokens"]
    assert "queue grows" in one
    assert one.split()[0] == "1"
    assert two.split()[0] == "2"
    assert 'step times: a "test"' in lines[7]
    assert lines[-1] == "everystop serve --max-num-seqs 2 --max-num-batched-tokens 64"
    assert len(lines) <= 24


def test_json_holds_the_grid_and_is_the_same_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for _ in range(2):
        assert cli.main([*WANTED, "--json"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    figures = json.loads(texts[0])
    assert [(point["num_replicas"], point["rate"], point["is_stable"]) for point in figures["points"]] == [
        (1, 30, True), (1, 60, False), (2, 30, True), (2, 60, True)
    ]  # fmt: skip
    assert [round(carried["cliff"]) for carried in figures["replicas"]] == [50, 100]
    assert figures["setup"]["limits"]["max_num_seqs"] == 2
    assert figures["trace"]["file"] == "trace.csv"


def test_files_hold_results_and_flags_that_serve_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yaml = pytest.importorskip("yaml")
    assert cli.main([*WANTED, "--out", "out", "--policy", "shortest", "--no-enable-prefix-caching"]) == 0
    written = capsys.readouterr().err
    for name in ("plan.json", "recommended.yaml", "recommended.toml"):
        assert (tmp_path / "out" / name).exists()
        assert name in written
    advice = yaml.safe_load((tmp_path / "out" / "recommended.yaml").read_text())
    flags = {"policy": "shortest", "max_num_seqs": 2, "max_num_batched_tokens": 64, "enable_prefix_caching": False}
    assert advice == {"replicas": 2, "router": "round-robin", "serve": flags}
    parsed = argparse.Namespace(config=str(tmp_path / "out" / "recommended.toml"))
    config = settings.make_config(parsed, {})
    assert {name: getattr(config, name) for name in flags} == flags
    command = json.loads((tmp_path / "out" / "plan.json").read_text())["recommended"]["command"]
    words = cli.make_parser().parse_args(command.split()[1:])
    assert settings.make_config(words, {}) == config


def test_recommended_file_can_be_given_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*WANTED, "--out", "out", "--policy", "shortest"]) == 0
    capsys.readouterr()
    given = [word for word in WANTED if word not in ("--max-num-seqs", "2", "--max-num-batched-tokens", "64")]
    assert cli.main([*given, "--config", "out/recommended.toml", "--json"]) == 0
    setup = json.loads(capsys.readouterr().out)["setup"]
    assert setup["policy"] == "shortest"
    assert (setup["limits"]["max_num_seqs"], setup["limits"]["max_num_batched_tokens"]) == (2, 64)


def test_pictures_are_drawn_light_and_dark_the_same_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    names = ["plan.svg", "plan.png", "plan-dark.svg", "plan-dark.png"]
    for folder in ("a", "b"):
        assert cli.main([*WANTED, "--out", folder, "--price", "2"]) == 0
        assert "plan-dark.png" in capsys.readouterr().err
    for name in names:
        first, second = ((tmp_path / folder / name).read_bytes() for folder in ("a", "b"))
        assert first == second
        assert first.startswith((b"\x89PNG", b"<?xml"))
    svg = (tmp_path / "a" / "plan.svg").read_text()
    for words in ("2 replicas carry 60 requests/s", "TTFT p95 in ms", "ITL p95 in ms", "4.00 EUR/h", "wanted rate"):
        assert words in svg
    assert (tmp_path / "a" / "plan.svg").read_bytes() != (tmp_path / "a" / "plan-dark.svg").read_bytes()


def test_without_matplotlib_the_rest_is_written_and_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main([*WANTED, "--out", "out"]) == 0
    assert "everystop: no picture was drawn, because matplotlib is not installed; install" in capsys.readouterr().err
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["plan.json", "recommended.toml", "recommended.yaml"]


def test_rate_that_nothing_carries_ends_with_1_and_has_no_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*PLAN, "--replicas", "1", "--no-search", "--out", "out"]
    assert cli.main(words) == 1
    assert capsys.readouterr().out.startswith("No number of replicas that was tried, up to 1, carries 60 requests/s ")
    assert (tmp_path / "out" / "plan.json").exists()
    assert not (tmp_path / "out" / "recommended.yaml").exists()


def test_wanted_rate_is_the_traces_own_unless_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in PLAN if word not in ("--rate", "60")]
    assert cli.main([*words, "--replicas", "1", "--no-search", "--dilate-time", "0.5"]) == 0
    assert capsys.readouterr().out.startswith("1 replica carries 20 requests/s: ")


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--replicas", "1..9999999999"], 2, "--replicas is '1..9999999999'; at most 4,096 can be planned with"),
        (["--replicas", "1..x"], 2, "--replicas is '1..x'; write whole numbers, such as 1,2,4 or 1..8"),
        (["--replicas", "4..1"], 2, "--replicas must name whole numbers from 1"),
        (["--rates", "fast"], 2, "--rates is 'fast'; write numbers"),
        (["--rates", "4..1"], 2, "--rates is '4..1'; a range goes up from a number above 0"),
        (["--rates", "0,1"], 2, "a rate of 0 requests a second cannot be simulated"),
        (["--slo-itl-p95-ms", "0"], 2, "--slo-itl-p95-ms is 0; it must be above 0"),
        (["--slo-ttft-p95-ms", "nan"], 2, "--slo-ttft-p95-ms is nan; it must be above 0"),
        (["--requests", "5"], 2, "--requests is 5"),
        (["--jobs", "0"], 2, "--jobs is 0"),
        (["--price", "-1"], 2, "--price is -1"),
        (["--currency", "CHF"], 2, "--currency needs --price"),
        (["--router", "best"], 2, "--router is 'best'; choose one of"),
        (["--cost", "h999:model"], 1, "h999:model"),
        (["--limit", "1"], 2, "no rate that could be changed"),
        (["--num-blocks", "0"], 2, "--num-blocks 0"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(
    words: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*PLAN, *words]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("everystop: ")
    assert message in captured.err


def test_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("a file")
    assert cli.main([*WANTED, "--out", "out"]) == 2
    captured = capsys.readouterr()
    assert "--out out cannot be written: " in captured.err
    assert captured.out == "", "it is found out before anything is simulated"


def test_lists_and_ranges() -> None:
    assert parse_replicas("1,2,8") == [1, 2, 8]
    assert parse_replicas("2..5") == [2, 3, 4, 5]
    assert parse_rates("0.5,3") == [0.5, 3]
    assert parse_rates("1..128") == [1, 2, 4, 8, 16, 32, 64, 128]
    for text in ("", "1,,2", "1...3"):
        with pytest.raises(ConfigError):
            parse_rates(text)


def test_progress_is_shown_to_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from everystop.cli.plan import progress_bar

    heard: list[Any] = []
    with progress_bar(show=False) as progress:
        heard.append(progress("the grid", 0, 3))
    with progress_bar(show=True) as progress:
        progress("the grid", 0, 3)
        heard.append(progress("the grid", 1, 3))
    assert heard == [None, None]
