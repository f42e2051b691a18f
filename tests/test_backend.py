"""Which device computes, in which dtype, and what is refused there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from everystop.backend import DTYPES as DEVICE_DTYPES
from everystop.backend import Backend, choose_backend
from everystop.config import Config
from everystop.config.setting import DEVICES, DTYPES
from everystop.core.errors import ConfigError


def choose(config: Config, folder: Path, *, has_torch: bool = True) -> Backend:
    return choose_backend(config, has_torch=lambda: has_torch, is_for_cuda=lambda: has_torch, devices=folder)


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    """A folder of devices, with a GPU in it."""
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    return tmp_path


def test_a_gpu_is_found_where_there_is_one_and_pytorch(gpu: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    none = tmp_path_factory.mktemp("dev")
    assert choose(Config(), gpu) == Backend("cuda", "bfloat16", is_deterministic=False)
    assert choose(Config(), none) == Backend("cpu", "int8", is_deterministic=True)
    assert choose(Config(), gpu, has_torch=False) == Backend("cpu", "int8", is_deterministic=True)
    assert choose(Config(device="cpu"), gpu) == Backend("cpu", "int8", is_deterministic=True)
    assert choose(Config(kv_cache_dtype="int8"), none) == Backend("cpu", "int8", is_deterministic=True)


@pytest.mark.parametrize(
    ("version", "device"),
    [("cuda: Optional[str] = '12.8'\n", "cuda"), ('cuda = "13.0"\n', "cuda"), ("cuda: Optional[str] = None\n", "cpu")],
)
def test_a_pytorch_without_cuda_finds_no_gpu(
    gpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, device: str
) -> None:
    """A machine with a GPU may have the build for CPUs, which the tests want."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it is not to be loaded')")
    (package / "version.py").write_text(f"__version__ = '2.13.0'\n{version}hip: Optional[str] = None\n")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert choose_backend(Config(), devices=gpu).device == device


def test_each_device_has_a_dtype_of_its_own(gpu: Path) -> None:
    assert choose(Config(device="torch"), gpu).dtype == "float32"
    assert choose(Config(device="cuda", dtype="fp8"), gpu).dtype == "fp8"
    assert set(DEVICE_DTYPES) == set(DEVICES) - {"auto"}
    assert {dtype for dtypes in DEVICE_DTYPES.values() for dtype in dtypes} == set(DTYPES) - {"auto"}


def test_only_the_cpu_is_deterministic_without_being_asked(gpu: Path) -> None:
    assert choose(Config(device="cpu"), gpu).is_deterministic
    for device in ("cuda", "torch"):
        assert not choose(Config(device=device), gpu).is_deterministic
        assert choose(Config(device=device, deterministic=True), gpu).is_deterministic


def test_only_a_gpu_is_planned_one_step_ahead() -> None:
    assert [Backend(device, "float32", is_deterministic=True).depth for device in ("cpu", "torch", "cuda")] == [0, 0, 1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "cpu", "dtype": "bfloat16"}, ["--dtype bfloat16", "--device cpu", "int8, float32"]),
        ({"device": "cuda", "dtype": "int8"}, ["--dtype int8", "--device cuda", "bfloat16, float16"]),
        ({"device": "torch", "dtype": "int8"}, ["--dtype int8", "--device torch"]),
        ({"device": "cpu", "cuda_graphs": "off"}, ["--cuda-graphs has no effect", "--device cpu"]),
        ({"device": "torch", "gpu_memory_utilization": 0.5}, ["--gpu-memory-utilization has no effect"]),
        ({"device": "cuda", "kv_cache_dtype": "int8"}, ["--kv-cache-dtype int8", "--device cuda", "--device cpu"]),
        ({"device": "torch", "kv_cache_dtype": "float16"}, ["--kv-cache-dtype float16", "--device torch"]),
        ({"device": "cuda", "threads": 2}, ["--threads has no effect", "--device cuda"]),
        (
            {"device": "cuda", "kv_cache_memory": 1 << 30, "gpu_memory_utilization": 0.5},
            ["--kv-cache-memory and --gpu-memory-utilization"],
        ),
    ],
)
def test_what_a_device_cannot_honour_is_refused(gpu: Path, settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(Config(**settings), gpu)
    assert [word for word in words if word not in str(caught.value)] == []


def test_device_that_was_found_is_named_where_a_setting_has_no_effect(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--device cpu, which was found"):
        choose(Config(cuda_graphs="lazy"), tmp_path)


@pytest.mark.parametrize("device", ["cuda", "torch"])
def test_missing_pytorch_is_told_with_what_to_install(tmp_path: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=rf"--device {device} needs PyTorch.*everystop\[cuda\]"):
        choose(Config(device=device), tmp_path, has_torch=False)


def test_pytorch_without_a_gpu_is_told(gpu: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.fail("this test wants a machine without a GPU")
    from everystop.runner.torch.opening import open_device

    with pytest.raises(ConfigError, match=r"--device cuda: PyTorch .* --device cpu"):
        open_device("cuda", "bfloat16", 1)
