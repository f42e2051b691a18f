"""Compiles every Triton kernel for NVIDIA's GPUs with none present, and writes what each takes to docs/gpu-kernels.md.

    python -m tools.gpu_kernels                     # all capabilities; writes the page
    python -m tools.gpu_kernels --check             # compiles; exits with 1 on a spill, or where shared memory is short
    python -m tools.gpu_kernels --check --only 9.0

The launches are the project's own: its functions run on tensors without memory, and each launch of a kernel is noted
instead of made, with the types and the divisibility that Triton would have specialised it for.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "0"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as Triton has it up to 3.9

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from everystop.runner.torch.batch import AttentionBatch, LogitEdits, SamplingBatch
from everystop.runner.torch.kernels import activation, attention, fp8, linear, norm, rope, sampling

PAGE = Path(__file__).resolve().parent.parent / "docs" / "gpu-kernels.md"
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
}  # fmt: skip
# Shared memory that one block of threads may have, in KiB (CUDA C++ Programming Guide, technical specifications).
SHARED_KIB = {"8.0": 163, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}
GPUS = {
    "8.0": "A100",
    "8.9": "L4, L40S, RTX 40",
    "9.0": "H100, H200",
    "10.0": "B200",
    "12.0": "RTX 50, RTX PRO Blackwell",
}
tensor = partial(torch.empty, device="meta", dtype=torch.bfloat16)


@dataclass(frozen=True)
class Launch:
    """A kernel as Triton would compile it for one launch."""

    title: str
    kernel: JITFunction[Any]
    signature: dict[str, str]
    constants: dict[tuple[int], Any]
    attributes: dict[tuple[int], list[list[Any]]]
    options: dict[str, Any]

    def is_for(self, capability: str) -> bool:
        """Whether GPUs of a capability have the kernel's numbers: e4m3 came with 8.9."""
        return capability != "8.0" or not any("fp8" in kind for kind in self.signature.values())

    def compile(self, capability: str) -> Any:
        """The compiled kernel; from Triton's cache where that has it."""
        target = GPUTarget("cuda", int(capability.replace(".", "")), 32)
        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        return triton.compile(source, target=target, options=self.options)


@dataclass(frozen=True)
class Usage:
    """What a kernel takes: registers a thread, stores to its stack, bytes of shared memory a block, warps a block."""

    registers: int
    spills: int
    shared: int
    warps: int

    def complaint(self, capability: str) -> str:
        """Why the kernel is not fit for GPUs of a capability; empty where it is."""
        if self.spills:
            return f"{self.registers} registers, and {self.spills} stores to the stack"
        if self.shared > SHARED_KIB[capability] * 1024:
            return f"{self.shared / 1024:.0f} KiB of shared memory; a block may have {SHARED_KIB[capability]}"
        return ""


