"""Who the tenants are: their keys, weights and limits, from the TOML file that `--tenants` names.

    header = "x-tenant"         # optional: where no key names the tenant, believe this header of a request
    user = true                 # optional: and then the field `user` of its body

    [tenant.gold]
    keys = ["sk-gold-1"]        # API keys that belong to this tenant, or their hashes (sha256:...)
    weight = 3                  # three times the service of a tenant with weight 1, which is the default
    max_running = 16            # requests at a time (default: no limit but --max-num-seqs)
    max_queued = 100            # requests that wait without a place to run; more are refused (default: no limit)
    token_rate = 500            # prompt tokens + 2 x output tokens a second (default: no limit)
    kv_share = 0.5              # of the blocks of the KV cache (default: no limit)
    ttft_ms = 500               # a first token is due so long after its request (default: --ttft-target-ms)
    itl_ms = 50                 # and a later one so long after the one before (default: --itl-target-ms)

A request that nothing assigns belongs to the tenant with the empty name, who has weight 1. What a policy does not
honour is refused, not ignored; keys, header and user are of use under each, for metrics and records.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

from everystop.core.durations import MAX_TARGET_MS, MIN_TARGET_MS
from everystop.core.errors import ConfigError
from everystop.keys import KeyHash, NamedKey, hashed

MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
MIN_RATE, MAX_RATE = 0.001, 1e9
SHARE_SETTINGS = ("weight", "max_running", "max_queued", "token_rate", "kv_share")
TARGET_SETTINGS = ("ttft_ms", "itl_ms")
SETTINGS = (*SHARE_SETTINGS, *TARGET_SETTINGS)
OTHERS = "other"  # stands for all whom the file does not name, where tenants are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant of the file."""

    weight: float = 1.0
    max_running: int | None = None
    max_queued: int | None = None
    token_rate: float | None = None
    kv_share: float | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    keys: tuple[KeyHash, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", hashed(self.keys, "keys"))


SECRET_HEADERS = ("authorization", "proxy-authorization", "cookie", "x-api-key", "api-key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenants:
    """The whole file; `header` is in lower case. By default nobody is told apart."""

    by_name: Mapping[str, Tenant] = field(default_factory=dict)
    header: str | None = None
    user: bool = False


def read_tenants(path: str | None, honoured: Collection[str] = SETTINGS) -> Tenants:
    """What the file says; raises ConfigError that names the file, the line's key and the value. None means no file.

    `honoured` are those of `SETTINGS` that have an effect; a file with another one is refused.
    """
    if path is None:
        return Tenants()
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"--tenants {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--tenants {path} is not TOML: {error}") from error
    _check_names(f"--tenants {path}", table, ("header", "user", "tenant"))
    header, user, entries = table.get("header"), table.get("user", False), table.get("tenant", {})
    is_header = header is None or (isinstance(header, str) and re.fullmatch(r"[A-Za-z0-9-]+", header))
    _require(is_header, path, "header", header, "the name of an HTTP header")
    is_open = header is None or header.lower() not in SECRET_HEADERS
    _require(
        is_open, path, "header", header, "a header that holds no secret: what it says is shown as the tenant's name"
    )
    _require(isinstance(user, bool), path, "user", user, "true or false")
    _require(isinstance(entries, dict), path, "tenant", entries, "a table for each tenant, such as [tenant.gold]")
    by_name = {name: _read_tenant(path, name, entry, honoured) for name, entry in entries.items()}
    _require(OTHERS not in by_name, path, "tenant", OTHERS, "another name: in metrics this one means all others")
    _check_keys(f"--tenants {path}", by_name)
    return Tenants(by_name=by_name, header=header.lower() if header else None, user=user)


def _read_tenant(path: str, name: str, entry: Any, honoured: Collection[str]) -> Tenant:
    where = f"tenant.{name}"
    _require(isinstance(entry, dict), path, where, entry, "a table")
    _check_names(f"--tenants {path}: {where}", entry, (*SETTINGS, "keys"))
    for key in entry:
        if key != "keys" and key not in honoured:
            known = ", ".join(honoured) or "keys"
            raise ConfigError(f"--tenants {path}: {where}.{key} has no effect under this --policy, only {known}")
    keys = entry.get("keys", [])
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):  # the value is a secret
        raise ConfigError(f"--tenants {path}: {where}.keys must be a list of texts without blanks at their ends")
    read = _Entry(path, where, entry)
    return Tenant(
        weight=read.number("weight", MIN_WEIGHT, MAX_WEIGHT) or 1.0,
        max_running=read.whole("max_running", 1),
        max_queued=read.whole("max_queued", 0),
        token_rate=read.number("token_rate", MIN_RATE, MAX_RATE),
        kv_share=read.number("kv_share", 0.001, 1),
        ttft_ms=read.number("ttft_ms", MIN_TARGET_MS, MAX_TARGET_MS),
        itl_ms=read.number("itl_ms", MIN_TARGET_MS, MAX_TARGET_MS),
        keys=hashed(keys, f"--tenants {path}: {where}.keys"),
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    """The table of one tenant; its numbers are checked as they are read, and None where it has none."""

    path: str
    where: str
    table: Mapping[str, Any]

    def number(self, key: str, least: float, most: float) -> float | None:
        value = self.table.get(key)
        is_number = value is None or (type(value) in (int, float) and isfinite(value) and least <= value <= most)
        _require(is_number, self.path, f"{self.where}.{key}", value, f"a number from {least:g} to {most:g}")
        return None if value is None else float(value)

    def whole(self, key: str, least: int) -> int | None:
        value = self.table.get(key)
        is_whole = value is None or (type(value) is int and value >= least)
        _require(is_whole, self.path, f"{self.where}.{key}", value, f"a whole number from {least}")
        return None if value is None else int(value)


def _check_keys(source: str, by_name: Mapping[str, Tenant]) -> None:
    owner: dict[KeyHash, str] = {}
    for name, tenant in by_name.items():
        for key in tenant.keys:
            if owner.setdefault(key, name) != name:
                raise ConfigError(f"{source}: the tenants {owner[key]} and {name} share a key; give each its own")


def with_keys(tenants: Tenants, named_keys: Iterable[NamedKey], path: str) -> Tenants:
    """The tenants with the keys of a file of keys added; a name that only that file has is a tenant by its name alone.

    Lines without a name are passed over. Raises ConfigError where two tenants would share a key.
    """
    by_name = dict(tenants.by_name)
    for line in named_keys:
        if line.name == OTHERS:
            raise ConfigError(f"--api-key-file {path}: the tenant {OTHERS!r} means all others in metrics; rename it")
        if line.name:
            tenant = by_name.get(line.name, Tenant())
            by_name[line.name] = replace(tenant, keys=(*tenant.keys, line.key))
    _check_keys(f"--api-key-file {path}", by_name)
    return replace(tenants, by_name=by_name)


def _check_names(where: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in table:
        if name not in known:
            raise ConfigError(f"{where} sets {name!r}, which means nothing there; known are {', '.join(known)}")


def _require(holds: object, path: str, name: str, value: object, must: str) -> None:
    if not holds:
        raise ConfigError(f"--tenants {path}: {name} is {value!r}; it must be {must}")
