"""The one configuration object: flags, environment variables, `--config` files and the documentation are made from its
fields.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from everystop.config.rules import check_together
from everystop.config.setting import (
    DEVICES,
    DTYPES,
    FAILURE_ENDS,
    GRAPHS,
    KV_CACHE,
    KV_CACHE_DTYPES,
    LOG_FORMATS,
    LOG_LEVELS,
    MODEL,
    NETWORK,
    OPERATIONS,
    SCHEDULER,
    check,
    parse_bytes,
    setting,
    without_credentials,
)
from everystop.core.admission import ADMISSIONS
from everystop.core.durations import MAX_TARGET_MS, MIN_TARGET_MS
from everystop.core.policy import POLICIES
from everystop.keys import KeyHash, hash_key, hashed


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that can be set; None means "choose for me", resolved at start-up.

    Raises ConfigError, with what to change, for values that cannot be honoured.
    """

    model: str = "smollm2"
    host: str = setting("127.0.0.1", "--host", "address to listen on", group=NETWORK)
    port: int = setting(8000, "--port", "port to listen on; 0 takes a free one and prints it", group=NETWORK)
    uds: str | None = setting(
        None, "--uds", "listen on a UNIX socket at this path instead of an address", group=NETWORK, metavar="PATH"
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        "--served-model-name",
        "model name in the API; may be repeated, and the first one stands in replies to who names none (default: the "
        "model's own)",
        group=NETWORK,
        parse=str,
    )
    api_key: tuple[KeyHash, ...] = setting(
        (),
        "--api-key",
        "key that clients must send, or its hash from `everystop key`; may be repeated",
        group=NETWORK,
        parse=hash_key,
        is_secret=True,
    )
    api_key_file: str | None = setting(
        None,
        "--api-key-file",
        "file with keys or their hashes, one a line, each with a tenant's name and a colon before it or without",
        group=NETWORK,
    )
    admin_key: tuple[KeyHash, ...] = setting(
        (),
        "--admin-key",
        "key, or its hash, whose holder may also see what others' requests wait for and how they ran; may be repeated",
        group=NETWORK,
        parse=hash_key,
        is_secret=True,
    )
    allowed_host: tuple[str, ...] = setting(
        (),
        "--allowed-host",
        "name by which browsers and proxies reach a server without keys, beside localhost and addresses; may be "
        "repeated; a server that other machines reach takes any name until one is given",
        group=NETWORK,
        parse=str,
    )
    ssl_certfile: str | None = setting(
        None,
        "--ssl-certfile",
        "PEM file with the certificate (and its chain): serve HTTPS; read again when it or the key's file changes",
        group=NETWORK,
        metavar="FILE",
    )
    ssl_keyfile: str | None = setting(
        None,
        "--ssl-keyfile",
        "PEM file with the certificate's private key, not encrypted",
        group=NETWORK,
        metavar="FILE",
    )
    device: str = setting(
        "auto",
        "--device",
        "what computes: the CPU, an NVIDIA GPU (cuda), or PyTorch on the CPU (torch), which is slow and a reference "
        "(default: a GPU where there is one and PyTorch is installed, else the CPU)",
        group=MODEL,
        choices=DEVICES,
    )
    dtype: str = setting(
        "auto",
        "--dtype",
        "arithmetic of the weights: on the CPU group-wise int8 or the float32 reference, on a GPU bfloat16, float16, "
        "float32, or fp8 with activations quantised by token (default: the first that is named)",
        group=MODEL,
        choices=DTYPES,
    )
    cuda_graphs: str | None = setting(
        None,
        "--cuda-graphs",
        "device cuda: capture decode steps when the server starts, when each is first needed, or never (default: lazy)",
        group=MODEL,
        choices=GRAPHS,
    )
    deterministic: bool = setting(
        False,
        "--deterministic",
        "a request's tokens never depend on what else is computed; always so on the CPU, at a price on a GPU",
        group=MODEL,
    )
    max_model_len: int | None = setting(
        None,
        "--max-model-len",
        "longest sequence, prompt and output (default: the model's context)",
        group=MODEL,
        parse=int,
        least=2,
    )
    max_num_seqs: int = setting(
        64, "--max-num-seqs", "most requests running at once", group=SCHEDULER, least=1, most=4096
    )
    max_num_batched_tokens: int = setting(
        256, "--max-num-batched-tokens", "most tokens computed in one step", group=SCHEDULER, least=1, most=65536
    )
    max_num_prefill_tokens: int | None = setting(
        None,
        "--max-num-prefill-tokens",
        "most prompt tokens in one step (default: no limit of its own)",
        group=SCHEDULER,
        parse=int,
        least=1,
    )
    max_prefill_per_decode: int | None = setting(
        None,
        "--max-prefill-per-decode",
        "where at least as many requests decode as could be computed beside them and have no token yet, prompts take "
        "at most so many tokens in a step for each that decodes, and 64 at least; 0: as many as the other limits leave "
        "(default: 5, and 0 with device cuda)",
        group=SCHEDULER,
        parse=int,
        least=0,
        most=65536,
    )
    target_itl_ms: float | None = setting(
        None,
        "--target-itl-ms",
        "size prefill so that a step, and so the gap between tokens, lasts at most so many milliseconds (default: only "
        "the limits on tokens)",
        group=SCHEDULER,
        parse=float,
        least=0.1,
        most=1_000_000,
    )
    block_size: int = setting(
        32, "--block-size", "tokens in one block of the KV cache: 16, 32, 64, 128 or 256", group=KV_CACHE, least=1
    )
    kv_cache_memory: int | None = setting(
        None,
        "--kv-cache-memory",
        "memory for the KV cache, such as 2GiB (default: a quarter of what is allowed, at most what can be used)",
        group=KV_CACHE,
        parse=parse_bytes,
        least=1,
    )
    kv_cache_dtype: str = setting(
        "auto",
        "--kv-cache-dtype",
        "device cpu: what keys and values are stored in; int8, with scales for each token and head, holds nearly twice "
        "as many tokens as float16, and is quicker (default: int8 with --dtype int8, float32 with --dtype float32)",
        group=KV_CACHE,
        choices=KV_CACHE_DTYPES,
    )
    gpu_memory_utilization: float | None = setting(
        None,
        "--gpu-memory-utilization",
        "device cuda: share of the GPU's memory that may be used in all; the KV cache takes what weights and "
        "activations leave of it, at most what can be used (default: 0.9)",
        group=KV_CACHE,
        parse=float,
        least=0.05,
        most=1.0,
        metavar="SHARE",
    )
    enable_prefix_caching: bool = setting(
        True, "--enable-prefix-caching", "reuse the KV blocks of common prompt prefixes", group=KV_CACHE
    )
    policy: str = setting("continuous", "--policy", "who boards, and when", group=SCHEDULER, choices=POLICIES)
    admission: str = setting(
        "expected",
        "--admission",
        "whoever is next boards as soon as it fits the KV cache with what the running are expected to grow to, by the "
        "lengths of past outputs (expected), or as soon as it fits now (greedy)",
        group=SCHEDULER,
        choices=ADMISSIONS,
    )
    batch_wait_ms: int | None = setting(
        None,
        "--batch-wait-ms",
        "static policies: longest wait for a batch to fill, in milliseconds (default: 50)",
        group=SCHEDULER,
        parse=int,
        least=0,
        most=3_600_000,
    )
    ageing: float | None = setting(
        None,
        "--ageing",
        "policies priority and shortest: seconds of waiting that count as much as one level, or as 1,000 prompt tokens "
        "(default: 10)",
        group=SCHEDULER,
        parse=float,
        least=0.001,
        most=1_000_000_000,
    )
    tenants: str | None = setting(
        None,
        "--tenants",
        "a TOML file with the tenants' keys and, for the policies fair, fair-prefix and deadline, their weights and "
        "limits, or targets",
        group=SCHEDULER,
        metavar="FILE",
    )
    fair_quantum: int | None = setting(
        None,
        "--fair-quantum",
        "policy fair-prefix: weighted tokens that a tenant may use ahead of others for the sake of common prefixes "
        "(default: 4096)",
        group=SCHEDULER,
        parse=int,
        least=1,
        most=1_000_000_000,
    )
    ttft_target_ms: float | None = setting(
        None,
        "--ttft-target-ms",
        "policy deadline: a first token is due so many milliseconds after its request, where neither the request nor "
        "its tenant says (default: 1000)",
        group=SCHEDULER,
        parse=float,
        least=MIN_TARGET_MS,
        most=MAX_TARGET_MS,
    )
    itl_target_ms: float | None = setting(
        None,
        "--itl-target-ms",
        "policy deadline: a later token is due so many milliseconds after the one before, where neither the request "
        "nor its tenant says (default: no promise)",
        group=SCHEDULER,
        parse=float,
        least=MIN_TARGET_MS,
        most=MAX_TARGET_MS,
    )
    threads: int | None = setting(
        None,
        "--threads",
        "threads that compute (default: least of physical cores, affinity, cgroup quota)",
        group=MODEL,
        parse=int,
        least=1,
        most=1024,
    )
    seed: int | None = setting(
        None, "--seed", "makes requests without a seed of their own repeatable", group=MODEL, parse=int
    )
    chat_template: str | None = setting(
        None,
        "--chat-template",
        "file with the Jinja chat template (default: the model's own)",
        group=MODEL,
        metavar="FILE",
    )
    generation_config: str = setting(
        "auto",
        "--generation-config",
        "take sampling defaults from the model's generation_config.json",
        group=MODEL,
        choices=("auto", "none"),
    )
    shutdown_timeout: float = setting(
        30.0,
        "--shutdown-timeout",
        "seconds that running requests get to finish after SIGTERM",
        group=OPERATIONS,
        least=0,
    )
    stall_timeout: float = setting(
        30.0,
        "--stall-timeout",
        "seconds with work and no finished step, after which who waits gets an error, /health/live fails and a crash "
        "file is written",
        group=OPERATIONS,
        least=1,
        most=86_400,
    )
    on_engine_failure: str = setting(
        "exit",
        "--on-engine-failure",
        "after a failure of the engine, end with status 1 so that a supervisor starts it again, or stay up and answer "
        "503",
        group=OPERATIONS,
        choices=FAILURE_ENDS,
    )
    crash_dir: str | None = setting(
        None,
        "--crash-dir",
        "folder for crash files: the last five minutes of events and all stacks, without prompts (default: crashes in "
        "EVERYSTOP_HOME)",
        group=OPERATIONS,
    )
    max_crash_files: int = setting(
        10, "--max-crash-files", "crash files that are kept; 0 writes none", group=OPERATIONS, least=0, most=1000
    )
    log_format: str = setting(
        "text", "--log-format", "how the log on standard error is written", group=OPERATIONS, choices=LOG_FORMATS
    )
    log_level: str = setting(
        "info", "--log-level", "the least that is logged; requests are info", group=OPERATIONS, choices=LOG_LEVELS
    )
    log_requests: bool = setting(
        True, "--log-requests", "log one line a request, never with its text", group=OPERATIONS
    )
    max_num_queued_reqs: int = setting(
        1024,
        "--max-num-queued-reqs",
        "most sequences that wait for a place to run, each of n choices counted; more get 429",
        group=NETWORK,
        least=1,
        most=1_000_000,
    )
    max_num_queued_tokens: int = setting(
        1 << 20,
        "--max-num-queued-tokens",
        "most prompt tokens of the sequences that wait for a place to run; more get 429",
        group=NETWORK,
        least=1,
        most=1_000_000_000,
    )
    max_request_seconds: float = setting(
        3600.0,
        "--max-request-seconds",
        "longest life of a request, from its last byte to the end of its answer; then it gets 504, or an error event",
        group=NETWORK,
        least=0.001,
        most=31_536_000,
    )
    stats_interval: float = setting(
        10.0, "--stats-interval", "seconds between status lines while busy; 0 for none", group=OPERATIONS, least=0
    )
    explain_history: int = setting(
        10_000,
        "--explain-history",
        "requests that can still be explained when they are over, each choice counted; 0 for none",
        group=OPERATIONS,
        least=0,
        most=1_000_000,
    )
    slow_log: float | None = setting(
        None,
        "--slow-log",
        "say in one line why, for each request that took longer than so many milliseconds (default: for none)",
        group=OPERATIONS,
        parse=float,
        least=0,
        most=1_000_000_000,
        metavar="MS",
    )
    enable_per_request_metrics: bool = setting(
        False,
        "--enable-per-request-metrics",
        "put a `metrics` object with its times into every answer, streamed ones with include_usage",
        group=NETWORK,
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "--otlp-traces-endpoint",
        "send a trace of each request to this OpenTelemetry collector by OTLP over HTTP, such as http://localhost:4318 "
        "(default: to none); needs the extra otel",
        group=NETWORK,
        metavar="URL",
    )
    record: str | None = setting(
        None,
        "--record",
        "write every scheduler call to this file, for replay; without text or token ids. Records that are there become "
        "FILE.1 to FILE.5, the newest first",
        metavar="FILE",
        group=SCHEDULER,
    )
    record_prompts: bool = setting(
        False, "--record-prompts", "write the token ids of prompts and answers to the record, too", group=SCHEDULER
    )

    def __post_init__(self) -> None:
        for field in fields(self):
            check(field, getattr(self, field.name))
        for name in ("api_key", "admin_key"):  # plain keys end here
            object.__setattr__(self, name, hashed(getattr(self, name), f"--{name.replace('_', '-')}"))
        check_together(self)

    def shown(self) -> dict[str, Any]:
        """All settings by name, as they may be written to a file: of a secret only how many there are, and of a URL no
        name and password.
        """
        values = {field.name: without_credentials(getattr(self, field.name)) for field in fields(self)}
        secrets = {field.name for field in fields(self) if field.metadata.get("is_secret")}
        return {name: f"{len(value)} set" if name in secrets else value for name, value in values.items()}
