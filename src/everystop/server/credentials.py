"""By what a server knows its clients, and they it: keys, tenants, and the certificate, as the configuration names them.

Everything is read once, before a model is; nothing here is changed or watched.
"""

from __future__ import annotations

from dataclasses import dataclass

from everystop.config import Config
from everystop.core.errors import ConfigError
from everystop.keys import KeyHash, read_key_file
from everystop.server.tls import Certificate
from everystop.tenants import Tenants, with_keys


@dataclass(frozen=True, slots=True)
class Keys:
    """`of_nobody` are the clients' keys that name no tenant; the others are with the tenants."""

    of_nobody: tuple[KeyHash, ...]
    of_admins: tuple[KeyHash, ...]
    tenants: Tenants

    @property
    def num_client_keys(self) -> int:
        """Keys that clients may send, but those of admins."""
        return len(self.of_nobody) + sum(len(tenant.keys) for tenant in self.tenants.by_name.values())

    @property
    def are_needed(self) -> bool:
        """Some key must be sent, as one is set."""
        return bool(self.num_client_keys or self.of_admins)


def read_keys(config: Config, tenants: Tenants) -> Keys:
    """The keys of flags and of the file of keys, beside those of the `tenants`; raises ConfigError for a file that
    cannot be used, and for what has no effect with keys.
    """
    path = config.api_key_file
    named_keys = () if path is None else read_key_file(path)
    of_nobody = (*config.api_key, *(line.key for line in named_keys if not line.name))
    keys = Keys(of_nobody, config.admin_key, with_keys(tenants, named_keys, path or ""))
    if keys.are_needed and config.allowed_host:
        raise ConfigError("--allowed-host has no effect where keys are set, for a key opens all; leave it out")
    return keys


def certificate_of(config: Config) -> Certificate | None:
    """What to open TLS with, None for HTTP; raises ConfigError for files that cannot be used."""
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    return Certificate(config.ssl_certfile, config.ssl_keyfile)
