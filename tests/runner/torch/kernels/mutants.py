"""Kernels broken on purpose: a test that cannot tell them from the real ones proves nothing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def mutant(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """A copy of a module in which one piece of source, which occurs, is another."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert old in source, f"{module.__name__} has no {old!r} any more"
    path = folder / f"mutant_{abs(hash((old, new)))}.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    return changed


def mutant_above(module: ModuleType, below: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """A copy of a module over such a mutant of one that it imports."""
    changed = mutant(below, old, new, folder)
    sys.modules[changed.__name__] = changed
    return mutant(module, below.__name__, changed.__name__, folder)
