"""What a configuration refuses, whoever makes it."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest

from everystop.config import Config
from everystop.config.setting import parse_bytes
from everystop.core.errors import ConfigError
from everystop.core.policy import POLICIES, make_policy


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_num_seqs": 0}, ["--max-num-seqs is 0", "at least 1"]),
        ({"max_model_len": -5}, ["--max-model-len is -5", "at least 2"]),
        ({"max_model_len": 1}, ["--max-model-len is 1"]),
        ({"max_num_batched_tokens": 10**6}, ["--max-num-batched-tokens is 1,000,000", "at most 65,536"]),
        ({"max_num_seqs": 5000, "max_num_batched_tokens": 5000}, ["--max-num-seqs is 5,000", "at most 4,096"]),
        ({"threads": 10**20}, ["--threads is 100,000,", "at most 1,024"]),
        ({"kv_cache_memory": "1GiB"}, ["--kv-cache-memory is '1GiB'", "a number"]),
        ({"max_num_prefill_tokens": 0}, ["--max-num-prefill-tokens is 0"]),
        ({"kv_cache_memory": 0}, ["--kv-cache-memory is 0"]),
        ({"threads": 0}, ["--threads is 0"]),
        ({"batch_wait_ms": -1}, ["--batch-wait-ms is -1", "at least 0"]),
        ({"shutdown_timeout": math.nan}, ["--shutdown-timeout is nan"]),
        ({"stats_interval": -0.5}, ["--stats-interval is -0.5"]),
        ({"block_size": 48}, ["--block-size is 48", "16, 32, 64, 128 or 256"]),
        ({"block_size": 512}, ["--block-size is 512"]),
        ({"port": 65536}, ["--port is 65536"]),
        ({"dtype": "int4"}, ["--dtype is 'int4'", "int8, float32"]),
        ({"device": "tpu"}, ["--device is 'tpu'", "auto, cpu, cuda, torch"]),
        ({"kv_cache_dtype": "fp8"}, ["--kv-cache-dtype is 'fp8'", "auto, float16, int8"]),
        ({"cuda_graphs": "always"}, ["--cuda-graphs is 'always'", "start, lazy, off"]),
        ({"gpu_memory_utilization": 1.5}, ["--gpu-memory-utilization is 1.5", "at most 1"]),
        ({"gpu_memory_utilization": 0.0}, ["--gpu-memory-utilization is 0.0", "at least 0.05"]),
        ({"policy": "fastest"}, ["--policy is 'fastest'", "continuous, static, static-padded"]),
        ({"generation_config": "always"}, ["--generation-config is 'always'", "auto, none"]),
        ({"max_num_seqs": 300}, ["--max-num-batched-tokens 256", "--max-num-seqs 300"]),
        ({"api_key": ("good", " ")}, ["--api-key"]),
        ({"admin_key": ("good", "")}, ["--admin-key"]),
        ({"explain_history": -1}, ["--explain-history is -1", "at least 0"]),
        ({"explain_history": 2_000_000}, ["--explain-history is 2,000,000", "at most 1,000,000"]),
        ({"slow_log": -1.0}, ["--slow-log is -1.0"]),
        ({"slow_log": 5.0, "log_level": "warning"}, ["--slow-log", "--log-level warning"]),
        ({"crash_dir": "x", "max_crash_files": 0}, ["--crash-dir", "--max-crash-files 0"]),
        ({"max_crash_files": 1001}, ["--max-crash-files is 1,001"]),
        ({"stall_timeout": 0.5}, ["--stall-timeout is 0.5", "at least 1"]),
        ({"on_engine_failure": "restart"}, ["--on-engine-failure is 'restart'", "exit, stay"]),
        ({"log_format": "xml"}, ["--log-format is 'xml'", "text, json"]),
        ({"log_level": "loud"}, ["--log-level is 'loud'"]),
        ({"served_model_name": ("a", "b", "a")}, ["--served-model-name", "twice"]),
        ({"served_model_name": ("a", " b")}, ["--served-model-name", "blanks"]),
        ({"uds": ""}, ["--uds is empty"]),
        ({"uds": "/s", "port": 9}, ["--uds and --port"]),
        ({"uds": "/s", "host": "::1"}, ["--uds and --host"]),
        ({"max_num_queued_reqs": 0}, ["--max-num-queued-reqs is 0", "at least 1"]),
        ({"max_num_queued_tokens": 0}, ["--max-num-queued-tokens is 0", "at least 1"]),
        ({"max_request_seconds": 0.0}, ["--max-request-seconds is 0.0", "at least 0.001"]),
        ({"max_request_seconds": math.inf}, ["--max-request-seconds is inf", "at most 31,536,000"]),
        ({"slow_log": math.nan}, ["--slow-log is nan"]),
        ({"slow_log": 5.0, "explain_history": 0}, ["--slow-log", "--explain-history"]),
        ({"ttft_target_ms": 500.0}, ["--ttft-target-ms", "--policy deadline", "continuous"]),
        ({"itl_target_ms": 50.0, "policy": "fair"}, ["--itl-target-ms", "--policy deadline", "fair"]),
        ({"batch_wait_ms": 50}, ["--batch-wait-ms needs --policy static or static-padded", "continuous"]),
        ({"batch_wait_ms": 10**9, "policy": "static"}, ["--batch-wait-ms is 1,000,000,000", "at most 3,600,000"]),
        ({"ageing": 10.0, "policy": "fair"}, ["--ageing needs --policy priority or shortest", "fair"]),
        ({"ageing": 1e-10, "policy": "shortest"}, ["--ageing is 1e-10", "at least 0.001"]),
        (
            {"policy": "fair-prefix", "enable_prefix_caching": False},
            ["--policy fair-prefix", "--no-enable-prefix-cach"],
        ),
        ({"itl_target_ms": 0.0, "policy": "deadline"}, ["--itl-target-ms is 0.0", "at least 1"]),
    ],
)
def test_values_that_cannot_be_honoured_are_named(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**settings)
    assert [word for word in words if word not in str(caught.value)] == []


def test_values_at_the_edge_are_taken() -> None:
    config = Config(max_num_seqs=1, max_num_batched_tokens=1, shutdown_timeout=0, stats_interval=0, port=0)
    assert Config(policy="static", batch_wait_ms=0).batch_wait_ms == 0
    assert config.max_num_batched_tokens == 1


def test_each_policy_that_can_be_chosen_can_be_made() -> None:
    assert len({type(make_policy(name)) for name in POLICIES}) == len(POLICIES)
    with pytest.raises(ConfigError, match="'fastest'"):
        make_policy("fastest")


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("512MiB", 2**29), ("2g", 2 * 10**9), ("1.5GB", 1_500_000_000), (" 7 ", 7), ("1ki", 1024)]
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "lots", "-1", "1TB", "1 2", "GiB", "9" * 400])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="512MiB"):
        parse_bytes(text)


def test_of_a_url_no_password_is_shown() -> None:
    for url in ("https://me:pa@ss@collector:4318/v1", "https://me@collector"):
        shown = Config(otlp_traces_endpoint=url).shown()["otlp_traces_endpoint"]
        assert shown == "https://…@" + url.rpartition("@")[2]
    with pytest.raises(ConfigError) as caught:
        Config(otlp_traces_endpoint="https://me:se/cret@collector:99999")
    assert "cret" not in str(caught.value)
    assert Config(model="a@b").shown()["model"] == "a@b"


def test_what_is_shown_of_a_configuration_holds_no_key() -> None:
    shown = Config(api_key=("sk-1", "sk-2"), admin_key=("sk-3",), port=9).shown()
    assert (shown["api_key"], shown["admin_key"], shown["port"]) == ("2 set", "1 set", 9)
    assert "sk-" not in str(shown)
    assert shown.keys() == {field.name for field in dataclasses.fields(Config)}
    suspicious = [field.name for field in dataclasses.fields(Config) if re.search("_key$|secret|password", field.name)]
    assert all(field.metadata.get("is_secret") for field in dataclasses.fields(Config) if field.name in suspicious)
