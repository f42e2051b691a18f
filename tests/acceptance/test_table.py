"""The table of cases, the tests and the documentation agree, and no mutant is caught by another case's check."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.acceptance.cases import CASES, NO_MUTANT_NEEDED
from tools.acceptance_table import PAGE, with_table

FOLDER = Path(__file__).parent


@cache
def functions() -> dict[str, ast.FunctionDef]:
    """Every function of the folder's tests, by name."""
    found: dict[str, ast.FunctionDef] = {}
    for path in FOLDER.glob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and re.match(r"test_(mutant_)?ac_|check_ac_", node.name):
                assert node.name not in found, node.name
                found[node.name] = node
    return found


def names_in(node: ast.AST) -> set[str]:
    """Names that a piece of code uses."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def test_every_case_has_its_test_and_every_test_its_case() -> None:
    numbers = [case.number for case in CASES]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 54
    tested = {int(match[1]) for name in functions() if (match := re.match(r"test_ac_(\d\d)_", name))}
    assert tested == set(numbers)


def test_every_mutant_of_the_table_has_its_test() -> None:
    for case in CASES:
        prefix = f"test_mutant_ac_{case.number:02}_"
        tested = {name.removeprefix(prefix) for name in functions() if name.startswith(prefix)}
        assert tested == {re.sub(r"\W+", "_", mutant) for mutant in case.mutants}, case.name
        assert bool(case.mutants) != (case.number in NO_MUTANT_NEEDED), case.name


def test_a_mutant_fails_the_very_check_that_its_case_passes() -> None:
    """Within `pytest.raises`, so that what is caught is a failing check."""
    for name, node in functions().items():
        match = re.match(r"test_mutant_(ac_\d\d)_", name)
        if match is None:
            continue
        checks = {found for found in names_in(node) if found.startswith("check_ac_")}
        assert checks, name
        assert all(check.startswith(f"check_{match[1]}") for check in checks), name
        within = [
            block
            for block in ast.walk(node)
            if isinstance(block, ast.With) and any("raises" in ast.dump(item.context_expr) for item in block.items)
        ]
        assert any(checks & set().union(*map(names_in, block.body)) for block in within), name
        of_case = [test for test in functions() if test.startswith(f"test_{match[1]}_")]
        source = set().union(*(names_in(functions()[test]) | texts_in(functions()[test]) for test in of_case))
        assert checks & source, f"{name} breaks what its case does not check"


def texts_in(node: ast.AST) -> set[str]:
    """Names that stand in texts, as of code for another process."""
    texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return set(re.findall(r"\w+", " ".join(texts)))


def test_the_page_holds_the_table_as_it_is() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), "run: python -m tools.acceptance_table"
