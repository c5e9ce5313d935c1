"""Makes a library out of a prebuilt one and a payload: no compiler is needed."""

import os
import struct
from pathlib import Path

from ..errors import BuildError
from ..library import find_library
from ..module_texts import SECTION
from .encode import encode
from .plan import Payload

_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, ...
_PROGRAM_HEADER = struct.Struct(
    "<IIQQQQQQ"
)  # type, flags, offset, address, physical, file, memory size, alignment
_LOAD = 1


def template() -> Path:
    """Returns the prebuilt library without ops, `libtwinop_device.so`.

    Raises:
        LibraryError: the installation lacks it.
    """
    return find_library("twinop_device")


def pack(library: Path, payload: Payload, output: Path) -> None:
    """Writes a copy of a library with a payload.

    Nothing of the library moves: the payload goes to the end of the file, and the headers of its segment and
    section get the new place and size. `strip` keeps it, as any other segment.

    Args:
        library: `template()`, or a library that was linked with its objects for C++ ops of its own.

    Raises:
        BuildError: more ops than a library can have, or a library without a place for a payload.
    """
    data = encode(payload)
    image = bytearray(library.read_bytes())
    section = _section(image, library)
    _, _, _, address, old, *_ = _SECTION_HEADER.unpack_from(image, section)
    segments, size, count = (*struct.unpack_from("<Q", image, 32), *struct.unpack_from("<HH", image, 54))
    for at in range(segments, segments + size * count, size):
        kind, flags, offset, begin, physical, _, _, alignment = _PROGRAM_HEADER.unpack_from(image, at)
        if kind == _LOAD and begin == address and offset == old:
            break
    else:
        raise BuildError(f"{library}: {SECTION} has no segment of its own. Link with the device_link options")
    place = -(-len(image) // alignment) * alignment
    image += bytes(place - len(image)) + data
    fields = (kind, flags, place, begin, physical, len(data), len(data), alignment)
    _PROGRAM_HEADER.pack_into(image, at, *fields)
    struct.pack_into("<QQ", image, section + 24, place, len(data))
    part = output.with_name(f".{output.name}.{os.getpid()}")
    part.write_bytes(image)
    part.chmod(0o755)
    part.replace(output)


def _section(image: bytearray, library: Path) -> int:
    """Returns where the header of the payload's section lies."""
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count, names = struct.unpack_from("<HHH", image, 58)
    text = _SECTION_HEADER.unpack_from(image, table + names * size)[4]
    for at in range(table, table + size * count, size):
        name = text + _SECTION_HEADER.unpack_from(image, at)[0]
        if image[name : image.index(b"\0", name)] == SECTION.encode():
            return at
    raise BuildError(f"{library}: no section {SECTION}, which takes the kernels. Expected {template().name}")
