"""What can be said of the pages without a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from everystop.server.ui import FOLDER

REPORT = FOLDER.parents[1] / "observe" / "report" / "page.js"
IMPORT = re.compile(r'^(?:import|export) .*from "(\./[a-z-]+\.js)";$', re.MULTILINE)
COMPILER = {
    "allowJs": True,
    "checkJs": True,
    "noEmit": True,
    "strict": True,
    "noUnusedLocals": True,
    "noUnusedParameters": True,
    "noImplicitReturns": True,
    "target": "es2023",
    "module": "es2022",
    "moduleResolution": "bundler",
    "lib": ["es2023", "dom", "dom.iterable", "dom.asynciterable"],
    "types": [],
}


def imports_of(path: Path) -> set[str]:
    return {name.removeprefix("./") for name in IMPORT.findall(path.read_text(encoding="utf-8"))}


def test_every_file_that_is_asked_for_is_there_and_none_is_left_over() -> None:
    names = {path.name for path in FOLDER.iterdir()}
    asked = {"index.html", "request.html"}
    for page in ("index.html", "request.html"):
        text = (FOLDER / page).read_text(encoding="utf-8")
        asked |= set(re.findall(r'(?:src|href)="/ui/([^"/]+)"', text))
    pending = [name for name in asked if name.endswith(".js")]
    while pending:
        new = imports_of(FOLDER / pending.pop()) - asked
        asked |= new
        pending += new
    assert asked == names


def test_pages_hold_no_script_style_or_handler_of_their_own() -> None:
    for path in FOLDER.glob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", text), path.name
        assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", text))


def test_nothing_is_asked_of_another_host() -> None:
    for path in FOLDER.iterdir():
        urls = re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+", path.read_text(encoding="utf-8"))
        assert set(urls) <= {"http://www.w3.org"}, path.name


def test_pictures_know_nothing_of_the_stream_and_the_page() -> None:
    """They are used by the report of a comparison, too."""
    for name in ("grammar.js", "format.js", "timeline.js", "view.js", "plot.js", "slots.js"):
        assert imports_of(FOLDER / name) <= {"grammar.js", "format.js", "timeline.js", "view.js", "plot.js"}, name


def test_the_types_hold(tmp_path: Path) -> None:
    tsc = shutil.which("tsc")
    if tsc is None:
        pytest.skip("needs tsc on the PATH (npm install typescript)")
    config = {"compilerOptions": COMPILER, "include": [str(FOLDER / "*.js"), str(REPORT)]}
    (tmp_path / "tsconfig.json").write_text(json.dumps(config), encoding="utf-8")
    checked = subprocess.run([tsc, "-p", str(tmp_path)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
