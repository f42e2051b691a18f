"""`serve`: takes the port before anything else is even imported, then hands over to the parts that load and serve."""

from __future__ import annotations

from everystop.config import Config
from everystop.server.listener import listen


def serve(config: Config) -> int:
    """Serve until a signal; returns the exit code.

    The port is taken first, then headers and shapes are checked; the weights load while `/health` already answers 503.
    Raises ConfigError and ModelError for what cannot be served.
    """
    with listen(config.host, config.port) as sock:
        from everystop.server.opening import Opening, run

        return run(Opening(config, sock.getsockname()[1]), sock)
