"""What does the largest answer in one piece take? The resident memory of a server of its own for each kind.

    python -m benchmarks.answer_memory

Nothing is computed: a parrot repeats the prompt, and makes as many log-probabilities as are asked for.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.server.parrot_process import ParrotProcess

from everystop.server.answer_size import MAX_ENTRIES

NUM_TOP, NUM_CHOICES = 20, 16
NUM_TOKENS = MAX_ENTRIES // (NUM_TOP + 1) // NUM_CHOICES
TEXT = "abcdefgh"
OPTIONS = {"step_s": 0, "max_model_len": 8192, "num_blocks": 16384}
LENGTH = {"n": NUM_CHOICES, "max_tokens": NUM_TOKENS, "ignore_eos": True}
ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat, top_logprobs 20": (
        "/v1/chat/completions",
        LENGTH | {"messages": [{"role": "user", "content": TEXT}], "logprobs": True, "top_logprobs": NUM_TOP},
    ),
    "completion, logprobs 20": ("/v1/completions", LENGTH | {"prompt": TEXT, "logprobs": NUM_TOP}),
    "completion, logprobs 0": (
        "/v1/completions",
        {"prompt": TEXT, "logprobs": 0, "n": 100, "max_tokens": MAX_ENTRIES // 100, "ignore_eos": True},
    ),
    "completion, return_token_ids": (
        "/v1/completions",
        {"prompt": TEXT, "return_token_ids": True, "n": 100, "max_tokens": MAX_ENTRIES // 100, "ignore_eos": True},
    ),
    "prompts, prompt_logprobs 20": (
        "/v1/completions",
        {"prompt": [TEXT * 595, TEXT * 595], "prompt_logprobs": NUM_TOP, "max_tokens": 1},
    ),
    "prompts, echo and logprobs 20": (
        "/v1/completions",
        {"prompt": [TEXT * 594, TEXT * 594], "echo": True, "logprobs": NUM_TOP, "max_tokens": 1},
    ),
}


def memory_mib(pid: int, name: str) -> float:
    """`VmRSS` or `VmHWM`, its peak, of a process."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def measure(name: str, path: str, body: dict[str, Any]) -> str:
    """A line about one answer."""
    with ParrotProcess(**OPTIONS) as server, closing(server.connect()) as connection:
        server.complete("warm", logprobs=2)
        before = memory_mib(server.process.pid, "VmRSS")
        connection.request("POST", path, json.dumps(body))
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status == 200, text
        peak, after = (memory_mib(server.process.pid, which) for which in ("VmHWM", "VmRSS"))
    return f"{name:<30} {len(text) / 2**20:8.1f} {before:8.1f} {peak:8.1f} {after:8.1f} {peak - before:8.1f}"


def main() -> None:
    """Print a table, in MiB."""
    print(f"{'MiB':<30} {'body':>8} {'before':>8} {'peak':>8} {'after':>8} {'peak over before':>8}")
    for name, (path, body) in ANSWERS.items():
        print(measure(name, path, body), flush=True)


if __name__ == "__main__":
    main()
