"""From a configuration to a served model: checks, loads, builds, and says on one screen what it is."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import hashlib
import logging
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from everystop import __version__
from everystop.assembly import (
    Capacity,
    build_engine,
    check_record,
    kernel_name,
    kernels_of,
    known_capacity,
    kv_cache_dtype,
    load_weights,
    longest_sequence,
)
from everystop.backend import CPU, choose_backend
from everystop.config import Config
from everystop.core.policy import make_policy
from everystop.core.request import SamplingParams
from everystop.keys import exposure
from everystop.model.chat_template import load_chat_template
from everystop.model.checkpoint import inspect_model
from everystop.model.generation_config import load_generation_defaults
from everystop.model.home import Home
from everystop.model.messages import PLAIN, ChatOptions
from everystop.model.pull import EMBEDDED, resolve_model
from everystop.model.tokenizer_files import load_tokenizer
from everystop.scheduling import tenants_of
from everystop.server.crash_file import CrashFiles
from everystop.server.credentials import certificate_of, read_keys
from everystop.server.listener import is_loopback
from everystop.server.logs import Log, install
from everystop.server.protocol import Accepted
from everystop.server.queue import QueueLimits
from everystop.server.service import Service
from everystop.server.state import EngineLimits, ServedModel
from everystop.server.tenant_queue import TenantLimits
from everystop.server.tracing import tracing
from everystop.tenants import Tenants

if TYPE_CHECKING:
    from everystop.assembly import Loaded

MIB = 1 << 20


def run(opening: Opening, sock: socket.socket, log: Log) -> int:
    """Serve what `opening` loads on a listening socket; returns the exit code."""
    config = opening.config
    install(log)
    with contextlib.suppress(OSError, ValueError):  # standard error is closed
        faulthandler.enable()
    for warning in opening.warnings(is_loopback(sock)):
        log.say(f"warning: {warning}", level=logging.WARNING)
    service = Service(
        sock,
        opening.load,
        config,
        api_keys=opening.api_keys,
        admin_keys=config.admin_key,
        tenants=opening.tenants,
        tls=opening.tls,
        crash_files=opening.crash_files(),
        open_traces=opening.open_traces,
        on_ready=lambda model: _show(opening, log),
        say=log.say,
        log_request=log.say if config.log_requests else None,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(service.run())


def _show(opening: Opening, log: Log) -> None:
    """What is served: a screen for people, or one line of a log for machines."""
    if opening.config.log_format == "json":
        log.say("serving", {"url": opening.url, "model": opening.names[0], "version": __version__})
    else:
        print(opening.screen(), flush=True)


def is_loading() -> bool:
    """A signal came while native code was loading in a thread that cannot be interrupted."""
    return any(thread.name == "everystop-load" for thread in threading.enumerate())


class Opening:
    """A checked model, and what it takes to load it, to be served at `url`; the constructor raises what is wrong with
    flags and files.
    """

    def __init__(self, config: Config, url: str = "") -> None:
        self.config = config
        self.url = url
        self.tls = certificate_of(config)
        self._keys = read_keys(config, tenants_of(config))
        self.api_keys, self.tenants = self._keys.of_nobody, self._keys.tenants
        check_record(config)
        self._home = Home.from_environment()
        path = resolve_model(config.model, self._home)
        self._checkpoint = inspect_model(path)
        self._check_capacity()
        self._tokenizer = load_tokenizer(self._checkpoint, self._home)
        override = Path(config.chat_template) if config.chat_template else None
        self._template = load_chat_template(self._checkpoint, self._tokenizer, override)
        self._defaults = load_generation_defaults(self._checkpoint, config.generation_config)
        own_name = path.resolve().name if path.is_dir() else path.stem
        self.names = config.served_model_name or (config.model if config.model in EMBEDDED else own_name,)
        self.open_traces = tracing(config.otlp_traces_endpoint, self.names[0])
        self._lines: list[tuple[str, str]] = []

    def _check_capacity(self) -> None:
        """Refuse what headers tell to be too much; elsewhere than on the CPU only what needs no PyTorch, which takes
        seconds to load.
        """
        config, spec = self.config, self._checkpoint.spec
        backend = choose_backend(config)
        if backend.device == CPU:
            known_capacity(config, spec, backend)
        else:
            longest_sequence(config, spec)

    def warnings(self, is_loopback: bool) -> list[str]:
        """What an operator should know of who can reach what; `is_loopback` says that only this machine can."""
        config = self.config
        exposures = [exposure(path) for path in (config.api_key_file, config.tenants, config.ssl_keyfile) if path]
        found = [text for text in exposures if text is not None]
        if not self._keys.are_needed and not is_loopback:
            found.append(
                f"other machines can reach {self.url}, and no keys are set, so anybody may use it; set --api-key-file "
                "or --api-key, or listen on --host 127.0.0.1"
            )
        return found

    def load(self) -> ServedModel:
        """Read the weights and build the engine; called in a thread."""
        config, tokenizer = self.config, self._tokenizer
        loaded = load_weights(config, self._checkpoint, self._home)
        num_valid_tokens = min(tokenizer.num_ids, loaded.spec.vocab_size)
        engine, capacity, recorder = build_engine(
            config,
            loaded,
            eos_token_ids=tokenizer.eos_ids,
            num_valid_tokens=num_valid_tokens,
            make_text_decoder=tokenizer.text_decoder,
        )
        self._lines = self._describe(loaded, capacity)
        defaults: dict[str, Any] = self._defaults.values()
        policy = make_policy(config.policy)
        return ServedModel(
            engine=engine,
            texts=tokenizer,
            accepted=Accepted(
                self.names,
                num_valid_tokens,
                capacity.max_model_len,
                SamplingParams(**defaults),
                has_priorities=policy.has_priorities,
                has_targets=policy.has_targets,
                names_tenants=self.tenants.user,
                gives_metrics=config.enable_per_request_metrics,
            ),
            encode=tokenizer.encode,
            encode_chat=self.encode_chat,
            limits=EngineLimits(
                policy=config.policy,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                block_size=capacity.block_size,
            ),
            num_blocks=capacity.num_blocks,
            queue=QueueLimits(config.max_num_queued_reqs, config.max_num_queued_tokens, tenant_limits(self.tenants)),
            fingerprint=fingerprint(
                __version__, loaded.digest, loaded.dtype, kv_cache_dtype(config, loaded), kernel_name(loaded)
            ),
            tenant_names=tuple(self.tenants.by_name),
            recorder=recorder,
            is_chat_slow=lambda: self._template.is_slow,
        )

    def _describe(self, loaded: Loaded, capacity: Capacity) -> list[tuple[str, str]]:
        config, tokenizer = self.config, self._tokenizer
        num_blocks, length = capacity.num_blocks, capacity.max_model_len
        blocks = f"{num_blocks:,} blocks of {capacity.block_size} tokens in {kv_cache_dtype(config, loaded)}, "
        blocks += f"{capacity.num_bytes / MIB:,.0f} MiB"
        per_seq = max(1, num_blocks // config.max_num_seqs) * capacity.block_size
        return [
            (
                "model",
                f"{', '.join(self.names)} ({self._checkpoint.path.name}), {loaded.num_bytes / MIB:,.0f} MiB of weights",
            ),
            ("arithmetic", f"{loaded.dtype}, {kernels_of(config, loaded)}"),
            ("KV cache", f"{blocks}: {capacity.num_longest_requests:,} requests of {length:,} tokens at once,"),
            ("", f"or {min(config.max_num_seqs, num_blocks)} (--max-num-seqs) of {min(length, per_seq):,}"),
            ("policy", f"{config.policy}, {config.max_num_batched_tokens} tokens{_target_text(config)} a step"),
            ("sampling", self._sampling_text()),
            ("chat", f"template from {self._template.origin}" if self._template.is_present else "no template"),
            ("ends at", ", ".join(f"{tokenizer.token_text(i)} ({i})" for i in tokenizer.eos_ids) or "no token"),
            *(("note", note) for note in loaded.notes),
        ]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = PLAIN) -> list[int]:
        """Token ids of a conversation; raises RequestError, also for what the template refuses."""
        self._template.check_variables(options.variables)
        rendered = self._template.render(
            messages,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            variables=options.variables,
        )
        return self._tokenizer.encode_rendered(rendered, add_special=options.add_special_tokens)

    def crash_files(self) -> CrashFiles:
        """Where crash files go, and what they say of the settings."""
        config = self.config
        return CrashFiles(self._home.crash_folder(config.crash_dir), config.max_crash_files, config.shown())

    def screen(self) -> str:
        """What is served, how, and where."""
        lines = [f"Everystop {__version__}", *(f"  {name:<11}{text}" for name, text in self._lines)]
        is_web = self.url.startswith("http")
        hint = f" (try {self.url}/v1/chat/completions, watch {self.url}/ui)" if is_web else ""
        return "\n".join([*lines, f"Serving on {self.url}{hint}"])

    def _sampling_text(self) -> str:
        values = self._defaults.values()
        if not values:
            return "temperature 1, top_p 1 where a request is silent"
        named = ", ".join(f"{name} {value:g}" for name, value in values.items())
        return f"{named} where a request is silent (from {Path(self._defaults.source).name})"


def fingerprint(*parts: str) -> str:
    """A name for what determines an answer; the same parts give the same name, on any day and machine."""
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def tenant_limits(tenants: Tenants) -> dict[str, TenantLimits]:
    """What the edge must know of the tenants whose waiting requests are limited."""
    return {
        name: TenantLimits(one.max_queued, one.max_running)
        for name, one in tenants.by_name.items()
        if one.max_queued is not None
    }


def _target_text(config: Config) -> str:
    return "" if config.target_itl_ms is None else f" and {config.target_itl_ms:g} ms"
