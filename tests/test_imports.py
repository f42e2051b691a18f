"""The import contract: imports point one way, and the core depends on nothing that could make it non-deterministic."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}

# Who may import what of the project, by the longest matching prefix; a package may always import itself, unless a
# longer prefix says otherwise. A name ending in a colon part, `module:Name`, allows that one name.
NATIVE = "everystop._native"
ERRORS = "everystop.core.errors"
DURATIONS = "everystop.core.durations"
WORDS = "everystop.words"
TENANTS = "everystop.tenants"
KEYS = "everystop.keys"
SERVER_URL = "everystop.server_url"
PROTOCOL = "everystop.runner:ModelRunner"
LAUNCHED = "everystop.runner:Launched"
LAUNCHER = "everystop.runner:launcher"
EXECUTED = "everystop.runner:Executed"
CODES = "everystop.runner.codes"
PARAMS = "everystop.core.request:SamplingParams"
LOGPROBS = "everystop.core.plan:TokenLogprobs"
STARTERS = {"everystop.assembly", "everystop.backend", "everystop.config", "everystop.model", LOGPROBS, PARAMS, ERRORS}
ALLOWED = {
    "everystop": {"everystop.cli", "everystop.engine.llm", PARAMS},
    "everystop.config": {
        ERRORS,
        DURATIONS,
        KEYS,
        "everystop.core.admission:ADMISSIONS",
        "everystop.core.policy:POLICIES",
        "everystop.core.policy:honouring",
    },
    "everystop.backend": {"everystop.config", ERRORS},
    "everystop.machine": set(),
    "everystop.origin": set(),
    "everystop.keys": {ERRORS},
    "everystop.server_url": {ERRORS},
    "everystop.words": {DURATIONS},
    # Looks at all that a server needs, so it knows of each part that has needs of its own.
    "everystop.checkup": {
        "everystop.assembly",
        "everystop.backend",
        "everystop.runner.torch.opening",
        "everystop.config",
        "everystop.machine",
        "everystop.model",
        "everystop.origin",
        "everystop.scheduling",
        "everystop.server.credentials",
        "everystop.server.listener",
        "everystop.server.tracing",
        TENANTS,
        NATIVE,
        ERRORS,
    },
    "everystop.tenants": {ERRORS, DURATIONS, KEYS},
    "everystop.core": set(),
    "everystop.observe": {
        "everystop.core.events",
        "everystop.core.request:FinishReason",
        "everystop.core.step_time",  # time that a step took is divided by what is known of step times
        "everystop.observe.comparison",
        "everystop.observe.history",
        "everystop.observe.slot_use",
        DURATIONS,
        ERRORS,
        WORDS,
    },
    "everystop.observe.history": {
        "everystop.core.events",
        "everystop.core.step_time",
        "everystop.core.step_time_fit",
        "everystop.observe.log",
        "everystop.observe.queue",
    },
    # A comparison holds histories, and can be read back from a file.
    "everystop.observe.history_data": {
        "everystop.core.events",
        "everystop.core.request:FinishReason",
        "everystop.core.step_time",
        "everystop.observe.history",
    },
    "everystop.observe.comparison": {DURATIONS, "everystop.observe.history", "everystop.observe.history_data"},
    "everystop.observe.slot_use": {"everystop.core.events", "everystop.observe"},
    "everystop.observe.report": {"everystop.core.events", "everystop.observe", ERRORS, WORDS},
    # A record is of calls, so the recorder sees what they carry; it hears them and holds no scheduler.
    "everystop.observe.recorder": {
        "everystop.observe.record_file",
        "everystop.observe.history:Client",
        "everystop.core.plan",
        "everystop.core.policy:PolicySettings",
        "everystop.core.recording:RECORD_VERSION",
        "everystop.core.request",
        ERRORS,
    },
    "everystop.model": {PARAMS, ERRORS, NATIVE},
    "everystop.runner": {"everystop.core.plan", PARAMS, ERRORS},
    "everystop.runner.calibration": {
        "everystop.core.plan",
        "everystop.core.rows",
        "everystop.core.step_time",
        "everystop.core.step_time_fit",
        PARAMS,
        PROTOCOL,
    },
    "everystop.runner.native": {
        "everystop.model",
        "everystop.core.plan",
        PARAMS,
        ERRORS,
        PROTOCOL,
        CODES,
        NATIVE,
    },
    "everystop.runner.torch": {
        "everystop.model",
        "everystop.core.plan",
        "everystop.core.rows",
        PARAMS,
        ERRORS,
        DURATIONS,
        CODES,
    },
    "everystop.engine": {"everystop.core", "everystop.engine.loop", PROTOCOL, CODES, "everystop.config"},
    "everystop.engine.loop": {"everystop.core", PROTOCOL, LAUNCHED, LAUNCHER, EXECUTED},
    # The one place where scheduler, runner and model meet, and what starts from there: the server, and the two ways
    # to use the engine without one.
    "everystop.assembly": {
        NATIVE,
        "everystop.backend",
        "everystop.core",
        "everystop.config",
        "everystop.engine",
        "everystop.machine",
        "everystop.model",
        "everystop.observe.record_file",
        "everystop.observe.recorder",
        "everystop.runner",
        "everystop.scheduling",
    },
    "everystop.scheduling": {"everystop.config", "everystop.core", TENANTS},
    "everystop.engine.llm": {*STARTERS, "everystop.engine"},
    "everystop.server.app": {"everystop.config", "everystop.server", ERRORS},
    "everystop.server.batch": {"everystop.config", "everystop.engine", "everystop.server", ERRORS},
    "everystop.server.opening": {
        *STARTERS,
        NATIVE,
        "everystop.core.policy:make_policy",
        "everystop.engine",
        "everystop.server",
        "everystop.observe",
        "everystop.scheduling",
        TENANTS,
        KEYS,
    },
    "everystop.server": {
        "everystop.engine",
        "everystop.model.bad_words",
        "everystop.model.messages",
        "everystop.model.tokenizer",
        "everystop.observe",
        "everystop.config",
        "everystop.tenants",
        "everystop.core.events",
        "everystop.core.fitting",
        KEYS,
        LOGPROBS,
        PARAMS,
        ERRORS,
        DURATIONS,
    },
    # What a record says of a run is remembered, and so shown, as a live server does it.
    "everystop.sim": {
        "everystop.core",
        "everystop.engine.loop",
        "everystop.observe.history",
        "everystop.runner.calibration",
        "everystop.runner.simulated",
        PROTOCOL,
        WORDS,
    },
    # A record says again what was counted of a run.
    "everystop.sim.recount": {
        "everystop.core.events",
        "everystop.observe.aftermath",
        "everystop.observe.thread_share",
        "everystop.observe.metrics",
        "everystop.sim",
    },
    # Runs workloads on engines that it builds itself, or as a client of a server, which may be its own child; what
    # comes out is `observe`'s.
    "everystop.trial": {
        "everystop.observe",
        "everystop.sim.workloads",
        "everystop.trial.server_process",
        SERVER_URL,
        ERRORS,
        DURATIONS,
    },
    "everystop.trial.bench": {
        *STARTERS,
        "everystop.origin",
        NATIVE,
        "everystop.core.plan",
        "everystop.engine.engine",
        PROTOCOL,
        LAUNCHED,
        LAUNCHER,
        EXECUTED,
    },
    # Of whatever computes there.
    "everystop.trial.machine_limits": {
        NATIVE,
        "everystop.assembly:num_threads",
        "everystop.backend",
        "everystop.config",
        "everystop.trial.gpu.device_limits",
    },
    # On the runner itself, without an engine: where nothing else is installed.
    "everystop.trial.gpu": {
        "everystop.core",
        "everystop.engine.loop",
        "everystop.model.spec",
        "everystop.runner.torch",
        "everystop.sim.workloads",
    },
    "everystop.trial.on_engine": {
        "everystop.core.events",
        "everystop.engine",
        "everystop.observe",
        "everystop.sim.workloads",
        "everystop.trial.calm",
        PARAMS,
        ERRORS,
        DURATIONS,
    },
    "everystop.trial.server_process": {"everystop.config", ERRORS},
    # What a server's clients saw, beside what its record says that its engine did.
    "everystop.trial.recorded": {"everystop.observe", "everystop.sim", "everystop.trial", ERRORS},
    # The engine's parts without an engine: a scheduler, and a cost model in place of the model.
    "everystop.trial.virtual": {
        "everystop.assembly",
        "everystop.config",
        "everystop.core",
        "everystop.engine.loop",
        "everystop.observe",
        "everystop.runner.simulated",
        "everystop.sim",
        "everystop.trial",
    },
    # Measures by trials, on servers and in virtual time; what it draws and says are views of histories.
    "everystop.claims": {
        "everystop.config",
        "everystop.core.events",
        "everystop.core.step_time",
        "everystop.model.spec",
        "everystop.observe",
        "everystop.sim",
        "everystop.trial",
        DURATIONS,
        ERRORS,
        WORDS,
    },
    "everystop.trial.traced": {"everystop.sim.traces", "everystop.sim.workloads", DURATIONS},
    "everystop.cli": {
        "everystop.backend",
        "everystop.checkup",
        "everystop.core.policy:POLICIES",
        "everystop.core.policy:honouring",
        "everystop.claims",
        "everystop.trial",
        "everystop.server",
        "everystop.engine",
        "everystop.model",
        "everystop.observe",
        "everystop.sim",
        "everystop.config",
        "everystop.scheduling",
        ERRORS,
        DURATIONS,
        KEYS,
        SERVER_URL,
        WORDS,
    },
}

# Clocks, chance, threads, files and the network: what the core and the step loop must get from outside, as arguments.
IMPURE = {
    "asyncio", "concurrent", "contextvars", "ctypes", "datetime", "glob", "http", "io", "logging", "multiprocessing",
    "os", "pathlib", "queue", "random", "sched", "secrets", "select", "selectors", "shutil", "signal", "socket",
    "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid", "warnings", "weakref",
}  # fmt: skip
IMPURE_BUILTINS = {"open", "input", "print", "exec", "eval", "hash", "id", "__import__"}
PURE = [name for name in MODULES if (name + ".").startswith(("everystop.core.", "everystop.engine.loop."))]


def imports_of(name: str) -> Iterator[tuple[str, str | None]]:
    """Each import in a module as (module, name taken from it), wherever it stands; `import a.b` takes no name."""
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative imports hide where they point"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full, None) if full in {*MODULES, NATIVE} else (str(node.module), alias.name)


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def rule_for(module: str) -> str:
    """The longest prefix in `ALLOWED`; the root's rule holds for the root's own modules only."""
    prefixes = [prefix for prefix in ALLOWED if prefix != "everystop" and inside(module, prefix)]
    return max(prefixes, key=len, default="everystop")


def is_allowed(importer: str, imported: str, name: str | None) -> bool:
    if imported == "everystop" and name in {None, "__version__"}:
        return True  # the root itself loads nothing, as another test shows
    rule = rule_for(importer)
    if rule_for(imported) == rule and rule != "everystop":
        return True
    # A subpackage with a rule of its own may be imported by its package only where that is written down.
    return any(f"{imported}:{name}" == entry if ":" in entry else inside(imported, entry) for entry in ALLOWED[rule])


def test_imports_point_one_way() -> None:
    wrong = [
        f"{importer} imports {name + ' from ' if name else ''}{imported}"
        for importer in MODULES
        for imported, name in imports_of(importer)
        if inside(imported, "everystop") and not is_allowed(importer, imported, name)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("importer", "imported", "name"),
    [
        ("everystop.core.scheduler", "everystop.engine.loop", "step"),
        ("everystop.core.scheduler", "everystop.config", "Config"),
        ("everystop.server.app", "everystop.core.scheduler", "Scheduler"),
        ("everystop.server.app", "everystop.core.request", "Request"),
        ("everystop.server.routes", "everystop.server.app", "serve"),
        ("everystop.server.app", "everystop.model.weights", "load_model"),
        ("everystop.server.routes", "everystop.model.weights", "load_model"),
        ("everystop.engine.loop", "everystop.config", "Config"),
        ("everystop.engine.engine", "everystop.runner.native", "NativeRunner"),
        ("everystop.engine.engine", "everystop.server.app", "serve"),
        ("everystop.model.gguf", "everystop.runner.native", None),
        ("everystop.observe.metrics", "everystop.core.scheduler", None),
        ("everystop.runner", "everystop.runner.native", None),
        ("everystop.sim.clock", "everystop.engine.engine", None),
        ("everystop.trial.http_client", "everystop.engine.engine", None),
        ("everystop.observe.comparison", "everystop.trial.repeats", None),
        ("everystop.trial.repeats", "everystop.claims.lab", None),
        ("everystop.claims.lab", "everystop.engine.engine", None),
    ],
)
def test_contract_refuses_what_the_design_forbids(importer: str, imported: str, name: str | None) -> None:
    assert not is_allowed(importer, imported, name)


def test_core_and_step_loop_use_only_the_pure_part_of_the_standard_library() -> None:
    assert "everystop.core.scheduler" in PURE
    wrong = [
        f"{module} imports {imported}"
        for module in PURE
        for imported, _ in imports_of(module)
        if not inside(imported, "everystop")
        and (imported.split(".")[0] not in sys.stdlib_module_names or imported.split(".")[0] in IMPURE)
    ]
    assert not wrong, "\n".join(wrong)


def test_core_and_step_loop_call_nothing_that_depends_on_the_process() -> None:
    wrong = [
        f"{module}:{node.lineno} calls {node.func.id}()"
        for module in PURE
        for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_BUILTINS
    ]
    assert not wrong, "\n".join(wrong)


def loaded_after(statement: str) -> set[str]:
    """The modules that a fresh interpreter holds after a statement, less those it starts with."""
    code = f"import sys; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))"
    environment = {"PYTHONPATH": str(SOURCE), "PATH": ""}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return set(result.stdout.split())


@pytest.mark.parametrize("package", ["everystop", "everystop.core.scheduler", "everystop.runner", "everystop.config"])
def test_importing_a_light_package_loads_no_third_party_module(package: str) -> None:
    loaded = {name.split(".")[0] for name in loaded_after(f"import {package}")}
    assert "everystop" in loaded
    assert loaded - sys.stdlib_module_names == {"everystop"}


def test_importing_the_runner_package_loads_no_backend() -> None:
    loaded = loaded_after("import everystop.runner")
    assert not [name for name in loaded if name.startswith("everystop.runner.") or name == "everystop._native"]


def test_a_server_on_the_cpu_loads_no_pytorch() -> None:
    loaded = loaded_after("import everystop.server.opening, everystop.engine.llm, everystop.trial.bench")
    assert "torch" not in loaded