@contextmanager
def noted(title: str) -> Iterator[list[Launch]]:
    """The launches made inside, which are then not made."""
    launches: list[Launch] = []

    def note(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(_launch(title, kernel, args, kwargs))

    with patch.object(JITFunction, "run", note):
        yield launches


def _launch(title: str, kernel: JITFunction[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """How Triton specialises a launch: numbers that are 1 are constants, multiples of 16 are known to be."""
    names = [param.name for param in kernel.params]
    values = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, param in enumerate(kernel.params):
        value = values[param.name]
        is_special = not param.do_not_specialize and not isinstance(value, float)
        if param.is_constexpr or (is_special and isinstance(value, int) and value == 1):
            signature[param.name] = "constexpr"
            constants[(index,)] = value
            continue
        signature[param.name] = _type_of(value)
        if is_special and (value.data_ptr() if isinstance(value, torch.Tensor) else value) % 16 == 0:
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in kwargs.items() if name not in names}
    name = kernel.__name__.strip("_")
    return Launch(f"{name}: {title}" if title else name, kernel, signature, constants, attributes, options)


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def usage_of(compiled: Any) -> Usage:
    """Read from the machine code, by NVIDIA's tools, which come with Triton."""
    cubin = Path(os.environ.get("TMPDIR", "/tmp")) / f"everystop-{os.getpid()}.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    try:
        found = re.search(r"REG:(\d+)", _read("cuobjdump", "-res-usage", cubin))
        spills = len(re.findall(r"\bSTL\b", _read("nvdisasm", "-c", cubin)))
    finally:
        cubin.unlink()
    assert found, "cuobjdump names no registers"
    return Usage(int(found[1]), spills, compiled.metadata.shared, compiled.metadata.num_warps)


def _read(tool: str, option: str, cubin: Path) -> str:
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([program, option, cubin], capture_output=True, text=True, check=True).stdout


# ------------------------------------------------------------------------------------------- what is launched, and how


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that kernels are compiled for."""

    hidden: int
    inter: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    has_norm: bool = False


MODELS = {
    "SmolLM2 135M": Shape(576, 1536, 9, 3, 64, 49152),
    "Llama 8B": Shape(4096, 14336, 32, 8, 128, 128256),
}
HEADS = {"80": Shape(2560, 0, 32, 32, 80, 0), "96": Shape(3072, 0, 24, 8, 96, 0), "256": Shape(2560, 0, 8, 4, 256, 0)}
CONTEXT, BLOCK_SIZE = 8192, 32


def launches_of_all() -> list[Launch]:
    """Every kernel as it is launched for the models here, and attention for the other sizes of heads; none twice."""
    launches: list[Launch] = []
    for name, shape in MODELS.items():
        launches += _attention_launches(name, shape) + _row_launches(name, shape) + _sample_launches(name, shape)
    for size, shape in HEADS.items():
        launches += _attention_launches(f"heads of {size}", shape)
    return launches


def _collect(title: str, call: Callable[[], object]) -> list[Launch]:
    with noted(title) as launches:
        call()
    return launches


def _attention_launches(name: str, shape: Shape) -> list[Launch]:
    steps = {"decode, few": (4, 1), "decode": (256, 1), "prompts": (8, 512)}
    cache = tensor(1000, 2, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    launches = []
    for title, (num_seqs, query_len) in steps.items():
        query = tensor(num_seqs * query_len, shape.heads + 2 * shape.kv_heads, shape.head_dim)[:, : shape.heads]
        batch = AttentionBatch(
            tensor(num_seqs, CONTEXT // BLOCK_SIZE, dtype=torch.int32),
            tensor(num_seqs + 1, dtype=torch.int32),
            tensor(num_seqs, dtype=torch.int32),
            query_len,
            CONTEXT,
        )
        attend = partial(attention.paged_attention, query, cache[:, 0], cache[:, 1], batch, shape.head_dim**-0.5)
        launches += _collect(f"{name}, {title}", attend)
        if query_len == 1:
            attend = partial(attend, deterministic=True)
            launches += _collect(f"{name}, {title}, deterministic", attend)[:1]
        elif shape.head_dim == 128:
            launches += _collect(f"{name}, {title}, window and cap", partial(attend, window=4096, soft_cap=50.0))
    return launches


def _row_launches(name: str, shape: Shape) -> list[Launch]:
    rows = 64
    x, gate_up = tensor(rows, shape.hidden), tensor(rows, 2 * shape.inter)
    qkv = tensor(rows, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    q, k, v = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    ids = tensor(rows, dtype=torch.int64)
    table = tensor(CONTEXT, shape.head_dim, dtype=torch.float32)
    cache = tensor(1000, 2, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    turn = partial(rope.rope_write, q, k, v, ids, ids, table, cache[:, 0], cache[:, 1])
    norms = {"query_norm": tensor(shape.head_dim), "key_norm": tensor(shape.head_dim), "eps": 1e-6}
    weight = tensor(shape.hidden)
    weight8 = tensor(shape.hidden, shape.inter, dtype=torch.float8_e4m3fn)
    return [
        *_collect(name, turn),
        *_collect(f"{name}, heads normed", partial(turn, **norms)),
        *_collect(name, partial(norm.rms_norm, x, weight, 1e-5)),
        *_collect(f"{name}, with residual", partial(norm.add_rms_norm, x, x, weight, 1e-5)),
        *_collect(name, partial(activation.silu_mul, gate_up)),
        *_collect(f"{name}, o", partial(linear.linear, x, tensor(shape.hidden, shape.hidden))),
        *_collect(
            f"{name}, down", partial(linear.linear, tensor(rows, shape.inter), tensor(shape.hidden, shape.inter))
        ),
        *_collect(
            f"{name}, down",
            partial(fp8.linear_fp8, tensor(rows, shape.inter), weight8, tensor(shape.hidden, dtype=torch.float32)),
        ),
        *_collect(f"{name}, logits", partial(linear.linear, x, tensor(shape.vocab, shape.hidden), tensor(shape.vocab))),
    ]


def _sample_launches(name: str, shape: Shape) -> list[Launch]:
    rows = 64
    logits = tensor(rows, shape.vocab, dtype=torch.float32)
    ids = tensor(300, dtype=torch.int64)

    def run(*, changed: bool, greedy: bool) -> None:
        batch = SamplingBatch(
            **{
                field: tensor(rows, dtype=torch.float32)
                for field in ("temperatures", "repetition_penalties", "presence_penalties", "frequency_penalties")
            },
            **{field: tensor(rows, dtype=torch.int32) for field in ("top_ks", "choices")},
            **{field: tensor(rows, dtype=torch.float64) for field in ("top_ps", "min_ps")},
            **{field: tensor(rows, dtype=torch.int64) for field in ("seeds", "positions", "seats")},
            output_counts=tensor(rows, shape.vocab, dtype=torch.int32) if changed else None,
            is_in_prompt=tensor(rows, shape.vocab, dtype=torch.bool) if changed else None,
            allowed=tensor(rows, -(-shape.vocab // 32), dtype=torch.int32) if changed else None,
            edits=LogitEdits(ids, ids, tensor(300, dtype=torch.float32)) if changed else None,
            is_greedy=greedy,
            has_cuts=changed,
        )
        sampling.sample(logits, batch)

    changed = _collect(f"{name}, all settings", partial(run, changed=True, greedy=False))
    greedy = _collect(f"{name}, greedy", partial(run, changed=False, greedy=True))
    return changed[1:] + _collect(f"{name}, temperature", partial(run, changed=False, greedy=False)) + greedy[1:]


# ------------------------------------------------------------------------------------------------------------- the page

INTRODUCTION = """\
# GPU kernels

What each Triton kernel takes, compiled ahead of time without a GPU by `python -m tools.gpu_kernels` (Triton {version}):
registers a thread and KiB of shared memory a block, for each compute capability; empty where a GPU lacks the numbers of
the kernel. None may spill, or ask for more shared memory than there is: `tests/runner/torch/kernels` holds it.

Shapes are those of SmolLM2 135M (9 query heads on 3 KV heads of 64) and of Llama 8B (32 on 8 of 128), bf16, blocks of
32 tokens; attention also for heads of 80 (one query head a KV head), 96 (three) and 256 (two).

| capability | GPUs | shared memory a block |
| --- | --- | --- |
{gpus}
"""


def page(usages: dict[str, dict[str, Usage]]) -> str:
    """The page, from the usage by kernel and capability."""
    gpus = "\n".join(f"| {name} | {gpu} | {SHARED_KIB[name]} KiB |" for name, gpu in GPUS.items())
    names = list(SHARED_KIB)
    lines = [INTRODUCTION.format(version=triton.__version__, gpus=gpus)]
    lines.append("| kernel | warps | " + " | ".join(names) + " |")
    lines.append("| --- | --- |" + " --- |" * len(names))
    for title, found in usages.items():
        cells = [f"{found[name].registers}, {found[name].shared / 1024:.1f}" if name in found else "" for name in names]
        lines.append(f"| {title} | {next(iter(found.values())).warps} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Compile, complain, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compile and complain, write nothing")
    parser.add_argument("--only", choices=SHARED_KIB, help="one compute capability")
    parser.add_argument("--kernels", default="", help="only those whose title contains this")
    options = parser.parse_args(arguments)
    capabilities = [options.only] if options.only else list(SHARED_KIB)
    usages: dict[str, dict[str, Usage]] = {}
    complaints = 0
    for launch in launches_of_all():
        if launch.title in usages or options.kernels not in launch.title:
            continue
        usages[launch.title] = {name: usage_of(launch.compile(name)) for name in capabilities if launch.is_for(name)}
        for name, usage in usages[launch.title].items():
            if complaint := usage.complaint(name):
                complaints += 1
                print(f"{launch.title} for {name}: {complaint}", file=sys.stderr)
    print(f"{len(usages)} kernels compiled for {', '.join(capabilities)}; {complaints} unfit")
    if not options.check:
        PAGE.write_text(page(usages), encoding="utf-8")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
