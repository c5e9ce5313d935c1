"""What the tests read of 64-bit ELF files: sections, symbols, needed libraries."""

import struct
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

SHT_SYMTAB, SHT_DYNAMIC, SHT_NOBITS, SHT_DYNSYM = 2, 6, 8, 11
STB_GNU_UNIQUE, SHN_UNDEF = 10, 0
DT_NEEDED = 1


class Symbol(NamedTuple):
    name: str
    kind: int
    binding: int
    section: int
    value: int
    size: int


@dataclass(frozen=True)
class Section:
    name: str
    kind: int
    address: int
    data: bytes = field(repr=False)
    link: int
    info: int


class Elf:
    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        assert data[:6] == b"\x7fELF\x02\x01", path
        (table,) = struct.unpack_from("<Q", data, 40)
        size, count, names = struct.unpack_from("<HHH", data, 58)
        headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
        strings = data[headers[names][4] :]
        self.sections = [
            Section(
                _text(strings, name),
                kind,
                address,
                b"" if kind == SHT_NOBITS else data[at : at + length],
                link,
                info,
            )
            for name, kind, _, address, at, length, link, info, _, _ in headers
        ]

    def section(self, name: str) -> bytes:
        return b"".join(section.data for section in self.sections if section.name == name)

    def _symbols(self, kind: int) -> list[Symbol]:
        result = []
        for table in self.sections:
            if table.kind == kind:
                strings = self.sections[table.link].data
                for name, info, _, section, value, size in struct.iter_unpack("<IBBHQQ", table.data):
                    result.append(Symbol(_text(strings, name), info & 15, info >> 4, section, value, size))
        return result

    @cached_property
    def symbols(self) -> list[Symbol]:
        return self._symbols(SHT_SYMTAB)

    @cached_property
    def dynamic_symbols(self) -> list[Symbol]:
        return self._symbols(SHT_DYNSYM)

    @property
    def exports(self) -> set[str]:
        return {symbol.name for symbol in self.dynamic_symbols if symbol.section != SHN_UNDEF}

    @property
    def needed(self) -> set[str]:
        """The shared libraries that the loader brings in."""
        tables = [section for section in self.sections if section.kind == SHT_DYNAMIC]
        return {
            _text(self.sections[table.link].data, value)
            for table in tables
            for tag, value in struct.iter_unpack("<QQ", table.data)
            if tag == DT_NEEDED
        }


def _text(strings: bytes, start: int) -> str:
    return strings[start : strings.index(b"\0", start)].decode()
