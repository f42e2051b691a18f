"""Makes a drawn SVG part of a page: its colours follow the page, its names cannot clash with others', it is smaller,
and what moves with the time axis or belongs to a request can be found.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"
# What matplotlib calls the parts of axes, and what a page calls them.
ROUNDED = ("d", "x", "y", "width", "height", "transform", "style")  # to a tenth of a pixel
AXES = {"matplotlib.axis_": "axis", "xtick_": "tick-x", "ytick_": "tick-y"}
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_NUMBER = re.compile(r"-?\d+\.\d{2,}")
_FONT = re.compile(r"font-family: [^;\"]*;? ?")
_TURN = re.compile(r"^rotate\(-?0 ")


def inline_svg(
    document: str,
    *,
    name: str,
    label: str,
    css_class: str,
    colours: Mapping[str, str],
    data: Mapping[str, float] | None = None,
) -> str:
    """The document as an `<svg>` element: `name` is unique on the page, `label` is read aloud, `colours` are replaced,
    `data` becomes data
    attributes. The document is trusted, `label` is not.
    """
    root = ElementTree.fromstring(document)
    _drop(root, {f"{SVG}metadata"})
    for definitions in root.iter(f"{SVG}defs"):
        _drop(definitions, {f"{SVG}style"})
    _rename(root, name)
    for element in list(root.iter()):
        _clean(element)
        _gather(element)
    _flatten(root)
    body = "".join(ElementTree.tostring(child, encoding="unicode") for child in root)
    body = re.sub(r' xmlns(:\w+)?="[^"]*"', "", body).replace("ns0:", "").replace("ns1:href", "href")
    body = re.sub(r">\s+<", "><", body)
    for old, new in colours.items():
        body = re.sub(re.escape(old), new, body, flags=re.IGNORECASE)
    extra = "".join(f' data-{key}="{value:.6g}"' for key, value in (data or {}).items())
    return (
        f'<svg class="{css_class}" viewBox="{root.get("viewBox")}" role="img" aria-label="{escape(label)}"{extra}>'
        f"{body}</svg>"
    )


def _drop(parent: ElementTree.Element, tags: set[str]) -> None:
    for child in list(parent):
        if child.tag in tags:
            parent.remove(child)


def _rename(root: ElementTree.Element, name: str) -> None:
    """Names that are referred to get the picture's own before them; marks of ours become classes; others go."""
    used: set[str] = set()
    for element in root.iter():
        used.update(*(_REFERENCE.findall(value) for value in element.attrib.values()))
        used.add(element.get(LINK, "#none")[1:])
    for element in root.iter():
        old = element.attrib.pop("id", "")
        if old in used:
            element.set("id", f"{name}-{old}")
        elif (kind := old.rstrip("0123456789")) in AXES:
            element.set("class", AXES[kind])
        elif old.startswith(("move", "still")):
            kind, _, request = old.partition(".r")
            element.set("class", f"{kind} r" if request else kind)
            if request:
                element.set("data-r", request)
        for key, value in element.attrib.items():
            if key == LINK:
                element.set(key, f"#{name}-{value[1:]}")
            elif "url(#" in value:
                element.set(key, _REFERENCE.sub(rf"url(#{name}-\1)", value))


def _clean(element: ElementTree.Element) -> None:
    """Fonts are the page's; a turn by nothing is none; the space in paths is not needed."""
    if "style" in element.attrib:
        element.set("style", _FONT.sub("", element.get("style", "")).replace(": ", ":").replace("; ", ";"))
    if _TURN.match(element.get("transform", "")):
        del element.attrib["transform"]
    if "d" in element.attrib:
        element.set("d", re.sub(r"\s*([MLCQZz])\s*", r"\1", element.get("d", "").replace("\n", " ")).strip())
    for key, value in element.attrib.items():
        if key in ROUNDED:
            element.set(key, _NUMBER.sub(_shorter, value))


def _gather(parent: ElementTree.Element) -> None:
    """What moves in one axes goes into groups `moves`, each cut off at the axes' border instead of piece by piece."""
    group: ElementTree.Element | None = None
    for child in list(parent):
        if not child.get("class", "").startswith("move") or parent.get("class") == "moves":
            group = None if child.tag != f"{SVG}defs" else group
            continue
        clip = next((c for e in child.iter() if (c := e.get("clip-path"))), None)
        for element in child.iter():
            element.attrib.pop("clip-path", None)
        if group is None or (clip or "") != group.get("data-clip"):
            position = list(parent).index(child)
            frame = ElementTree.Element(f"{SVG}g", {"clip-path": clip} if clip else {"class": "unclipped"})
            group = ElementTree.SubElement(frame, f"{SVG}g", {"class": "moves", "data-clip": clip or ""})
            parent.insert(position, frame)
        parent.remove(child)
        group.append(child)


def _flatten(root: ElementTree.Element) -> None:
    """A group that says nothing is replaced by what is in it."""
    for parent in list(root.iter()):
        parent.attrib.pop("data-clip", None)
        while any(child.tag == f"{SVG}g" and not child.attrib for child in parent):
            children: list[ElementTree.Element] = []
            for child in parent:
                children += list(child) if child.tag == f"{SVG}g" and not child.attrib else [child]
            parent[:] = children


def _shorter(match: re.Match[str]) -> str:
    return f"{float(match[0]):.1f}".removesuffix(".0")
