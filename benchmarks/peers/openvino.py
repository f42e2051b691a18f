"""OpenVINO GenAI's continuous batching in a process with the smallest HTTP front, int8 weights by optimum-intel."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path

from benchmarks.peers.environment import make_environment, package_version, run
from benchmarks.peers.peer import NUM_THREADS, Crowd, Launch, Place, Say, Setting
from benchmarks.peers.weights import write_hf

RUNTIME = ("openvino-genai==2026.4.1.0", "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0", "tokenizers>=0.22")
CONVERTER = (
    "optimum-intel[nncf,openvino]==2.2.0",
    "openvino==2026.4.1",
    "openvino-tokenizers==2026.4.1.0",
    "torch==2.13.0",
)
UNWANTED = ("torchvision",)  # comes in a build for another torch, and cannot be imported beside this one
BUDGETS, PRECISIONS, KV_KINDS = (256, 1024, 2048), ("f32", "bf16"), ("u8", "f16")
KV_GB = 3
FRONT = Path(__file__).with_name("openvino_front.py")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}


class OpenVino:
    """The package has no server: `openvino_front.py` is one, and says how much of its time it took."""

    name = "openvino"
    title = "OpenVINO GenAI"
    is_swept = True
    settings = tuple(
        Setting(f"{budget} {precision} KV {kv}", {"budget": budget, "precision": precision, "kv": kv})
        for budget, precision, kv in product(BUDGETS, PRECISIONS, KV_KINDS)
    )
    remarks = (
        "OpenVINO GenAI has no server of its own: it runs behind an HTTP front of this project that does nothing but "
        "hand over tokens between two steps; the front's share of the time is measured and given.",
    )

    def install(self, place: Place, say: Say) -> None:
        """Two environments, since the converter brings PyTorch; then the weights as int8."""
        make_environment(place.of(self.name), RUNTIME, say)
        write_hf(place, say)
        target = self._model(place)
        if target.is_dir():
            return
        make_environment(place.of("openvino-converter"), CONVERTER, say, without=UNWANTED)
        say("converting the weights to OpenVINO, int8")
        half = target.with_name("openvino-int8.unfinished")
        shutil.rmtree(half, ignore_errors=True)
        tool = place.python("openvino-converter").with_name("optimum-cli")
        command = [str(tool), "export", "openvino", "--model", str(place.hf), "--task", "text-generation-with-past"]
        command += ["--weight-format", "int8", str(half)]
        run(command, place.of("openvino-converter") / "convert.log", OFFLINE)
        half.rename(target)

    def fault(self, place: Place) -> str | None:
        """The environment or the model may be missing."""
        if not place.python(self.name).is_file() or not self._model(place).is_dir():
            return (
                f"openvino-genai or its model is not there; run python -m benchmarks.peers install --peer {self.name}"
            )
        return None

    def version(self, place: Place) -> str:
        """The version of openvino-genai."""
        return package_version(place.python(self.name), "openvino-genai")

    def launch(self, place: Place, setting: Setting, crowd: Crowd, port: int) -> Launch:
        """The front, in the environment of the peer."""
        values = setting.values
        command = (
            *(str(place.python(self.name)), "-P", str(FRONT)),
            *("--model", str(self._model(place)), "--tokenizer", str(place.hf / "tokenizer.json")),
            *("--port", str(port), "--threads", str(NUM_THREADS), "--cache-gb", str(KV_GB)),
            *("--max-num-batched-tokens", str(values["budget"]), "--max-num-seqs", str(max(64, crowd.num_clients))),
            *("--precision", values["precision"], "--kv-precision", values["kv"]),
        )
        return Launch(command=command, environment=OFFLINE, stats_path="/stats")

    def _model(self, place: Place) -> Path:
        return place.weights / "openvino-int8"
