"""Prints a workload as a file that `everystop compare --workload` and `benchmarks.loadgen` read.

python -m benchmarks.workloads straggler > straggler.jsonl
"""

from __future__ import annotations

import argparse
import sys

from everystop.sim.workloads import DEFAULT_SEED, MAKERS, make_workload


def main() -> None:
    """Print a workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=MAKERS)
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    arguments = parser.parse_args()
    for line in make_workload(arguments.name, arguments.seed).lines():
        sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
