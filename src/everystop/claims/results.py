"""Results of claims in a folder: claims.json keeps what was found, so that one claim can be measured again without the
others; the page and the pictures are made from it alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everystop.claims.claim import Claim
from everystop.claims.findings import Findings
from everystop.claims.page import render
from everystop.core.errors import EverystopError
from everystop.observe.report.grammar import DARK, LIGHT, Theme
from everystop.observe.report.sheets import drawing_style

VERSION = 1
FILE, PAGE, PICTURES = "claims.json", "claims.md", "claims"


class ResultsError(EverystopError):
    """The results of an earlier run cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a claim found; `settings` say on what machine, with what command and when, `seconds` how long it took, and
    `client_cpu_s` how long of that the clients computed, 0 where there were none.
    """

    findings: Findings
    settings: Mapping[str, Any]
    seconds: float
    client_cpu_s: float = 0.0


def read_results(folder: Path) -> dict[int, Result]:
    """What is known, by claim; nothing where there is no file. Raises ResultsError for one that cannot be read."""
    path = folder / FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']}")
        return {int(number): _result(each) for number, each in data["claims"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ResultsError(
            f"{path} is not what `everystop claims` writes ({error}); remove it, or name another --out"
        ) from error


def _result(data: Mapping[str, Any]) -> Result:
    return Result(
        findings=Findings.from_data(data["findings"]),
        settings=data["settings"],
        seconds=float(data["seconds"]),
        client_cpu_s=float(data.get("client_cpu_s", 0.0)),  # not there before clients were
    )


def write_results(folder: Path, results: Mapping[int, Result], claims: Iterable[Claim]) -> None:
    """Write the file and the page; raises OSError."""
    data = {
        number: {
            "findings": result.findings.as_data(),
            "settings": dict(result.settings),
            "seconds": result.seconds,
            "client_cpu_s": result.client_cpu_s,
        }
        for number, result in sorted(results.items())
    }
    text = json.dumps({"version": VERSION, "claims": data}, indent=1, ensure_ascii=False)
    (folder / FILE).write_text(text + "\n", encoding="utf-8")
    (folder / PAGE).write_text(render(claims, results, PICTURES), encoding="utf-8")


def draw_result(folder: Path, claim: Claim, findings: Findings) -> list[Path]:
    """Write a claim's picture, light and dark; returns the files. Raises PictureError without matplotlib, OSError."""
    (folder / PICTURES).mkdir(exist_ok=True)
    paths = []
    with drawing_style():
        for theme in (LIGHT, DARK):
            paths.append(folder / PICTURES / picture_name(claim, theme))
            claim.draw(findings.data, theme).write_png(paths[-1])
    return paths


def picture_name(claim: Claim, theme: Theme) -> str:
    """Its file's name."""
    return f"{claim.number}-{claim.name}{'' if theme is LIGHT else f'-{theme.name}'}.png"
