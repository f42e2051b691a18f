"""What does it cost to score a prompt? The same prompt, computed in the same chunks, with and without.

    python -m benchmarks.prompt_scores --repeats 9

The embedded model's runner computes one prompt after the other, the kinds in turn; what is compared is the processor
time of all threads, each kind as a ratio to the plain prompt of the same round.
"""

from __future__ import annotations

import argparse
import statistics
import time

from everystop.core.plan import Admitted, PromptLogits, StepPlan
from everystop.core.request import SamplingParams
from everystop.core.rows import Row
from everystop.model.checkpoint import inspect_model
from everystop.model.home import Home
from everystop.model.pull import resolve_model
from everystop.model.weights import load_model
from everystop.runner.native import NativeRunner

KINDS = (None, 0, 1, 5, 20)
BLOCK_SIZE = 32


def compute(runner: NativeRunner, num_tokens: int, chunk: int, num_top: int | None) -> float:
    """Processor seconds of one prompt of that many tokens, with its first token sampled."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=num_top)
    ids = tuple(100 + 37 * i % 40_000 for i in range(num_tokens))
    blocks = tuple(range(num_tokens // BLOCK_SIZE + 1))
    began = time.process_time()
    for start in range(0, num_tokens, chunk):
        num = min(chunk, num_tokens - start)
        is_last = start + num == num_tokens
        runner.execute(
            StepPlan(
                0,
                [Row(1, start, num, 0, num - is_last)],
                [] if start else [Admitted(1, ids, num_tokens, params, 0, (), blocks, 0, "")],
                prompt_logits=[] if num_top is None else [PromptLogits(1, start, num - is_last)],
            )
        )
    took = time.process_time() - began
    runner.execute(StepPlan(0, released=[1]))
    return took


def main() -> None:
    """Measure the kinds in turn, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, metavar="N")
    parser.add_argument("--tokens", type=int, default=1024, metavar="N", help="of the prompt")
    parser.add_argument("--chunk", type=int, default=256, metavar="N", help="tokens in a step")
    parser.add_argument("--dtype", default="int8", choices=("int8", "float32"))
    arguments = parser.parse_args()
    home = Home.from_environment()
    model = load_model(inspect_model(resolve_model("smollm2", home)), dtype=arguments.dtype, num_threads=2, home=home)
    runner = NativeRunner(
        model,
        num_blocks=arguments.tokens // BLOCK_SIZE + 1,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=arguments.chunk,
        max_num_seqs=64,
        num_threads=2,
    )
    compute(runner, arguments.tokens, arguments.chunk, 1)
    rounds = [
        {kind: compute(runner, arguments.tokens, arguments.chunk, kind) for kind in KINDS}
        for _ in range(arguments.repeats)
    ]
    for kind in KINDS:
        times = sorted(each[kind] / each[None] for each in rounds)
        seconds = statistics.median(each[kind] for each in rounds)
        name = "not scored" if kind is None else f"prompt_logprobs {kind}"
        print(f"{name:>20}: {seconds:6.3f} s, times {statistics.median(times):.3f} ({times[0]:.3f}–{times[-1]:.3f})")


if __name__ == "__main__":
    main()
