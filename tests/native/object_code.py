"""The machine code of an ELF file, as far as linking leaves it as it is."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import NamedTuple

RELOCATIONS = 4  # SHT_RELA
EXECUTABLE = 4  # SHF_EXECINSTR
# VEX.256.66.0F38.W0 50: vpdpbusd of AVX-VNNI. The operands are the bits left open.
VPDPBUSD = re.compile(
    b"\xc4[" + bytes(range(0x02, 0x100, 0x20)) + b"][" + re.escape(bytes(range(0x05, 0x80, 0x08))) + b"]\x50"
)


class Section(NamedTuple):
    name: str
    kind: int
    flags: int
    info: int
    data: bytes


def read_sections(path: Path) -> list[Section]:
    """The sections of a 64-bit little-endian ELF file, in the file's order."""
    file = path.read_bytes()
    assert file[:6] == b"\x7fELF\x02\x01", path
    (table,) = struct.unpack_from("<Q", file, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", file, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", file, table + i * entry_bytes) for i in range(count)]
    names = file[headers[names_index][4] :]
    return [
        Section(
            name=names[header[0] : names.index(b"\0", header[0])].decode(),
            kind=header[1],
            flags=header[2],
            info=header[7],
            data=file[header[4] : header[4] + header[5]],
        )
        for header in headers
    ]


def compilers(path: Path) -> set[bytes]:
    """Names and versions of the compilers that say so in a file."""
    return {text for section in read_sections(path) if section.name == ".comment" for text in section.data.split(b"\0")}


def fixed_code(path: Path, *, min_bytes: int) -> list[bytes]:
    """The stretches of an object file's code that hold no address, from `min_bytes` on.

    A linker fills in 4 bytes at each relocation, and may choose another instruction with up to 3 bytes before them.
    """
    sections = read_sections(path)
    stretches = []
    for index, section in enumerate(sections):
        if not section.flags & EXECUTABLE:
            continue
        places = sorted(
            struct.unpack_from("<Q", table.data, at)[0]
            for table in sections
            if table.kind == RELOCATIONS and table.info == index
            for at in range(0, len(table.data), 24)
        )
        begin = 0
        for place in [*places, len(section.data) + 3]:
            stretches.append(section.data[begin : max(begin, place - 3)])
            begin = place + 4
    return [stretch for stretch in stretches if len(stretch) >= min_bytes]
