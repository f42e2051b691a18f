"""A server of the real HTTP side and engine over a runner that sleeps instead of computing, as a process of its own.

    python -m benchmarks.parrot_server parrot --port 0

It knows only the flags that `benchmarks.overload` gives; its model and its runner are those of the tests.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from tests.server.parrot import parrot

from benchmarks.local_server import MARK

STEP_S = 0.005


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, choices=[0], default=0)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-num-queued-reqs", type=int, default=1024)
    arguments = parser.parse_args(argv)
    limits = {"max_num_seqs": arguments.max_num_seqs, "max_num_queued_reqs": arguments.max_num_queued_reqs}
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    with parrot(num_blocks=4096, **limits) as server:
        server.runner.step_s = STEP_S
        print(f"{MARK}http://127.0.0.1:{server.port}", flush=True)
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
    return 0


if __name__ == "__main__":
    sys.exit(main())
