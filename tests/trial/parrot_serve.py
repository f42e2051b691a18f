"""`serve` over a runner without a model: steps of two milliseconds, and room for answers of thousands of tokens."""

from __future__ import annotations

import argparse
import sys

from tests.server.parrot import ParrotServer


def main() -> int:
    """Serve until a signal; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", choices=["0"])
    parser.add_argument("--stats-interval", choices=["0"])
    _, unknown = parser.parse_known_args()
    if unknown:
        print("no such option", file=sys.stderr)
        return 2
    server = ParrotServer(
        on_ready=lambda model: print(f"Serving on http://127.0.0.1:{server.port}", flush=True),
        max_model_len=4096,
        num_blocks=1024,
    )
    server.runner.step_s = 0.002
    return server.run_here()


if __name__ == "__main__":
    sys.exit(main())
