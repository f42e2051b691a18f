"""Time of the linear kernels on SmolLM2-135M's shapes, and of all linear layers of one step.

    python benchmarks/kernels.py [--dtype int8] [--threads 1,2] [--rows 1,4,16,32,128,256] [--repeats 50]

One shape is measured again and again, so its weights come from the cache if they fit; a step walks 30 layers of
their own weights and the output projection, so its weights come from memory as in a real step. Medians, with the
fastest run beside them: on a busy machine only the fastest says what the kernel can do.
"""

import argparse
import mmap
import statistics
import tempfile

import numpy as np
import numpy.typing as npt

from everystop import _native

NUM_LAYERS = 30
SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
HEAD = (49152, 576)

Bytes = npt.NDArray[np.uint8]
Layer = tuple[Bytes, int, int, int]  # packed weights, outputs, inputs, rows


def parse_counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["int8", "float32"], default="int8")
    parser.add_argument("--threads", type=parse_counts, default=[1, 2])
    parser.add_argument("--rows", type=parse_counts, default=[1, 4, 16, 32, 128, 256])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--head-rows", type=int, default=32, help="most rows that the output projection computes")
    return parser.parse_args()


def place(layers: list[Bytes]) -> list[Bytes]:
    """Puts packed layers into one mapped file, from which a server reads them too."""
    with tempfile.TemporaryFile() as file:
        for layer in layers:
            file.write(layer.data)
        file.flush()
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    placed, start = [], 0
    for layer in layers:
        placed.append(mapped[start : start + layer.size])
        start += layer.size
    return placed


def pack_model(dtype: str) -> tuple[list[dict[str, Bytes]], Bytes]:
    rng = np.random.default_rng(0)
    kinds = [_native.pack_linear(dtype, rng.standard_normal(shape, dtype=np.float32), 1) for shape in SHAPES.values()]
    head = _native.pack_linear(dtype, rng.standard_normal(HEAD, dtype=np.float32), 1)
    placed = place([*kinds * NUM_LAYERS, head])
    layers = [dict(zip(SHAPES, placed[4 * i : 4 * i + 4], strict=True)) for i in range(NUM_LAYERS)]
    return layers, placed[-1]


def num_operations(layers: list[Layer]) -> int:
    return sum(2 * m * n * k for _, n, k, m in layers)


def report(name: str, layers: list[Layer], dtype: str, num_threads: int, repeats: int, peak: float) -> None:
    durations = _native.measure_linear(dtype, layers, num_threads, repeats)
    median, best = statistics.median(durations), min(durations)
    gops = num_operations(layers) / best
    share = f"{100 * gops / peak:5.1f} %" if peak else "      -"
    rate = sum(packed.size for packed, *_ in layers) / best
    print(
        f"{name:>10} {num_threads:3d} threads {layers[0][3]:4d} rows  median {median / 1e3:10.1f} µs  best"
        f" {best / 1e3:10.1f} µs  at best {gops:7.1f} GOP/s  {share} of peak  weights at {rate:6.1f} GB/s"
    )


def main() -> None:
    arguments = parse_arguments()
    dtype = arguments.dtype
    layers, head = pack_model(dtype)
    print(f"path {_native.isa()}, layout {_native.linear_layout(dtype)}")
    for num_threads in arguments.threads:
        peak = _native.measure_peak(num_threads) / 1e9 if dtype == "int8" else 0.0
        if peak:
            print(f"peak of the dot instructions, {num_threads} threads: {peak:.0f} GOP/s")
        for m in arguments.rows:
            for kind, (n, k) in SHAPES.items():
                report(kind, [(layers[0][kind], n, k, m)], dtype, num_threads, 4 * arguments.repeats, peak)
            step = [(layer[kind], n, k, m) for layer in layers for kind, (n, k) in SHAPES.items()]
            report("30 layers", step, dtype, num_threads, arguments.repeats, peak)
            output: Layer = (head, *HEAD, min(m, arguments.head_rows))
            report("step", [*step, output], dtype, num_threads, arguments.repeats, peak)


if __name__ == "__main__":
    main()
