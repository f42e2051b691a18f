"""Where a server is that a command asks: its URL, read once for all commands, and how its certificate is checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from everystop.core.errors import ConfigError

if TYPE_CHECKING:
    import ssl

EXAMPLE_URL = "http://127.0.0.1:8000"
PORTS = {"http": 80, "https": 443}
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUrl:
    """`SCHEME://NETLOC PREFIX`: a request goes to `host` and `port`, and asks for `prefix` + path."""

    scheme: str
    netloc: str
    host: str
    port: int
    prefix: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Without a scheme it is http; `/v1` at its end, which OpenAI's clients want, is left out. Raises ConfigError.

        `http://host/models/v1` is asked for `/models/v1/completions`.
        """
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            host, port = parts.hostname or "", parts.port
        except ValueError:  # the port is no number up to 65,535, or the brackets of an IPv6 address do not match
            host, port = "", None
        is_plain = text.isascii() and text.isprintable() and " " not in text
        if not host or port == 0 or not is_plain or parts.scheme not in PORTS or parts.query or parts.fragment:
            shown = "" if "@" in text else f" is {text!r}; it"
            raise ConfigError(f"--url{shown} must be like {EXAMPLE_URL}, with a port up to 65,535")
        if "@" in parts.netloc:
            raise ConfigError("--url holds a user's name; a server takes a key alone: leave it out, and use --api-key")
        prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(scheme=parts.scheme, netloc=parts.netloc, host=host, port=port or PORTS[parts.scheme], prefix=prefix)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}{self.prefix}"

    def check_load(self, *, allow_remote: bool) -> None:
        """Raise ConfigError if load for this server would go to another machine, unless that is allowed."""
        if self.host not in LOOPBACK and not allow_remote:
            raise ConfigError(f"--url {self} is not this machine; say --allow-remote if it is yours to load")

    def tls(self, ca_file: str | None = None) -> ssl.SSLContext | None:
        """What checks the server's certificate, by the authorities of a PEM file or those of the system; None without
        TLS. Raises ConfigError.
        """
        if self.scheme != "https":
            if ca_file is not None:
                raise ConfigError(
                    f"--ca-file is for servers with certificates, and {self} is no https URL; leave one out"
                )
            return None
        import ssl

        try:
            return ssl.create_default_context(cafile=ca_file)
        except OSError as error:
            reason = "it is no PEM file" if isinstance(error, ssl.SSLError) else error.strerror
            raise ConfigError(f"--ca-file {ca_file} cannot be used: {reason}") from error

    def distrust(self, error: ssl.SSLCertVerificationError) -> str:
        """What to do about a certificate that is not trusted."""
        return f"the certificate of {self} is not trusted ({error.verify_message}); name its file with --ca-file"
