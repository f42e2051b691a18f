"""The one configuration object: flags, environment variables, `--config` files and the documentation are made from its
fields.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from everystop.core.errors import ConfigError

POLICIES = ("continuous", "static", "static-padded", "priority", "shortest", "fair")
DTYPES = ("int8", "float32")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(text: str) -> int:
    """Bytes from "512MiB", "2g", "1.5GB" or a plain number; raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", text.lower())
    if match is None:
        raise ConfigError(f"{text!r} is not a size in bytes; write for example 512MiB or 2g")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _setting(
    default: Any, flag: str, help_text: str, *, choices: Sequence[str] | None = None, parse: Any = None
) -> Any:
    """A field of `Config`; `parse` turns a command-line string into the value (default: the type of the default)."""
    meta = {
        "flag": flag,
        "help": help_text,
        "choices": choices,
        "parse": parse or (type(default) if default is not None else str),
    }
    return field(default=default, metadata=meta)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that can be set, validated once by `validate`; None means "choose for me", resolved at start-up."""

    model: str = "smollm2"
    host: str = _setting("127.0.0.1", "--host", "address to listen on")
    port: int = _setting(8000, "--port", "port to listen on; 0 takes a free one and prints it")
    served_model_name: str | None = _setting(
        None, "--served-model-name", "model name in the API (default: the model's own)"
    )
    api_key: tuple[str, ...] = _setting(
        (), "--api-key", "key that clients must send as Bearer token; may be repeated", parse=str
    )
    dtype: str = _setting(
        "int8", "--dtype", "arithmetic of the weights: group-wise int8, or the float32 reference", choices=DTYPES
    )
    max_model_len: int | None = _setting(
        None, "--max-model-len", "longest sequence, prompt and output (default: the model's context)", parse=int
    )
    max_num_seqs: int = _setting(64, "--max-num-seqs", "most requests running at once")
    max_num_batched_tokens: int = _setting(256, "--max-num-batched-tokens", "most tokens computed in one step")
    max_num_prefill_tokens: int | None = _setting(
        None, "--max-num-prefill-tokens", "most prompt tokens in one step (default: no limit of its own)", parse=int
    )
    block_size: int = _setting(32, "--block-size", "tokens in one block of the KV cache: 16, 32, 64, 128 or 256")
    kv_cache_memory: int | None = _setting(
        None,
        "--kv-cache-memory",
        "memory for the KV cache, such as 2GiB (default: a quarter of what is allowed, at most what can be used)",
        parse=parse_bytes,
    )
    enable_prefix_caching: bool = _setting(
        True, "--enable-prefix-caching", "reuse the KV blocks of common prompt prefixes"
    )
    policy: str = _setting("continuous", "--policy", "who boards, and when", choices=POLICIES)
    batch_wait_ms: int = _setting(
        50, "--batch-wait-ms", "static policies: longest wait for a batch to fill, in milliseconds"
    )
    ageing: float = _setting(
        10.0,
        "--ageing",
        "policies priority and shortest: seconds of waiting that count as much as one level, or as 1,000 prompt tokens",
    )
    tenants: str | None = _setting(
        None, "--tenants", "policy fair: a TOML file with the tenants' keys, weights and limits"
    )
    threads: int | None = _setting(
        None, "--threads", "threads that compute (default: least of physical cores, affinity, cgroup quota)", parse=int
    )
    seed: int | None = _setting(None, "--seed", "makes requests without a seed of their own repeatable", parse=int)
    chat_template: str | None = _setting(
        None, "--chat-template", "file with the Jinja chat template (default: the model's own)"
    )
    generation_config: str = _setting(
        "auto",
        "--generation-config",
        "take sampling defaults from the model's generation_config.json",
        choices=("auto", "none"),
    )
    shutdown_timeout: float = _setting(
        30.0, "--shutdown-timeout", "seconds that running requests get to finish after SIGTERM"
    )
    stats_interval: float = _setting(10.0, "--stats-interval", "seconds between status lines while busy; 0 for none")
    record: str | None = _setting(None, "--record", "write every scheduler call to this file, for replay")

    def validate(self) -> Config:
        """Return self; raise ConfigError for values that cannot be honoured, with what to change."""
        positive = (
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "max_model_len",
            "max_num_prefill_tokens",
            "threads",
            "kv_cache_memory",
        )
        for name in positive:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
        if self.block_size % 16 or 256 % self.block_size:
            raise ConfigError(f"--block-size is {self.block_size}; it must be 16, 32, 64, 128 or 256")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-num-seqs {self.max_num_seqs}, "
                "so running requests could not all decode in one step; raise the first or lower the second"
            )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; it must be 0 to 65535")
        if self.batch_wait_ms < 0 or self.shutdown_timeout < 0 or self.stats_interval < 0:
            raise ConfigError("--batch-wait-ms, --shutdown-timeout and --stats-interval must not be negative")
        if not 0 < self.ageing < 1e9:
            raise ConfigError(f"--ageing is {self.ageing:g}; it must be above 0, and less than a billion seconds")
        if self.tenants is not None and self.policy != "fair":
            raise ConfigError(f"--tenants needs --policy fair; the policy {self.policy} does not tell tenants apart")
        for name, allowed in (("dtype", DTYPES), ("policy", POLICIES), ("generation_config", ("auto", "none"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}"
                )
        return self
