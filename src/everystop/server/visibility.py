"""Who may see which requests: one place decides for explanations, waits, the live page and the prefix cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from starlette.types import Scope

from everystop.core.errors import ConfigError
from everystop.keys import KeyHash, hashed
from everystop.observe.history import Client, History
from everystop.observe.wording import number_name
from everystop.tenants import Tenants


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose key came with a request: the `tenant` that it names ("" for none), the `owner` of what is sent with it,
    and whether its holder `sees_all`.
    """

    tenant: str
    owner: str
    sees_all: bool


ANYBODY = Caller("", "", sees_all=True)  # where no keys are set


def callers(
    api_keys: Iterable[KeyHash | str], admin_keys: Iterable[KeyHash | str], tenants: Tenants
) -> Mapping[KeyHash, Caller]:
    """Who calls, by key. A tenant's keys are one owner, any other key is an owner of its own.

    Raises ConfigError for a key that stands for two.
    """
    by_key = {key: Caller("", _owner_of(key), sees_all=False) for key in hashed(api_keys, "--api-key")}
    for name, tenant in tenants.by_name.items():
        if any(key in by_key for key in tenant.keys):
            raise ConfigError(f"a key of the tenant {name} is given without a tenant, too; give it one place")
        by_key |= dict.fromkeys(tenant.keys, Caller(name, f"tenant:{name}", sees_all=False))
    administrators = hashed(admin_keys, "--admin-key")
    if any(key in by_key for key in administrators):
        raise ConfigError("a key of --admin-key is among --api-key or the tenants' keys too; give it one place")
    return by_key | dict.fromkeys(administrators, Caller("", "admin", sees_all=True))


def _owner_of(key: KeyHash) -> str:
    """A stable name for the holder of a key, which does not give the key or its hash away."""
    return "key:" + hashlib.sha256(b"owner:" + key.digest).hexdigest()[:16]


def salt_of(caller: Caller, tenant: str, cache_salt: str) -> str:
    """What the prefix cache is salted with: with keys, each owner and each tenant has a cache of its own, and in it one
    for each `cache_salt` that a request brings. So no time to a first token tells what others have asked.

    Lengths keep the parts apart: owner "a" with salt "b" is not owner "ab".
    """
    if caller is ANYBODY:
        return cache_salt
    return f"{len(caller.owner)}:{caller.owner};{len(tenant)}:{tenant};{cache_salt}"


class Viewer:
    """What one caller may see of a history: all, or what was sent with the same tenant's keys or the same key."""

    def __init__(self, history: History, caller: Caller = ANYBODY) -> None:
        self._history = history
        self._caller = caller

    @property
    def owner(self) -> str:
        """Whose key it is."""
        return self._caller.owner

    @property
    def sees_all(self) -> bool:
        """Nothing is hidden."""
        return self._caller.sees_all

    def sees(self, client: Client | None) -> bool:
        """Whether that HTTP request may be shown."""
        return self._caller.sees_all or (client is not None and client.owner == self._caller.owner)

    def name_of(self, request_id: int) -> str | None:
        """The id of the answer that a sequence belongs to; None for one that is to be called "another request". Any
        thread may ask: who sent a request never changes.
        """
        trail = self._history.trails.get(request_id)
        client = None if trail is None else trail.client
        if not self.sees(client):
            return None
        return number_name(request_id) if client is None else client.name

    def find(self, name: str) -> Client | None:
        """The request of that name, by `History.clients_called`, as if there were none but those that may be shown."""
        return next((client for client in self._history.clients_called(name) if self.sees(client)), None)


def caller_of(scope: Scope) -> Caller:
    """Who sent a request that has passed the guard."""
    caller: Caller = scope.get("caller", ANYBODY)
    return caller
