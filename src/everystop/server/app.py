"""`serve`: takes the port before anything else is even imported, then hands over to the parts that load and serve."""

from __future__ import annotations

import contextlib
import logging
import os
import socket

from everystop.config import Config
from everystop.core.errors import EverystopError
from everystop.server.listener import listen, listen_at_path, url_of


def serve(config: Config) -> int:
    """Serve until a signal; returns the exit code.

    The port or the path is taken first, then headers and shapes are checked; the weights load while `/health` already
    answers 503. Raises ConfigError and ModelError for what cannot be served.
    """
    with listening(config) as sock:
        code, is_loading = _serve_on(sock, config)
    if is_loading:
        os._exit(code)
    return code


def listening(config: Config) -> contextlib.AbstractContextManager[socket.socket]:
    """The socket that the configuration asks for; raises ConfigError."""
    return listen(config.host, config.port) if config.uds is None else listen_at_path(config.uds)


def _serve_on(sock: socket.socket, config: Config) -> tuple[int, bool]:
    """The exit code, and whether a thread is left that nothing but the end of the process ends."""
    from everystop.server.logs import Log
    from everystop.server.opening import Opening, is_loading, run

    log = Log(config.log_format, config.log_level)
    try:
        url = url_of(sock, config.host, scheme="http" if config.ssl_certfile is None else "https")
        return run(Opening(config, url), sock, log), is_loading()
    except EverystopError as error:
        if config.log_format == "json":  # beside the plain sentence of the command line
            log.say(str(error), {"error": type(error).__name__}, level=logging.ERROR)
        raise
    finally:
        log.close()
