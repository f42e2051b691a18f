"""Tells a supervisor that speaks systemd's protocol how the server stands; does nothing under any other.

The protocol is a datagram of lines such as READY=1 to the socket that NOTIFY_SOCKET names; see sd_notify(3).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

SEND_S = 0.5


class Supervisor:
    """Whoever started this process, if it wants to know; `tell` may be called from any thread and never raises."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def tell(self, *lines: str) -> None:
        """Send states, such as "READY=1"."""
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(SEND_S)
            sock.sendto("\n".join(lines).encode(), self._address)
