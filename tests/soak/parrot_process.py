"""A server in a process of its own over a runner without a model, with far too few blocks."""

from __future__ import annotations

import argparse
import sys

from tests.server.parrot import ParrotServer

from everystop.observe import history
from everystop.tenants import read_tenants

history.RECENT_STEPS = 1_000  # fills in seconds, after which memory has no reason to grow


def main() -> int:
    """Serve until a signal; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=["smollm2"])
    parser.add_argument("--port", choices=["0"])
    parser.add_argument("--tenants")
    parser.add_argument("--admin-key")
    arguments = parser.parse_args()
    server = ParrotServer(
        num_blocks=70,
        max_num_seqs=8,
        tenants=read_tenants(arguments.tenants),
        admin_keys=[arguments.admin_key],
        explain_history=100,
        on_ready=lambda model: print(f"Serving on http://127.0.0.1:{server.port}", flush=True),
    )
    server.runner.step_s = 0.001
    server._run()
    return server.exit_code or 0


if __name__ == "__main__":
    sys.exit(main())
