"""Which values of the configuration do not go together, or mean nothing: one sentence each, with what to change."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from everystop.config.setting import without_credentials
from everystop.core.errors import ConfigError
from everystop.core.policy import honouring

if TYPE_CHECKING:
    from everystop.config import Config

POLICY_OPTIONS: Mapping[str, str] = {  # option: the field of `PolicySettings` that it sets
    "batch_wait_ms": "batch_wait_ns",
    "ageing": "ageing_ns",
    "tenants": "shares",
    "fair_quantum": "quantum",
    "ttft_target_ms": "targets",
    "itl_target_ms": "targets",
}
HOST = re.compile(r"[A-Za-z0-9._-]{1,253}")
COLLECTOR = re.compile(r"https?://[^/?#\s]+[^?#\s]*")


def check_together(config: Config) -> None:
    """Raise ConfigError for the first rule that is broken."""
    for rules in (_of_engine, _of_names, _of_places, _of_operations):
        for sentence in rules(config):
            raise ConfigError(sentence)
    for option in POLICY_OPTIONS:
        if option != "tenants" and getattr(config, option) is not None:  # of tenants each policy honours something
            check_honoured(option, config.policy)


def check_honoured(option: str, policy: str) -> None:
    """Raise ConfigError if that one of `POLICY_OPTIONS` has no effect under the policy."""
    able, flag = honouring(POLICY_OPTIONS[option]), f"--{option.replace('_', '-')}"
    if policy not in able:
        raise ConfigError(f"{flag} needs --policy {' or '.join(able)}; it has no effect under the policy {policy}")


def _of_engine(config: Config) -> Iterator[str]:
    if config.block_size % 16 or 256 % config.block_size:
        yield f"--block-size is {config.block_size}; it must be 16, 32, 64, 128 or 256"
    if config.max_num_batched_tokens < config.max_num_seqs:
        yield (
            f"--max-num-batched-tokens {config.max_num_batched_tokens} is below --max-num-seqs {config.max_num_seqs}, "
            "so running requests could not all decode in one step; raise the first or lower the second"
        )
    if config.policy == "fair-prefix" and not config.enable_prefix_caching:
        yield (
            "--policy fair-prefix needs the prefix cache, whose prefixes it keeps together; leave out "
            "--no-enable-prefix-caching, or choose --policy fair"
        )
    if config.record_prompts and config.record is None:
        yield "--record-prompts needs --record FILE; without a record there is nothing to add them to"


def _of_names(config: Config) -> Iterator[str]:
    names = config.served_model_name
    if any(name.strip() != name or not name for name in names):
        yield "--served-model-name is empty or has blanks at its ends; give the name itself"
    if len(set(names)) < len(names):
        yield f"--served-model-name names {', '.join(names)}: one of them twice; leave it out once"
    for host in config.allowed_host:
        if HOST.fullmatch(host) is None:
            yield f"--allowed-host is {host!r}; it must be the name of a host, without scheme or port"


def _of_places(config: Config) -> Iterator[str]:
    if not 0 <= config.port <= 65535:
        yield f"--port is {config.port}; it must be 0 to 65535"
    if config.uds == "":
        yield "--uds is empty; name the path of a socket"
    if config.uds is not None:
        for field in fields(config):
            if field.name in ("host", "port") and getattr(config, field.name) != field.default:
                yield f"--uds and --{field.name} are two places to listen at; leave one out"
    if (config.ssl_certfile is None) != (config.ssl_keyfile is None):
        yield "--ssl-certfile and --ssl-keyfile belong together; give both, or neither for HTTP"
    endpoint = config.otlp_traces_endpoint
    if endpoint is not None and not _is_collector(endpoint):
        shown = without_credentials(endpoint)
        yield f"--otlp-traces-endpoint is {shown!r}; give the URL of a collector, such as http://localhost:4318"


def _is_collector(endpoint: str) -> bool:
    try:
        return COLLECTOR.fullmatch(endpoint) is not None and urlsplit(endpoint).port != 0
    except ValueError:  # a port that is none
        return False


def _of_operations(config: Config) -> Iterator[str]:
    if config.slow_log is not None and config.explain_history == 0:
        yield "--slow-log needs requests to be remembered; raise --explain-history from 0 or leave one out"
    if config.slow_log is not None and config.log_level not in ("debug", "info"):
        yield f"--slow-log has no effect with --log-level {config.log_level}; choose info, or leave one out"
    if config.otlp_traces_endpoint is not None and config.explain_history == 0:
        yield "--otlp-traces-endpoint needs remembered requests; raise --explain-history from 0 or leave one out"
    if config.crash_dir is not None and config.max_crash_files == 0:
        yield "--crash-dir has no effect with --max-crash-files 0; raise it or leave one out"
