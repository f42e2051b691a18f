"""Makes the constants of `everystop.sim.gpus` again from NVIDIA's published kernel times; prints how far they are off.

    python -m benchmarks.fit_gpu_kernels --traces DIR

DIR holds `gpu_kernel_perf/` with files of aiconfigurator (github.com/ai-dynamo/aiconfigurator at 095f58a5, folder
aic-core/src/aiconfigurator_core/systems, Apache-2.0): for each GPU a YAML of its peaks, and Parquet files of products,
attention of prompts and of decodes, as vLLM runs them. Needs pyarrow, which the project itself does not. Ends with 1 if
a constant in the module is not what comes out.
"""

from __future__ import annotations

import argparse
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
MAX_TOKENS = 16_384


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
        is_same &= gpu == GPUS.get(name)
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


def read(folder: Path, name: str, kind: str) -> dict[str, np.ndarray[Any, Any]]:
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


def describe(gpu: Gpu) -> str:
    """The constants as they stand in the module."""
    lines = [f"    {field.name}={getattr(gpu, field.name)!r}," for field in fields(Gpu)]
    return "\n".join(["Gpu(", *lines, ")"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
