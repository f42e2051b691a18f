"""`simulate`, `calibrate` and `replay` on small traces and records made here."""

from __future__ import annotations

import gzip
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.sim.test_replay import record_workload

from everystop import cli
from everystop.cli import settings
from everystop.cli.simulate import WITHOUT, scheduler_fields
from everystop.sim.cost import CostModel

TRACE = "req_time_s,client,prompt_tokens,output_tokens\n" + "".join(
    f"{i / 50},{'ann' if i % 3 else 'bob'},{40 + i},{5 + i % 7}\n" for i in range(60)
)
Command = Callable[..., Any]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("EVERYSTOP_CONFIG", "EVERYSTOP_POLICY", "EVERYSTOP_MAX_NUM_SEQS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("EVERYSTOP_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.csv").write_text(TRACE)
    CostModel(step_ns=5e6, token_ns=1e5, source="a test").write(tmp_path / "cost.json")


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command on the trace; returns its JSON."""

    def run(*words: str) -> Any:
        assert cli.main(["simulate", "--trace", "trace.csv", "--cost", "cost.json", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_results_say_what_was_simulated(simulate: Command) -> None:
    results = simulate("--scale-lengths", "0.5", "--dilate-time", "3", "--limit", "50", "--max-num-seqs", "4")
    assert results["trace"] == {
        "file": "trace.csv", "format": None, "scale_lengths": 0.5, "dilate_time": 3.0, "limit": 50
    }  # fmt: skip
    assert results["setup"]["limits"]["max_num_seqs"] == 4
    assert results["setup"]["cost"]["source"] == "a test"
    assert results["num_finished"] == 50
    assert set(results["tenants"]) == {"ann", "bob"}
    assert results["duration_s"] > 49 / 50 * 3


def test_requests_ask_for_the_longest_output_of_the_trace(simulate: Command) -> None:
    """Every output has 5 to 11 tokens. Admission goes by what is asked for, until it has seen how many come."""
    plain = simulate()
    assert plain["setup"]["max_tokens"] == 11
    assert simulate("--limit", "3")["setup"]["max_tokens"] == 7
    crowded = ["--dilate-time", "0.1", "--num-blocks", "40"]
    results = [simulate(*crowded, "--max-tokens", "600"), simulate(*crowded)]
    assert all(each["num_output_tokens"] == plain["num_output_tokens"] for each in results)
    assert results[0]["ttft_ms"]["mean"] > results[1]["ttft_ms"]["mean"]


def test_trace_from_a_pipe_is_read_once(simulate: Command) -> None:
    os.mkfifo("pipe.csv")
    writer = threading.Thread(target=lambda: Path("pipe.csv").write_text(TRACE))
    writer.start()
    results = simulate("--trace", "pipe.csv")
    writer.join()
    assert (results["num_finished"], results["setup"]["max_tokens"]) == (60, None)


def test_settings_of_the_scheduler_change_the_outcome(simulate: Command) -> None:
    plain = simulate()
    for words in (
        ["--policy", "static"],
        ["--policy", "deadline", "--itl-target-ms", "7"],
        ["--max-num-seqs", "2"],
        ["--max-num-batched-tokens", "64"],
        ["--num-blocks", "6"],
        ["--target-itl-ms", "8"],
        ["--replicas", "2", "--router", "least-loaded"],
        ["--replicas", "2", "--router", "fair"],
    ):
        results = simulate(*words)
        assert results["num_finished"] == 60
        assert results["e2e_ms"] != plain["e2e_ms"], words
    assert simulate("--check")["e2e_ms"] == plain["e2e_ms"] == simulate("--format", "tenant")["e2e_ms"]


def test_settings_come_from_file_and_environment_as_for_serve(
    simulate: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "serve.toml").write_text('max-num-seqs = 7\nmax-num-batched-tokens = 70\nport = 9\npolicy = "fair"\n')
    monkeypatch.setenv("EVERYSTOP_POLICY", "shortest")
    setup = simulate("--config", "serve.toml", "--max-num-batched-tokens", "71")["setup"]
    assert setup["policy"] == "shortest"
    assert setup["limits"]["max_num_seqs"] == 7
    assert setup["limits"]["max_num_batched_tokens"] == 71


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_help_says_where_settings_come_from(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert "--config FILE" in text
    assert "EVERYSTOP_MAX_NUM_SEQS" in text


def test_every_setting_of_the_scheduler_is_an_option() -> None:
    """A setting that `serve` has under these titles needs no change here; few have no meaning in virtual time."""
    offered = {field.name for field in scheduler_fields()}
    for field in settings.flag_fields():
        is_of_scheduler = field.metadata["group"] in ("scheduler", "KV cache") or field.name == "max_model_len"
        assert (field.name in offered) == (is_of_scheduler and field.name not in WITHOUT), field


def test_oracle_changes_the_order_and_needs_its_policy(simulate: Command, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--policy", "shortest", "--max-num-seqs", "1", "--ageing", "1000000")
    blind, knowing = simulate(*words), simulate(*words, "--oracle")
    assert knowing["setup"]["oracle"]
    assert knowing["e2e_ms"]["mean"] < blind["e2e_ms"]["mean"]
    assert cli.main(["simulate", "--trace", "trace.csv", "--cost", "cost.json", "--oracle"]) != 0
    assert "an oracle needs --policy shortest" in capsys.readouterr().err


def test_tenants_of_a_file_get_service_by_weight(simulate: Command, tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text("[tenant.bob]\nweight = 8\n[tenant.ann]\nmax_running = 2\n")
    words = ["--policy", "fair", "--max-num-seqs", "4", "--dilate-time", "0.2"]
    plain, weighted = simulate(*words), simulate(*words, "--tenants", "tenants.toml")
    shares = weighted["setup"]["policy_settings"]["shares"]
    assert (shares["bob"]["weight"], shares["ann"]["max_running"]) == (8, 2)
    assert weighted["tenants"]["bob"]["ttft_ms"]["mean"] < plain["tenants"]["bob"]["ttft_ms"]["mean"]


def test_goodput_is_told_where_something_is_demanded(simulate: Command, capsys: pytest.CaptureFixture[str]) -> None:
    demands = ["--slo-ttft-ms", "15", "--slo-itl-ms", "20.5"]
    results = simulate(*demands)
    assert results["setup"]["slo"] == {"ttft_ns": 15_000_000, "itl_ns": 20_500_000}
    assert 0 < results["goodput"]["share"] < 1
    assert cli.main(["simulate", "--trace", "trace.csv", "--cost", "cost.json", *demands]) == 0
    assert "goodput (TTFT 15 ms and each ITL 20.5 ms at most): " in capsys.readouterr().out


def test_fairness_index_is_told_where_tenants_waited(simulate: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate()["fairness_index"] is None
    crowded = ["--dilate-time", "0.1", "--max-num-seqs", "1", "--scale-lengths", "10"]
    assert 0.5 <= simulate(*crowded)["fairness_index"]["mean"] < 1
    assert cli.main(["simulate", "--trace", "trace.csv", "--cost", "cost.json", *crowded]) == 0
    assert "Jain's index over tenants that waited, in " in capsys.readouterr().out


def test_environment_sets_what_it_sets_for_serve(simulate: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERYSTOP_POLICY", "static")
    assert simulate()["setup"]["policy"] == "static"


def test_cache_holds_as_many_tokens_whatever_the_block_size(simulate: Command) -> None:
    assert simulate()["setup"]["num_blocks"] * 32 == simulate("--block-size", "16")["setup"]["num_blocks"] * 16


def test_longest_sequence_is_what_the_cache_holds_unless_set(simulate: Command) -> None:
    lengths = [40 + i + 5 + i % 7 for i in range(60)]
    assert simulate("--num-blocks", "3")["num_refused"] == sum(length > 3 * 32 for length in lengths) > 0
    assert simulate("--max-model-len", "64")["num_refused"] == sum(length > 64 for length in lengths)


def test_text_shows_durations_and_tenants(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--trace", "trace.csv", "--cost", "cost.json", "--scale-lengths", "2"]) == 0
    text = capsys.readouterr().out
    assert "60 requests, lengths × 2, time × 1" in text
    assert "step times: a test" in text
    for word in ("TTFT", "ITL", "TPOT", "E2E", "ann", "bob", "replica 0: 60 requests"):
        assert word in text


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--router", "best"], 2, "--router is 'best'; choose one of round-robin, least-loaded, prefix-affinity, fair"),
        (["--router", "prefix-affinity"], 2, "--router prefix-affinity has no choice with one replica"),
        (
            ["--router", "prefix-affinity", "--replicas", "2", "--no-enable-prefix-caching"],
            2,
            "--router prefix-affinity needs the prefix cache",
        ),
        (["--slo-ttft-ms", "0"], 2, "--slo-ttft-ms is 0; it must be above 0"),
        (["--slo-itl-ms", "nan"], 2, "--slo-itl-ms is nan"),
        (["--format", "xml"], 2, "--format is 'xml'; choose one of azure, mooncake, sharegpt, tenant, own"),
        (["--replicas", "0"], 2, "--replicas is 0"),
        (["--replicas", "5000"], 2, "--replicas is 5,000; at most 4,096"),
        (["--num-blocks", "99999999"], 2, "--num-blocks is 99,999,999; at most 16,777,216"),
        (["--scale-lengths", "0"], 2, "--scale-lengths is 0"),
        (["--block-size", "20"], 2, "--block-size is 20"),
        (["--cost", "other.json"], 1, "no step times other.json"),
        (
            ["--cost", "h300:llama-3.1-8b"],
            1,
            "presets are GPU:MODEL, of h100, h200, a100 and llama-3.2-1b",
        ),
        (["--cost", "measured"], 1, "home/cost.json; record a run with `everystop serve --record FILE`"),
        (["--trace", "absent.csv"], 1, "absent.csv cannot be read"),
        (["--format", "azure"], 1, "trace.csv:2: no TIMESTAMP"),
    ],
)
def test_what_cannot_be_simulated_is_one_sentence(
    words: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", "--trace", "trace.csv", "--cost", "cost.json", *words]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("everystop: ")
    assert message in captured.err


def test_calibrated_step_times_are_used_by_simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_workload(tmp_path / "run.gz")
    assert cli.main(["calibrate", "run.gz"]) == 0
    assert "step_ns" in capsys.readouterr().out
    assert cli.main(["simulate", "--trace", "trace.csv", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["setup"]["cost"]["source"].startswith("fitted to run.gz (")
    assert cli.main(["calibrate", "run.gz", "--out", "mine.json"]) == 0
    assert CostModel.read(tmp_path / "mine.json") == CostModel.read(tmp_path / "home" / "cost.json")


def test_held_out_record_is_simulated_and_its_errors_go_with_every_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_workload(tmp_path / "run.gz")
    record_workload(tmp_path / "other.gz", num_requests=60)
    assert cli.main(["calibrate", "run.gz", "--held-out", "other.gz"]) == 0
    assert cli.main(["simulate", "--trace", "trace.csv"]) == 0
    calibrated, simulated = capsys.readouterr().out.split("trace.csv: ")
    for text in (calibrated, simulated):
        assert re.search(r"other\.gz as simulated: TTFT p50 [+-][\d.]+%, p90 .*; ITL .*; E2E p50 [+-][\d.]+%", text)
    assert cli.main(["simulate", "--trace", "trace.csv", "--json"]) == 0
    errors = json.loads(capsys.readouterr().out)["setup"]["cost"]["errors"]
    durations = {f"{name}_{p}" for name in ("ttft", "itl", "e2e") for p in ("p50", "p90")}
    assert set(errors) == durations | {"step_median", "step_p90", "step_total"}


def test_preset_predicts_a_gpu(simulate: Command, capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = (simulate("--cost", f"{gpu}:llama-3.1-8b") for gpu in ("a100", "h200"))
    assert slow["tpot_ms"]["p50"] > fast["tpot_ms"]["p50"] > 3
    assert fast["ttft_ms"]["p50"] > fast["setup"]["cost"]["request_ns"] / 1e6
    assert cli.main(["simulate", "--trace", "trace.csv", "--cost", "h200:llama-3.1-8b"]) == 0
    assert "step times: h200:llama-3.1-8b, a roofline; single kernels on this GPU are off by" in capsys.readouterr().out


def test_calibrate_refuses_what_is_no_record(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", "absent.gz", "--out", "mine.json"]) == 1
    assert "the record absent.gz cannot be read" in capsys.readouterr().err


def test_replay_shows_that_the_plans_are_the_recorded_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_workload(tmp_path / "run.gz")
    assert cli.main(["replay", "run.gz"]) == 0
    text = capsys.readouterr().out
    assert "all as recorded" in text
    assert "simulated" not in text
    assert cli.main(["replay", "run.gz", "--policy", "static"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[2].split() == ["ms", "recorded", "continuous*", "static*", "change"]
    assert (
        "* simulated, with step times fitted to the record; against the record continuous is off by TTFT p50 " in text
    )


def test_replay_of_another_policy_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_workload(tmp_path / "run.gz")
    assert cli.main(["replay", "run.gz", "--policy", "static", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["policy"], figures["first_difference"]) == ("static", None)
    assert figures["replayed"]["num_steps"] > figures["recorded"]["num_steps"]


def test_replay_of_an_altered_record_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_workload(tmp_path / "run.gz")
    lines = gzip.decompress((tmp_path / "run.gz").read_bytes()).decode().splitlines()
    at = [i for i, line in enumerate(lines) if line.startswith('["schedule"')][3]
    lines[at] = json.dumps([*json.loads(lines[at])[:-1], "0" * 16])
    (tmp_path / "altered.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    assert cli.main(["replay", "altered.gz"]) == 1
    assert "step 3 is the first that differs" in capsys.readouterr().out
    assert cli.main(["calibrate", "altered.gz"]) == 1
    assert "the plan of step 3" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["num_blocks", "block_size"])
def test_a_header_that_describes_no_cache_is_one_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_workload(tmp_path / "run.gz")
    header, *lines = gzip.decompress((tmp_path / "run.gz").read_bytes()).decode().splitlines()
    table = json.loads(header)
    table["kv"][name] = "many"
    (tmp_path / "odd.gz").write_bytes(gzip.compress("\n".join([json.dumps(table), *lines]).encode()))
    assert cli.main(["replay", "odd.gz"]) == 1
    assert "odd.gz has a header that this version cannot read" in capsys.readouterr().err


def test_targets_of_a_trace_that_the_policy_does_not_know_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    request = {"arrival_ns": 0, "num_prompt_tokens": 8, "num_output_tokens": 2}
    lines = [request | {"ttft_target_ms": 50}, request | {"itl_target_ms": 5}, request]
    Path("targets.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ["simulate", "--trace", "targets.jsonl", "--cost", "cost.json"]
    assert cli.main([*words, "--policy", "fair"]) == 0
    assert "2 requests came with targets, which the policy fair does not know" in capsys.readouterr().out
    assert cli.main([*words, "--policy", "deadline"]) == 0
    assert "came with targets" not in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--kv-cache-memory=1GiB", "--kv-cache-dtype=int8", "--gpu-memory-utilization=0.5"])
def test_what_means_nothing_in_virtual_time_is_no_option(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["simulate", "--trace", "none.jsonl", flag])
    assert end.value.code == 2
    assert f"unrecognized arguments: {flag}" in capsys.readouterr().err
