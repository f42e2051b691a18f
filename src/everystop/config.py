"""The one configuration object: flags, environment variables, `--config` files and the documentation are made from its
fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from everystop.core.admission import ADMISSIONS
from everystop.core.durations import MAX_TARGET_MS, MIN_TARGET_MS
from everystop.core.errors import ConfigError
from everystop.core.policy import POLICIES, honouring
from everystop.keys import KeyHash, hash_key, hashed

DEVICES = ("auto", "cpu", "cuda", "torch")
DTYPES = ("auto", "int8", "float32", "bfloat16", "float16", "fp8")
GRAPHS = ("start", "lazy", "off")
NETWORK, MODEL, SCHEDULER, KV_CACHE, OPERATIONS = GROUPS = ("network", "model", "scheduler", "KV cache", "operations")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
FAILURE_ENDS = ("exit", "stay")
POLICY_OPTIONS: Mapping[str, str] = {  # option: the field of `PolicySettings` that it sets
    "batch_wait_ms": "batch_wait_ns",
    "ageing": "ageing_ns",
    "tenants": "shares",
    "fair_quantum": "quantum",
    "ttft_target_ms": "targets",
    "itl_target_ms": "targets",
}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(text: str) -> int:
    """Bytes from "512MiB", "2g", "1.5GB" or a plain number; raises ConfigError."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*([kmg]i?)?b?\s*", text.lower())
    if match is None:
        raise ConfigError(f"{text!r} is not a size in bytes; write for example 512MiB or 2g")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _setting(
    default: Any,
    flag: str,
    help_text: str,
    *,
    group: str,
    choices: Sequence[str] | None = None,
    parse: Any = None,
    least: float | None = None,
    most: float | None = None,
    metavar: str | None = None,
    is_secret: bool = False,
) -> Any:
    """A field of `Config`, shown under `group` in the help; only values from `least` to `most` can be honoured.

    `parse` turns a command-line string into the value (default: the type of the default). `metavar` stands for the
    value in the help where neither the flag nor the type says what it is. A value that `is_secret` is never written
    anywhere.
    """
    meta = {
        "flag": flag,
        "help": help_text,
        "group": group,
        "choices": choices,
        "parse": parse or (type(default) if default is not None else str),
        "least": least,
        "most": most,
        "metavar": metavar,
        "is_secret": is_secret,
    }
    return field(default=default, metadata=meta)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that can be set; None means "choose for me", resolved at start-up.

    Raises ConfigError, with what to change, for values that cannot be honoured.
    """

    model: str = "smollm2"
    host: str = _setting("127.0.0.1", "--host", "address to listen on", group=NETWORK)
    port: int = _setting(8000, "--port", "port to listen on; 0 takes a free one and prints it", group=NETWORK)
    uds: str | None = _setting(
        None, "--uds", "listen on a UNIX socket at this path instead of an address", group=NETWORK, metavar="PATH"
    )
    served_model_name: tuple[str, ...] = _setting(
        (),
        "--served-model-name",
        "model name in the API; may be repeated, and the first one stands in replies to who names none (default: the "
        "model's own)",
        group=NETWORK,
        parse=str,
    )
    api_key: tuple[KeyHash, ...] = _setting(
        (),
        "--api-key",
        "key that clients must send, or its hash from `everystop key`; may be repeated",
        group=NETWORK,
        parse=hash_key,
        is_secret=True,
    )
    api_key_file: str | None = _setting(
        None,
        "--api-key-file",
        "file with keys or their hashes, one a line, each with a tenant's name and a colon before it or without",
        group=NETWORK,
    )
    admin_key: tuple[KeyHash, ...] = _setting(
        (),
        "--admin-key",
        "key, or its hash, whose holder may also see what others' requests wait for and how they ran; may be repeated",
        group=NETWORK,
        parse=hash_key,
        is_secret=True,
    )
    allowed_host: tuple[str, ...] = _setting(
        (),
        "--allowed-host",
        "name by which browsers and proxies reach a server without keys, beside localhost and addresses; may be "
        "repeated",
        group=NETWORK,
        parse=str,
    )
    ssl_certfile: str | None = _setting(
        None, "--ssl-certfile", "PEM file with the certificate (and its chain): serve HTTPS", group=NETWORK
    )
    ssl_keyfile: str | None = _setting(
        None, "--ssl-keyfile", "PEM file with the certificate's private key, not encrypted", group=NETWORK
    )
    device: str = _setting(
        "auto",
        "--device",
        "what computes: the CPU, an NVIDIA GPU (cuda), or PyTorch on the CPU (torch), which is slow and a reference "
        "(default: a GPU where there is one and PyTorch is installed, else the CPU)",
        group=MODEL,
        choices=DEVICES,
    )
    dtype: str = _setting(
        "auto",
        "--dtype",
        "arithmetic of the weights: on the CPU group-wise int8 (its default) or the float32 reference; on a GPU "
        "bfloat16 (its default), float16, float32, or fp8 with activations quantised by token",
        group=MODEL,
        choices=DTYPES,
    )
    cuda_graphs: str | None = _setting(
        None,
        "--cuda-graphs",
        "device cuda: capture decode steps when the server starts, when each is first needed, or never (default: lazy)",
        group=MODEL,
        choices=GRAPHS,
    )
    deterministic: bool = _setting(
        False,
        "--deterministic",
        "a request's tokens never depend on what else is computed; always so on the CPU, at a price on a GPU",
        group=MODEL,
    )
    max_model_len: int | None = _setting(
        None,
        "--max-model-len",
        "longest sequence, prompt and output (default: the model's context)",
        group=MODEL,
        parse=int,
        least=2,
    )
    max_num_seqs: int = _setting(
        64, "--max-num-seqs", "most requests running at once", group=SCHEDULER, least=1, most=4096
    )
    max_num_batched_tokens: int = _setting(
        256, "--max-num-batched-tokens", "most tokens computed in one step", group=SCHEDULER, least=1, most=65536
    )
    max_num_prefill_tokens: int | None = _setting(
        None,
        "--max-num-prefill-tokens",
        "most prompt tokens in one step (default: no limit of its own)",
        group=SCHEDULER,
        parse=int,
        least=1,
    )
    target_itl_ms: float | None = _setting(
        None,
        "--target-itl-ms",
        "size prefill so that a step, and so the gap between tokens, lasts at most so many milliseconds (default: only "
        "the limits on tokens)",
        group=SCHEDULER,
        parse=float,
        least=0.1,
        most=1_000_000,
    )
    block_size: int = _setting(
        32, "--block-size", "tokens in one block of the KV cache: 16, 32, 64, 128 or 256", group=KV_CACHE, least=1
    )
    kv_cache_memory: int | None = _setting(
        None,
        "--kv-cache-memory",
        "memory for the KV cache, such as 2GiB (default: a quarter of what is allowed, at most what can be used)",
        group=KV_CACHE,
        parse=parse_bytes,
        least=1,
    )
    gpu_memory_utilization: float | None = _setting(
        None,
        "--gpu-memory-utilization",
        "device cuda: share of the GPU's memory that may be used in all; the KV cache takes what weights and "
        "activations leave of it, at most what can be used (default: 0.9)",
        group=KV_CACHE,
        parse=float,
        least=0.05,
        most=1.0,
    )
    enable_prefix_caching: bool = _setting(
        True, "--enable-prefix-caching", "reuse the KV blocks of common prompt prefixes", group=KV_CACHE
    )
    policy: str = _setting("continuous", "--policy", "who boards, and when", group=SCHEDULER, choices=POLICIES)
    admission: str = _setting(
        "expected",
        "--admission",
        "whoever is next boards as soon as it fits the KV cache with what the running are expected to grow to, by the "
        "lengths of past outputs (expected), or as soon as it fits now (greedy)",
        group=SCHEDULER,
        choices=ADMISSIONS,
    )
    batch_wait_ms: int | None = _setting(
        None,
        "--batch-wait-ms",
        "static policies: longest wait for a batch to fill, in milliseconds (default: 50)",
        group=SCHEDULER,
        parse=int,
        least=0,
        most=3_600_000,
    )
    ageing: float | None = _setting(
        None,
        "--ageing",
        "policies priority and shortest: seconds of waiting that count as much as one level, or as 1,000 prompt tokens "
        "(default: 10)",
        group=SCHEDULER,
        parse=float,
        least=0.001,
        most=1_000_000_000,
    )
    tenants: str | None = _setting(
        None,
        "--tenants",
        "a TOML file with the tenants' keys and, for the policies fair, fair-prefix and deadline, their weights and "
        "limits, or targets",
        group=SCHEDULER,
    )
    fair_quantum: int | None = _setting(
        None,
        "--fair-quantum",
        "policy fair-prefix: weighted tokens that a tenant may use ahead of others for the sake of common prefixes "
        "(default: 4096)",
        group=SCHEDULER,
        parse=int,
        least=1,
        most=1_000_000_000,
    )
    ttft_target_ms: float | None = _setting(
        None,
        "--ttft-target-ms",
        "policy deadline: a first token is due so many milliseconds after its request, where neither the request nor "
        "its tenant says (default: 1000)",
        group=SCHEDULER,
        parse=float,
        least=MIN_TARGET_MS,
        most=MAX_TARGET_MS,
    )
    itl_target_ms: float | None = _setting(
        None,
        "--itl-target-ms",
        "policy deadline: a later token is due so many milliseconds after the one before, where neither the request "
        "nor its tenant says (default: no promise)",
        group=SCHEDULER,
        parse=float,
        least=MIN_TARGET_MS,
        most=MAX_TARGET_MS,
    )
    threads: int | None = _setting(
        None,
        "--threads",
        "threads that compute (default: least of physical cores, affinity, cgroup quota)",
        group=MODEL,
        parse=int,
        least=1,
        most=1024,
    )
    seed: int | None = _setting(
        None, "--seed", "makes requests without a seed of their own repeatable", group=MODEL, parse=int
    )
    chat_template: str | None = _setting(
        None, "--chat-template", "file with the Jinja chat template (default: the model's own)", group=MODEL
    )
    generation_config: str = _setting(
        "auto",
        "--generation-config",
        "take sampling defaults from the model's generation_config.json",
        group=MODEL,
        choices=("auto", "none"),
    )
    shutdown_timeout: float = _setting(
        30.0,
        "--shutdown-timeout",
        "seconds that running requests get to finish after SIGTERM",
        group=OPERATIONS,
        least=0,
    )
    stall_timeout: float = _setting(
        30.0,
        "--stall-timeout",
        "seconds with work and no finished step, after which who waits gets an error, /health/live fails and a crash "
        "file is written",
        group=OPERATIONS,
        least=1,
        most=86_400,
    )
    on_engine_failure: str = _setting(
        "exit",
        "--on-engine-failure",
        "after a failure of the engine, end with status 1 so that a supervisor starts it again, or stay up and answer "
        "503",
        group=OPERATIONS,
        choices=FAILURE_ENDS,
    )
    crash_dir: str | None = _setting(
        None,
        "--crash-dir",
        "folder for crash files: the last five minutes of events and all stacks, without prompts (default: crashes in "
        "EVERYSTOP_HOME)",
        group=OPERATIONS,
    )
    max_crash_files: int = _setting(
        10, "--max-crash-files", "crash files that are kept; 0 writes none", group=OPERATIONS, least=0, most=1000
    )
    log_format: str = _setting(
        "text", "--log-format", "how the log on standard error is written", group=OPERATIONS, choices=LOG_FORMATS
    )
    log_level: str = _setting(
        "info", "--log-level", "the least that is logged; requests are info", group=OPERATIONS, choices=LOG_LEVELS
    )
    log_requests: bool = _setting(
        True, "--log-requests", "log one line a request, never with its text", group=OPERATIONS
    )
    max_num_queued_reqs: int = _setting(
        1024,
        "--max-num-queued-reqs",
        "most sequences that wait for a place to run, each of n choices counted; more get 429",
        group=NETWORK,
        least=1,
        most=1_000_000,
    )
    max_num_queued_tokens: int = _setting(
        1 << 20,
        "--max-num-queued-tokens",
        "most prompt tokens of the sequences that wait for a place to run; more get 429",
        group=NETWORK,
        least=1,
        most=1_000_000_000,
    )
    max_request_seconds: float = _setting(
        3600.0,
        "--max-request-seconds",
        "longest life of a request, from its last byte to the end of its answer; then it gets 504, or an error event",
        group=NETWORK,
        least=0.001,
        most=31_536_000,
    )
    stats_interval: float = _setting(
        10.0, "--stats-interval", "seconds between status lines while busy; 0 for none", group=OPERATIONS, least=0
    )
    explain_history: int = _setting(
        10_000,
        "--explain-history",
        "requests that can still be explained when they are over, each choice counted; 0 for none",
        group=OPERATIONS,
        least=0,
        most=1_000_000,
    )
    slow_log: float | None = _setting(
        None,
        "--slow-log",
        "say in one line why, for each request that took longer than so many milliseconds (default: for none)",
        group=OPERATIONS,
        parse=float,
        least=0,
        most=1_000_000_000,
        metavar="MS",
    )
    enable_per_request_metrics: bool = _setting(
        False,
        "--enable-per-request-metrics",
        "put a `metrics` object with its times into every answer, streamed ones with include_usage",
        group=NETWORK,
    )
    otlp_traces_endpoint: str | None = _setting(
        None,
        "--otlp-traces-endpoint",
        "send a trace of each request to this OpenTelemetry collector by OTLP over HTTP, such as http://localhost:4318 "
        "(default: to none); needs the extra otel",
        group=NETWORK,
        metavar="URL",
    )
    record: str | None = _setting(
        None,
        "--record",
        "write every scheduler call to this file, for replay; without text or token ids",
        group=SCHEDULER,
    )
    record_prompts: bool = _setting(
        False, "--record-prompts", "write the token ids of prompts and answers to the record, too", group=SCHEDULER
    )

    def __post_init__(self) -> None:
        for setting in fields(self):
            _check(setting, getattr(self, setting.name))
        if self.block_size % 16 or 256 % self.block_size:
            raise ConfigError(f"--block-size is {self.block_size}; it must be 16, 32, 64, 128 or 256")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-num-seqs {self.max_num_seqs}, "
                "so running requests could not all decode in one step; raise the first or lower the second"
            )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; it must be 0 to 65535")
        self._check_names()
        for name in ("api_key", "admin_key"):  # plain keys end here
            object.__setattr__(self, name, hashed(getattr(self, name), f"--{name.replace('_', '-')}"))
        for host in self.allowed_host:
            if re.fullmatch(r"[A-Za-z0-9._-]{1,253}", host) is None:
                raise ConfigError(f"--allowed-host is {host!r}; it must be the name of a host, without scheme or port")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("--ssl-certfile and --ssl-keyfile belong together; give both, or neither for HTTP")
        if self.slow_log is not None and self.explain_history == 0:
            raise ConfigError(
                "--slow-log needs requests to be remembered; raise --explain-history from 0 or leave one out"
            )
        if self.slow_log is not None and self.log_level not in ("debug", "info"):
            raise ConfigError(
                f"--slow-log has no effect with --log-level {self.log_level}; choose info, or leave one out"
            )
        if self.crash_dir is not None and self.max_crash_files == 0:
            raise ConfigError("--crash-dir has no effect with --max-crash-files 0; raise it or leave one out")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and re.fullmatch(r"https?://[^/?#\s]+[^?#\s]*", endpoint) is None:
            raise ConfigError(
                f"--otlp-traces-endpoint is {endpoint!r}; give the URL of a collector, such as http://localhost:4318"
            )
        if endpoint is not None and self.explain_history == 0:
            raise ConfigError(
                "--otlp-traces-endpoint needs remembered requests; raise --explain-history from 0 or leave one out"
            )
        if self.record_prompts and self.record is None:
            raise ConfigError("--record-prompts needs --record FILE; without a record there is nothing to add them to")
        if self.policy == "fair-prefix" and not self.enable_prefix_caching:
            raise ConfigError(
                "--policy fair-prefix needs the prefix cache, whose prefixes it keeps together; leave out "
                "--no-enable-prefix-caching, or choose --policy fair"
            )
        for option in POLICY_OPTIONS:
            if option != "tenants" and getattr(self, option) is not None:  # of tenants each policy honours something
                check_honoured(option, self.policy)

    def shown(self) -> dict[str, Any]:
        """All settings by name, as they may be written to a file: of a secret only how many there are."""
        values = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        secrets = {setting.name for setting in fields(self) if setting.metadata.get("is_secret")}
        return {name: f"{len(value)} set" if name in secrets else value for name, value in values.items()}

    def _check_names(self) -> None:
        """Raise ConfigError for names of the model, or of the socket, that cannot be used."""
        names = self.served_model_name
        if any(name.strip() != name or not name for name in names):
            raise ConfigError("--served-model-name is empty or has blanks at its ends; give the name itself")
        if len(set(names)) < len(names):
            raise ConfigError(f"--served-model-name names {', '.join(names)}: one of them twice; leave it out once")
        if self.uds is None:
            return
        if not self.uds:
            raise ConfigError("--uds is empty; name the path of a socket")
        defaults = {field.name: field.default for field in fields(Config)}
        for name in ("host", "port"):
            if getattr(self, name) != defaults[name]:
                raise ConfigError(f"--uds and --{name} are two places to listen at; leave one out")


def check_honoured(option: str, policy: str) -> None:
    """Raise ConfigError if that one of `POLICY_OPTIONS` has no effect under the policy."""
    able, flag = honouring(POLICY_OPTIONS[option]), f"--{option.replace('_', '-')}"
    if policy not in able:
        raise ConfigError(f"{flag} needs --policy {' or '.join(able)}; it has no effect under the policy {policy}")


def _check(setting: Field[Any], value: Any) -> None:
    """Raise ConfigError for a value outside the field's range, or none of its choices; NaN is in no range."""
    flag, choices, least, most = (setting.metadata.get(key) for key in ("flag", "choices", "least", "most"))
    if choices is not None and value not in choices and value is not None:
        raise ConfigError(f"{flag} is {value!r}; choose one of {', '.join(choices)}")
    if least is None or value is None:
        return
    if not isinstance(value, int | float):
        raise ConfigError(f"{flag} is {value!r}; it must be a number")
    if not value >= least:
        raise ConfigError(f"{flag} is {value}; it must be at least {least}")
    if most is not None and value > most:
        raise ConfigError(f"{flag} is {value:,}; it must be at most {most:,}")
