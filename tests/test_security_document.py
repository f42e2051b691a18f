"""SECURITY.md: what it says is there, is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
ROWS = [line.strip("|").split(" | ") for line in TEXT.split("## Published")[1].splitlines() if line.startswith("|")][2:]
VLLM_CVES = """
2024-8768 2024-8939 2024-9052 2024-9053 2024-11041 2025-24357 2025-25183 2025-29770 2025-29783 2025-30165 2025-30202
2025-32444 2025-46560 2025-46570 2025-46722 2025-47277 2025-48887 2025-48942 2025-48943 2025-48944 2025-48956
2025-6242 2025-9141 2025-59425 2025-61620 2025-62164 2025-62372 2025-62426 2025-66448 2026-22773 2026-22778
2026-22807 2026-34756 2026-48746 2026-9540 2026-24779 2026-27893 2026-34753 2026-34755 2026-34760
"""


@pytest.mark.parametrize("row", ROWS, ids=[row[0].strip() for row in ROWS])
def test_a_row_says_whether_it_applies_and_which_tests_show_it(row: list[str]) -> None:
    assert len(row) == 5
    _, _, applies, prevented, tests = (cell.strip() for cell in row)
    assert applies in ("applies", "does not exist", "does not exist yet", "unknown")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
    assert named or (tests == "–" and applies != "applies"), "what applies has a test"
    assert prevented
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"


def test_each_published_cve_has_a_row() -> None:
    listed = set(re.findall(r"CVE-(\d{4}-\d+)", TEXT))
    assert set(VLLM_CVES.split()) <= listed
    assert len(ROWS) > 30


def test_bounds_are_those_of_the_code() -> None:
    from everystop.model import (
        from_safetensors,
        gguf,
        messages,
        safetensors,
        template_sandbox,
        tokenizer_files,
    )
    from everystop.server import (
        answer_size,
        aside,
        bodies,
        estimates,
        http,
        json_body,
        json_shape,
        openai_fields,
        protocol,
    )

    mib = 1 << 20
    bounds = TEXT.split("### Bounds")[1].split("## Published")[0]
    for value in (
        f"header block | {http.MAX_HEADER_BYTES >> 10} KiB",
        f"receive a request | {http.RECEIVE_S:g} s",
        f"{bodies.MAX_BODY_BYTES // mib} MiB; {bodies.MAX_BODIES_BYTES // mib} MiB",
        f"at once; their bodies | {aside.MAX_JOBS}; {aside.MAX_BODIES_BYTES // mib} MiB",
        f"memory of its process | 1; {estimates.LIMIT_S:g} s; {estimates.MAX_BYTES >> 30} GiB",
        f"of all answers | {http.MAX_UNSENT_BYTES // mib} MiB; {http.MAX_UNSENT_BYTES_IN_ALL // mib} MiB",
        f"{json_body.BYTES_PER_VALUE} bytes as one; digits of a number; depth",
        f"{json_body.MAX_VALUES:,}; {json_shape.MAX_DIGITS}; {json_shape.MAX_DEPTH}",
        f"{openai_fields.MAX_PROMPTS:,}; {openai_fields.MAX_N}; {protocol.MAX_SEQUENCES:,}",
        f"{openai_fields.RANGES['logprobs'][1]}; {answer_size.MAX_ENTRIES:,}",
        f"{openai_fields.MAX_STOPS}; {openai_fields.MAX_STOP_CHARS:,}",
        f"{messages.MAX_MESSAGES:,}; {messages.MAX_PARTS:,}; {messages.MAX_TOOL_CALLS}; {messages.MAX_NAME_CHARS}",
        f"{template_sandbox.MAX_SOURCE_CHARS // mib} MiB; {template_sandbox.MAX_RENDER_NS / 1e9:g} s",
        f"{template_sandbox.TEXT_CHARS // 10**6} million characters and {template_sandbox.TEXT_FACTOR} for each",
        f"in all {template_sandbox.ALL_CHARS // 10**6} million and {template_sandbox.ALL_FACTOR}",
        f"{template_sandbox.MAX_NODES:,} and one for each {template_sandbox.CHARS_PER_NODE} characters",
        f"of the request; {template_sandbox.MAX_DEPTH}",
        f"{gguf.MAX_KEYS:,}; {gguf.MAX_TENSORS:,}; {gguf.MAX_VALUES:,}; {tokenizer_files.MAX_TOKEN_CHARS:,}",
        f"{safetensors.MAX_HEADER_BYTES // mib} MiB; {from_safetensors.MAX_JSON_BYTES // mib} MiB",
    ):
        assert value in bounds, value


UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "yaml", "code", "codeop"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}


def test_nothing_unpickles_or_evaluates() -> None:
    """Of all of the package; numpy's files, which can hold pickles, are not read either."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module).split(".")[0]]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
                found.append(f"{path.name}: {node.func.id}()")
            elif isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle", "trust_remote_code"):
                found.append(f"{path.name}: {node.arg}=")
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                unsafe = {"np.load", "numpy.load", "torch.load", "os.system", "os.popen"}
                found += [f"{path.name}: {node.value.id}.{node.attr}"] * (f"{node.value.id}.{node.attr}" in unsafe)
            found += [f"{path.name}: {name}" for name in names if name in UNSAFE_MODULES]
    assert not found
