"""Makes the constants of `everystop.sim.gpus` again from NVIDIA's published kernel times; prints how far they are off.

    python -m benchmarks.fit_gpu_kernels --traces DIR

DIR holds `gpu_kernel_perf/` with files of aiconfigurator (github.com/ai-dynamo/aiconfigurator at 095f58a5, folder
aic-core/src/aiconfigurator_core/systems, Apache-2.0): for each GPU a YAML of its peaks, and Parquet files of products,
attention of prompts and of decodes, as vLLM runs them. Needs pyarrow, which the project itself does not. Ends with 1 if
a constant in the module is off by more than 1 % from what comes out.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernel_fit import Decodes, Errors, Prefills, Products, fit_decodes, fit_prefills, fit_products
from everystop.sim.gpus import BF16_BYTES, GPUS, Gpu

NAMES = ("h100", "h200", "a100")
NS_PER_MS = 1e6
LEAST_SIDE = 1_024  # of a product's matrix; layers of models from 1B on have no smaller one
HEAD_DIMS = (64, 128)
MAX_STEP_TOKENS = 16_384
MAX_ROWS = 512
Columns = dict[str, np.ndarray[Any, Any]]


def main(arguments: list[str]) -> int:
    """Fit every GPU, print constants and errors, and compare with the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit_gpu_kernels", description=__doc__)
    parser.add_argument("--traces", metavar="DIR", type=Path, required=True, help="folder with gpu_kernel_perf")
    folder = parser.parse_args(arguments).traces / "gpu_kernel_perf"
    is_same = True
    for name in NAMES:
        gpu, errors = fit_gpu(folder, name)
        print(describe(gpu))
        for kind, found in errors.items():
            print(f"    # {kind}: {found}")
        is_same &= is_near(gpu, GPUS[name])
    print("as in everystop.sim.gpus" if is_same else "not what everystop.sim.gpus holds")
    return 0 if is_same else 1


def fit_gpu(folder: Path, name: str) -> tuple[Gpu, dict[str, Errors]]:
    """The constants of one GPU, and the errors of its kinds of kernels."""
    gpu = read_peaks(folder / f"{name}_sxm.yaml", name)
    gpu, products = fit_products(gpu, read_products(read(folder, name, "gemm")))
    gpu, decodes = fit_decodes(gpu, read_decodes(read(folder, name, "attn_generation")))
    gpu, prefills = fit_prefills(gpu, read_prefills(read(folder, name, "attn_context")))
    return gpu, {"products": products, "attention of decodes": decodes, "attention of prompts": prefills}


def read_peaks(path: Path, name: str) -> Gpu:
    """A GPU of which only the peaks are known: the rest is 1."""
    text = path.read_text(encoding="utf-8")
    peaks = {key: float(value) for key, value in re.findall(r"^  (\w+): (\d+)", text, re.MULTILINE)}
    known: dict[str, Any] = {
        "name": name,
        "memory_bytes": peaks["mem_capacity"],
        "bytes_per_s": peaks["mem_bw"],
        "flops_per_s": peaks["bfloat16_tc_flops"],
    }
    return Gpu(**{field.name: 1.0 for field in fields(Gpu)} | known)


def read(folder: Path, name: str, kind: str) -> Columns:
    """The columns of the one file of that kind; raises SystemExit where pyarrow or the file is missing."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise SystemExit("reading Parquet needs pyarrow: pip install pyarrow") from None
    paths = sorted(folder.glob(f"{name}_sxm_*_{kind}.parquet"))
    if len(paths) != 1:
        raise SystemExit(f"{folder} holds {len(paths)} files {name}_sxm_*_{kind}.parquet; one is needed")
    table = parquet.read_table(paths[0])
    return {column: table[column].to_numpy() for column in table.column_names}


def read_products(columns: Columns) -> Products:
    """Products in bf16 of the sizes that layers have."""
    n, k = columns["n"], columns["k"]
    chosen = (columns["gemm_dtype"] == "bfloat16") & (n >= LEAST_SIDE) & (k >= LEAST_SIDE)
    chosen &= columns["m"] <= MAX_STEP_TOKENS
    return Products(*(pick(columns[name], chosen) for name in "mnk"), ns=times(columns, chosen))


def read_decodes(columns: Columns) -> Decodes:
    """Attention of one token of each of `batch_size` requests to `step` tokens before it and itself."""
    chosen = plain_attention(columns) & (columns["batch_size"] <= MAX_ROWS)
    kv_bytes = BF16_BYTES * 2 * columns["num_key_value_heads"] * columns["head_dim"]
    num_bytes = kv_bytes.astype(float) * columns["batch_size"] * (columns["step"] + 1)
    num_heads = columns["batch_size"] * columns["num_key_value_heads"]
    return Decodes(pick(num_bytes, chosen), pick(num_heads, chosen), times(columns, chosen))


def read_prefills(columns: Columns) -> Prefills:
    """Attention of `batch_size` whole prompts of `isl` tokens."""
    chosen = plain_attention(columns) & (columns["batch_size"] * columns["isl"] <= MAX_STEP_TOKENS)
    chosen &= columns["isl"] > 1
    batch, length = columns["batch_size"].astype(float), columns["isl"].astype(float)
    return Prefills(
        pairs=pick(batch * length * (length + 1) / 2, chosen),
        num_tokens=pick(batch * length, chosen),
        q_size=pick(columns["num_heads"] * columns["head_dim"], chosen),
        ns=times(columns, chosen),
    )


def plain_attention(columns: Columns) -> np.ndarray[Any, Any]:
    """Rows of full attention over bf16, with 8 to 64 query heads and two or more to a KV head, as in our shapes."""
    heads = columns["num_heads"]
    chosen = (columns["kv_cache_dtype"] == "bfloat16") & np.isin(columns["head_dim"], HEAD_DIMS)
    chosen &= (heads >= 8) & (heads <= 64) & (heads >= 2 * columns["num_key_value_heads"])
    if "window_size" in columns:
        chosen &= columns["window_size"] == 0
    return chosen


def times(columns: Columns, chosen: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Nanoseconds of the chosen rows."""
    return NS_PER_MS * pick(columns["latency"], chosen)


def pick(column: np.ndarray[Any, Any], chosen: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The chosen rows, as numbers that cannot overflow."""
    return column[chosen].astype(float)


def is_near(gpu: Gpu, other: Gpu) -> bool:
    """Each constant is within 1 %, which another machine's arithmetic may make of it."""
    pairs = [(getattr(gpu, field.name), getattr(other, field.name)) for field in fields(Gpu)]
    return all(math.isclose(a, b, rel_tol=0.01, abs_tol=0.001) for a, b in pairs if not isinstance(a, str))


def describe(gpu: Gpu) -> str:
    """The constants as they stand in the module."""
    lines = [f"    {field.name}={getattr(gpu, field.name)!r}," for field in fields(Gpu)]
    return "\n".join(["Gpu(", *lines, ")"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
