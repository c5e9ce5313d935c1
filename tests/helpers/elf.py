"""What the tests read of ELF files: sections, symbols, needed libraries."""

from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile


class Elf:
    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            found = ELFFile(file)
            self.sections: dict[str, Any] = {each.name: each for each in found.iter_sections()}
            self._data = {name: s.data() for name, s in self.sections.items() if s["sh_type"] != "SHT_NOBITS"}
            self.dynamic_symbols, self.symbols = (
                list(self.sections[name].iter_symbols()) if name in self.sections else []
                for name in (".dynsym", ".symtab")
            )
            self.needed = {tag.needed for tag in self.sections[".dynamic"].iter_tags("DT_NEEDED")}

    def section(self, name: str) -> bytes:
        return self._data.get(name, b"")

    @property
    def exports(self) -> set[str]:
        return {symbol.name for symbol in self.dynamic_symbols if symbol["st_shndx"] != "SHN_UNDEF"}
