"""Who the tenants are: their keys, weights and limits, from the TOML file that `--tenants` names.

    header = "x-tenant"         # optional: where no key names the tenant, believe this header of a request
    user = true                 # optional: and then the field `user` of its body

    [tenant.gold]
    weight = 3                  # three times the service of a tenant with weight 1, which is the default
    max_running = 16            # requests at a time (default: no limit but --max-num-seqs)
    ttft_ms = 500               # a first token is due so long after its request (default: --ttft-target-ms)
    itl_ms = 50                 # and a later one so long after the one before (default: --itl-target-ms)
    keys = ["sk-gold-1"]        # API keys that belong to this tenant

Weights and limits are for the policy fair, targets for the policy deadline; each refuses what is for the other.

A request that nothing assigns belongs to the tenant with the empty name, who has weight 1.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from everystop.core.errors import ConfigError

MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
MIN_TARGET_MS, MAX_TARGET_MS = 1.0, 3_600_000.0
USED_BY = {"weight": "fair", "max_running": "fair", "ttft_ms": "deadline", "itl_ms": "deadline"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant of the file."""

    weight: float = 1.0
    max_running: int | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenants:
    """The whole file; `header` is in lower case. By default nobody is told apart."""

    by_name: Mapping[str, Tenant] = field(default_factory=dict)
    header: str | None = None
    user: bool = False


def read_tenants(path: str | None) -> Tenants:
    """What the file says; raises ConfigError that names the file, the line's key and the value. None means no file."""
    if path is None:
        return Tenants()
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--tenants {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--tenants {path} is not TOML: {error}") from error
    _check_names(f"--tenants {path}", table, ("header", "user", "tenant"))
    header, user, entries = table.get("header"), table.get("user", False), table.get("tenant", {})
    is_header = header is None or (isinstance(header, str) and re.fullmatch(r"[A-Za-z0-9-]+", header))
    _require(is_header, path, "header", header, "the name of an HTTP header")
    _require(isinstance(user, bool), path, "user", user, "true or false")
    _require(isinstance(entries, dict), path, "tenant", entries, "a table for each tenant, such as [tenant.gold]")
    by_name = {name: _read_tenant(path, name, entry) for name, entry in entries.items()}
    _check_keys(path, by_name)
    return Tenants(by_name=by_name, header=header.lower() if header else None, user=user)


def _read_tenant(path: str, name: str, entry: Any) -> Tenant:
    where = f"tenant.{name}"
    _require(isinstance(entry, dict), path, where, entry, "a table")
    _check_names(f"--tenants {path}: {where}", entry, (*USED_BY, "keys"))
    weight, limit, keys = entry.get("weight", 1), entry.get("max_running"), entry.get("keys", [])
    is_weight = type(weight) in (int, float) and isfinite(weight) and MIN_WEIGHT <= weight <= MAX_WEIGHT
    _require(is_weight, path, f"{where}.weight", weight, f"a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
    is_limit = limit is None or (type(limit) is int and limit >= 1)
    _require(is_limit, path, f"{where}.max_running", limit, "a whole number from 1")
    targets = {target: _read_target(path, where, target, entry.get(target)) for target in ("ttft_ms", "itl_ms")}
    is_list = isinstance(keys, list) and all(isinstance(key, str) and key and key == key.strip() for key in keys)
    if not is_list:  # the value is a secret
        raise ConfigError(f"--tenants {path}: {where}.keys must be a list of texts without blanks at their ends")
    return Tenant(weight=float(weight), max_running=limit, keys=tuple(keys), **targets)


def _read_target(path: str, where: str, name: str, value: Any) -> float | None:
    is_target = type(value) in (int, float) and MIN_TARGET_MS <= value <= MAX_TARGET_MS
    must = f"a number of milliseconds from {MIN_TARGET_MS:g} to {MAX_TARGET_MS:g}"
    _require(value is None or is_target, path, f"{where}.{name}", value, must)
    return None if value is None else float(value)


def check_use(tenants: Tenants, path: str | None, policy: str) -> None:
    """Raise ConfigError for a setting, other than its default, that this policy would not look at."""
    default = Tenant()
    for name, tenant in tenants.by_name.items():
        for setting, user in USED_BY.items():
            if user != policy and getattr(tenant, setting) != getattr(default, setting):
                raise ConfigError(
                    f"--tenants {path}: tenant.{name}.{setting} needs --policy {user}; the policy {policy} has no use "
                    "for it"
                )


def _check_keys(path: str, by_name: Mapping[str, Tenant]) -> None:
    owner: dict[str, str] = {}
    for name, tenant in by_name.items():
        for key in tenant.keys:
            if owner.setdefault(key, name) != name:
                raise ConfigError(
                    f"--tenants {path}: the tenants {owner[key]} and {name} share a key; give each its own"
                )


def _check_names(where: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in table:
        if name not in known:
            raise ConfigError(f"{where} sets {name!r}, which means nothing there; known are {', '.join(known)}")


def _require(holds: object, path: str, name: str, value: object, must: str) -> None:
    if not holds:
        raise ConfigError(f"--tenants {path}: {name} is {value!r}; it must be {must}")
