"""What the kernels reach of what the machine can do: linear layers, attention, and what invariance costs.

    python -m benchmarks.kernels [--models smollm2,1b,8b] [--threads 1,2] [--rows 1,4,16,32,128,256]
                                 [--dtype int8] [--parts limits,linear,walk,attention,int8_cache,invariance]
                                 [--repeats 30] [--seconds 1]

- `limits`: int8 operations a second in registers, and bytes a second that a loop reads from memory.
- `linear`: each shape of each model. "cache" repeats one matrix, which stays in the caches as far as it fits; "memory"
  walks copies of it, so that each is read from memory. Shares are of the instruction peak.
- `walk`: all linear layers of a step one after the other, the output projection with them; of a model too large for
  this machine some layers. At one row the share is of what a loop gets that only reads the same bytes with the same
  threads, in turns with it.
- `attention`: decoding rows over long contexts of K and V in int8, in memory; the share is of a loop that only reads
  as many bytes.
- `int8_cache`: the same with K and V in int8, in turns with float16; the ratio of their times, as for invariance.
- `invariance`: the same kernels with the constraint lifted: K split over threads (a matrix of as many bytes with twice
  the outputs and half of the inputs, or three times and a third; adding up the parts is not counted), and attention
  split by free cores (a row of a context as one row a thread of its share; merging not counted). In turns; the ratio is
  of the medians, with the range of the rounds' own.

Times are the best of the repeats, with the median beside them: on a busy machine only the best says what a kernel can.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.kernel_shapes import MODELS, Attender, Bytes, Layer, Shapes, aligned, mapped, pack
from everystop import _native

MIB = 1 << 20
WALK_BYTES = 256 * MIB  # far more than the caches between the cores and memory
MOST_WALK_BYTES = 1024 * MIB
ATTENTION = ((32, 1024), (8, 4096), (1, 8192))  # rows, context
INVARIANCE_CONTEXTS = (300, 1000, 4000)
ROUNDS = 9
READ_ROUNDS = 4
PARTS = ("limits", "linear", "walk", "attention", "int8_cache", "invariance")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def words(text: str) -> list[str]:
    return text.split(",")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["int8", "float32"], default="int8", help="of linear layers")
    parser.add_argument("--models", type=words, default=list(MODELS))
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--rows", type=numbers, default=[1, 4, 16, 32, 128, 256])
    parser.add_argument("--parts", type=words, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=1.0, help="most time for the repeats of one figure")
    parser.add_argument("--head-rows", type=int, default=32, help="most rows that the output projection computes")
    return parser.parse_args()


class Bench:
    """Measures with so many threads, and prints a line a figure."""

    def __init__(self, dtype: str, num_threads: int, repeats: int, seconds: float) -> None:
        self.dtype = dtype
        self.num_threads = num_threads
        self._repeats = repeats
        self._seconds = seconds
        tries = [_native.measure_peak(num_threads) / 1e9 for _ in range(3)] if dtype == "int8" else [0.0]
        self.peak = max(tries)  # GOP/s; 0: not known
        memory = aligned(np.ones(WALK_BYTES, dtype=np.uint8))
        self.bandwidth = memory.size / min(self.read([memory]))  # GB/s

    def times(self, measure: Callable[[int], list[int]]) -> list[int]:
        """Nanoseconds of repeats, as many as there is time for; `measure` takes their number."""
        once = measure(1)[0]
        return measure(max(3, min(self._repeats, int(self._seconds * 1e9 / once))))

    def linear(self, layers: list[Layer]) -> list[int]:
        """Walks over linear layers."""
        return self.times(lambda repeats: _native.measure_linear(self.dtype, layers, self.num_threads, repeats))

    def read(self, arrays: list[Bytes]) -> list[int]:
        """Walks that only read."""
        return self.times(lambda repeats: _native.measure_read(arrays, self.num_threads, repeats))

    def against_read(self, measure: Callable[[], list[int]], arrays: list[Bytes]) -> tuple[list[int], list[int]]:
        """Times of something and of reading these arrays, in turns."""
        times: list[int] = []
        reads: list[int] = []
        for _ in range(READ_ROUNDS):
            times += measure()
            reads += self.read(arrays)
        return times, reads

    def say(self, what: str, times: Sequence[int], *rest: str) -> None:
        print(
            f"{what:<34} {self.num_threads} threads  median {statistics.median(times) / 1e3:10.1f} µs  best "
            f"{min(times) / 1e3:10.1f} µs  {'  '.join(rest)}",
            flush=True,
        )

    def share_of_peak(self, layers: list[Layer], times: Sequence[int]) -> str:
        gops = sum(2 * m * n * k for _, n, k, m in layers) / min(times)
        share = f"{100 * gops / self.peak:5.1f} % of peak" if self.peak else "no peak"
        rate = sum(packed.size for packed, *_ in layers) / min(times)
        return f"{gops:7.1f} GOP/s  {share}  weights at {rate:5.1f} GB/s"


def show_limits(bench: Bench) -> None:
    print(f"limits of {bench.num_threads} threads: {bench.peak:.0f} GOP/s int8, {bench.bandwidth:.1f} GB/s read")


def show_linear(bench: Bench, shapes: Shapes, all_rows: Sequence[int]) -> None:
    for kind, (n, k) in shapes.linear.items():
        one = pack(bench.dtype, n, k)
        copies = [one, *(aligned(one) for _ in range(WALK_BYTES // one.size))]
        for m in all_rows:
            for where, matrices in (("cache", copies[:1]), ("memory", copies)):
                layers: list[Layer] = [(matrix, n, k, m) for matrix in matrices]
                times = bench.linear(layers)
                name = f"{shapes.name} {kind} {m} rows {where}"
                bench.say(name, times, bench.share_of_peak(layers, times))
        del copies
        gc.collect()


def walk_of(shapes: Shapes, dtype: str) -> tuple[list[tuple[Bytes, int, int]], Bytes, int]:
    """Matrices of some layers, those of the output projection, and how many layers these are."""
    kinds = [pack(dtype, *size) for size in shapes.linear.values()]
    num_layers = min(shapes.num_layers, MOST_WALK_BYTES // sum(matrix.size for matrix in kinds))
    *matrices, head = mapped([*kinds * num_layers, pack(dtype, *shapes.head)])
    sizes = list(shapes.linear.values()) * num_layers
    return [(matrix, *size) for matrix, size in zip(matrices, sizes, strict=True)], head, num_layers


def show_walk(bench: Bench, shapes: Shapes, all_rows: Sequence[int], head_rows: int) -> None:
    walked, head, num_layers = walk_of(shapes, bench.dtype)
    arrays = [*(matrix for matrix, _, _ in walked), head]
    for m in all_rows:
        layers: list[Layer] = [(matrix, n, k, m) for matrix, n, k in walked]
        layers.append((head, *shapes.head, min(m, head_rows)))
        times, rest = bench.linear(layers), []
        rest.append(bench.share_of_peak(layers, times))
        if m == 1:
            times, reads = bench.against_read(lambda: bench.linear(layers), arrays)  # noqa: B023
            rate = sum(array.size for array in arrays) / min(reads)
            rest.append(f"a loop reads {rate:5.1f} GB/s: {100 * min(reads) / min(times):5.1f} % of that")
        bench.say(f"{shapes.name} {num_layers} layers + head {m} rows", times, *rest)


def attender_of(bench: Bench, shapes: Shapes, num_rows: int, context: int, kv_cache_dtype: str) -> Attender:
    """As many layers as there is memory for in float16."""
    bytes_a_layer = 2 * num_rows * context * shapes.num_kv_heads * 2 * shapes.head_dim
    return Attender(
        shapes,
        num_layers=max(2, min(shapes.num_layers, MOST_WALK_BYTES // bytes_a_layer)),
        num_rows=num_rows,
        context=context,
        num_threads=bench.num_threads,
        kv_cache_dtype=kv_cache_dtype,
    )


def show_attention(bench: Bench, shapes: Shapes) -> None:
    for num_rows, context in ATTENTION:
        attender = attender_of(bench, shapes, num_rows, context, "int8")
        memory = aligned(np.ones(attender.num_bytes, dtype=np.uint8))
        times, reads = bench.against_read(lambda: bench.times(attender.times_ns), [memory])  # noqa: B023
        rate, loop_rate = attender.num_bytes / min(times), attender.num_bytes / min(reads)
        share = f"{attender.num_bytes / MIB:6.0f} MiB at {rate:5.1f} GB/s, {100 * rate / loop_rate:5.1f} % of a loop's"
        bench.say(f"{shapes.name} attention {num_rows} × {context}", times, share)


def show_int8_cache(bench: Bench, shapes: Shapes) -> None:
    for num_rows, context in ATTENTION:
        small, half = (attender_of(bench, shapes, num_rows, context, dtype) for dtype in ("int8", "float16"))
        pairs = in_turns(
            lambda row=small: bench.times(row.times_ns),
            lambda row=half: bench.times(row.times_ns),  # type: ignore[misc]
        )
        times = [[int(each) for each in column] for column in zip(*pairs, strict=True)]
        for name, attender, own in (("float16", half, times[1]), ("int8", small, times[0])):
            rate = f"{attender.num_bytes / MIB:6.0f} MiB at {attender.num_bytes / min(own):5.1f} GB/s"
            bench.say(f"{shapes.name} {name} {num_rows} × {context}", own, rate)
        middle, low, high = ratios_of(pairs)
        print(f"{shapes.name} int8 takes {middle:.2f} of the time of float16 ({low:.2f} to {high:.2f})", flush=True)


def in_turns(first: Callable[[], Sequence[int]], second: Callable[[], Sequence[int]]) -> list[tuple[float, float]]:
    """Median times of both in each of some rounds."""
    pairs = []
    for i in range(ROUNDS):
        if i % 2:
            of_second, of_first = statistics.median(second()), statistics.median(first())
        else:
            of_first, of_second = statistics.median(first()), statistics.median(second())
        pairs.append((of_first, of_second))
    return pairs


def ratios_of(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """First over second: the median of the rounds, and their range without the outermost ones."""
    ratios = sorted(first / second for first, second in pairs)
    return statistics.median(ratios), ratios[1], ratios[-2]


def cost_of_invariance(
    invariant: Callable[[], Sequence[int]], lifted: Callable[[], Sequence[int]]
) -> tuple[list[int], str]:
    """Median times of the first, and how much longer it takes than the second."""
    pairs = in_turns(invariant, lifted)
    cost, low, high = (100 * (ratio - 1) for ratio in ratios_of(pairs))
    return [int(bound) for bound, _ in pairs], f"cost of invariance {cost:+5.1f} % ({low:+.1f} to {high:+.1f})"


def show_invariance(bench: Bench, shapes: Shapes, all_rows: Sequence[int]) -> None:
    for kind, (n, k) in shapes.linear.items():
        split = 2 if k % 128 == 0 else 3
        one, other = pack(bench.dtype, n, k), pack(bench.dtype, split * n, k // split)
        num_copies = 1 + WALK_BYTES // one.size
        bound, free = (mapped([matrix] * num_copies) for matrix in (one, other))
        for m in all_rows:
            own: list[Layer] = [(matrix, n, k, m) for matrix in bound]
            lifted: list[Layer] = [(matrix, split * n, k // split, m) for matrix in free]
            times, text = cost_of_invariance(
                lambda own=own: bench.linear(own),
                lambda lifted=lifted: bench.linear(lifted),  # type: ignore[misc]
            )
            bench.say(f"{shapes.name} {kind} {m} rows, K in {split}", times, text)
        del bound, free
        gc.collect()
    for context in INVARIANCE_CONTEXTS:
        num_layers = 8
        threads = bench.num_threads
        one_row = Attender(shapes, num_layers=num_layers, num_rows=1, context=context, num_threads=threads)
        shared = Attender(
            shapes, num_layers=num_layers, num_rows=threads, context=context // threads, num_threads=threads
        )
        times, text = cost_of_invariance(
            lambda row=one_row: bench.times(row.times_ns), lambda row=shared: bench.times(row.times_ns)
        )  # type: ignore[misc]
        bench.say(f"{shapes.name} attention 1 × {context}", times, text)


def main() -> None:
    arguments = parse_arguments()
    parts = arguments.parts
    print(f"path {_native.isa()}, layout {_native.linear_layout(arguments.dtype)}, {time.strftime('%Y-%m-%d %H:%M')}")
    for num_threads in arguments.threads:
        bench = Bench(arguments.dtype, num_threads, arguments.repeats, arguments.seconds)
        if "limits" in parts:
            show_limits(bench)
        for shapes in (MODELS[name] for name in arguments.models):
            if "linear" in parts:
                show_linear(bench, shapes, arguments.rows)
            if "walk" in parts:
                show_walk(bench, shapes, arguments.rows, arguments.head_rows)
            if "attention" in parts:
                show_attention(bench, shapes)
            if "int8_cache" in parts:
                show_int8_cache(bench, shapes)
            if "invariance" in parts and num_threads > 1:
                show_invariance(bench, shapes, [m for m in arguments.rows if m <= 32])
            gc.collect()


if __name__ == "__main__":
    main()
