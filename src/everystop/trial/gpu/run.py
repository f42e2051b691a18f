"""The parts of the benchmark in their order, and its table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from everystop.runner.torch.device import Device
from everystop.runner.torch.kernel_set import KernelSet
from everystop.runner.torch.opening import choose_kernels, open_device
from everystop.trial.gpu.clock import Budget, Say
from everystop.trial.gpu.correctness import check
from everystop.trial.gpu.device_limits import copy_bandwidth, matrix_rate
from everystop.trial.gpu.models import random_model
from everystop.trial.gpu.serving import chat_jobs, serve, serve_by_transformers
from everystop.trial.gpu.step_times import BLOCK_SIZE, DecodeTime, measure_decode, measure_prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large everything is; `seconds` says about how long a part on a model takes. What matters most comes first,
    for the last may be left out: the largest of `models`. Correctness is that of `checked`.
    """

    dtype: str
    models: tuple[str, ...]
    checked: str
    rows: tuple[int, ...]
    context: int
    prompts: tuple[int, int]
    num_jobs: tuple[int, ...]
    job_scale: int
    copied_bytes: int
    matrix_size: int
    graphs: str
    seconds: float


GPU = Scale(
    dtype="bfloat16",
    models=("8B", "1B"),
    checked="1B",
    rows=(1, 8, 64, 256),
    context=1024,
    prompts=(8, 1024),
    num_jobs=(64, 256),
    job_scale=8,
    copied_bytes=4 << 30,
    matrix_size=8192,
    graphs="lazy",
    seconds=25.0,
)
CPU = Scale(
    dtype="float32",
    models=("tiny",),
    checked="tiny",
    rows=(1, 4),
    context=40,
    prompts=(2, 30),
    num_jobs=(6,),
    job_scale=1,
    copied_bytes=1 << 20,
    matrix_size=128,
    graphs="off",
    seconds=1.0,
)


def run(
    device_name: str, limit_s: float, say: Say, *, num_threads: int = 1, path: Path | None = None
) -> dict[str, Any]:
    """Measure all that fits into `limit_s`; what does not, or fails, is named among the notes. With `path`, what there
    is so far stands there as JSON after each part.
    """
    scale = GPU if device_name == "cuda" else CPU
    device = open_device(device_name, scale.dtype, num_threads)
    kernels, invariant = (choose_kernels(device, deterministic=d) for d in (False, True))
    budget = Budget(limit_s, say, lambda: None if path is None else write(budget.results, path))
    budget.results["notes"] = budget.notes
    budget.results["device"] = {"name": device.name, "torch": torch.__version__, "kernels": kernels.name}
    limits = budget.run("limits", scale.seconds / 5, lambda: _limits(device, scale))
    budget.run(
        "correctness",
        scale.seconds,
        lambda: check(scale.checked, device, kernels, invariant, graphs=scale.graphs),
    )
    if limits is not None:
        for name in scale.models:
            _measure_model(name, scale, device, kernels, invariant, limits, budget)
    return budget.results


def _limits(device: Device, scale: Scale) -> dict[str, float]:
    dtype = torch.bfloat16 if scale.dtype == "bfloat16" else torch.float32
    return {
        "bytes_per_s": copy_bandwidth(device, scale.copied_bytes),
        "flops_per_s": matrix_rate(device, scale.matrix_size, dtype),
    }


def _measure_model(
    name: str,
    scale: Scale,
    device: Device,
    kernels: KernelSet,
    invariant: KernelSet,
    limits: dict[str, float],
    budget: Budget,
) -> None:
    model = budget.run(
        f"{name}: weights", scale.seconds, lambda: _Quiet(random_model(name, scale.dtype, device, kernels))
    )
    budget.results.pop(f"{name}: weights")
    if model is None:
        return
    bandwidth, context = limits["bytes_per_s"], scale.context

    def decode(of: Any, rows: int, graphs: str) -> Callable[[], DecodeTime]:
        return lambda: measure_decode(of, rows, context, bandwidth, graphs=graphs)

    for rows in scale.rows:
        budget.run(f"{name}: decode, {rows} rows", scale.seconds, decode(model.of, rows, scale.graphs))
    budget.run(
        f"{name}: prefill",
        scale.seconds,
        lambda: measure_prefill(model.of, *scale.prompts, limits["flops_per_s"]),
    )
    if scale.graphs != "off":
        budget.run(f"{name}: decode, 8 rows, eager", scale.seconds, decode(model.of, 8, "off"))
    determined = model.with_kernels(invariant)
    for rows in scale.rows[-2:]:
        budget.run(f"{name}: decode, {rows} rows, deterministic", scale.seconds, decode(determined, rows, scale.graphs))
    for num in scale.num_jobs:
        _measure_serving(name, num, scale, model.of, budget)


def _measure_serving(name: str, num: int, scale: Scale, model: Any, budget: Budget) -> None:
    jobs = chat_jobs(num, scale.job_scale)
    seats = min(num, 256)
    longest = max(job.num_prompt_tokens + job.num_output_tokens for job in jobs)
    blocks = seats * -(-(longest + 1) // BLOCK_SIZE)
    for policy in ("continuous", "static"):
        budget.run(
            f"{name}: chat, {num} requests, {policy}",
            scale.seconds,
            lambda policy=policy: serve(  # type: ignore[misc]
                model,
                jobs,
                policy=policy,
                max_num_seqs=max(1, seats // 2),
                max_num_batched_tokens=max(seats, 2048),
                num_blocks=blocks,
                graphs=scale.graphs,
                depth=1,
            ),
        )
    if scale.graphs != "off" and name == "8B":
        budget.run(
            f"{name}: chat, {num} requests, transformers",
            2 * scale.seconds,
            lambda: serve_by_transformers(model.spec, jobs, "cuda"),
        )


class _Quiet:
    """A model on its way through `Budget`, which says what comes out."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def with_kernels(self, kernels: KernelSet) -> Any:
        """The same weights under other kernels."""
        return replace(self.of, kernels=kernels)

    def __repr__(self) -> str:
        return f"{self.of.num_bytes / 1e9:.2f} GB"


def table(results: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    device = results["device"]
    lines = [
        f"{device['name']}, PyTorch {device['torch']}, {device['kernels']} kernels",
        "",
        "| what | figures |",
        "|---|---|",
    ]
    for name, result in results.items():
        if name not in ("device", "notes"):
            lines.append(f"| {name} | {'not measured' if result is None else _figures(result)} |")
    return "\n".join([*lines, "", *results["notes"]])


def _figures(result: Any) -> str:
    values = _plain(result)
    if isinstance(result, DecodeTime):
        values["floor_share"] = result.floor_share
        values["busy_share"] = result.device_ms / result.step_ms
    return ", ".join(f"{key} {_number(value)}" for key, value in values.items())


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _plain(result: Any) -> Any:
    return asdict(result) if is_dataclass(result) and not isinstance(result, type) else dict(result)


def write(results: dict[str, Any], path: Path) -> None:
    """The figures as JSON."""
    plain = {
        name: result if result is None or isinstance(result, Sequence) else _plain(result)
        for name, result in results.items()
        if not isinstance(result, _Quiet)
    }
    path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
