"""The outer form of device modules, the payload of a library (`twinop/aot_kernels/`)."""

import struct
import zlib

SECTION = ".twinop_modules"
"""The section of the payload. The linker gave it a segment of its own, the last one in memory."""

MAGIC, VERSION = b"TWINOPDM", 1

HEADER = struct.Struct("<8sIIQQQII")
"""Magic, version, checksum of the next fields; bytes of all, place and bytes of the tables; checksums of the
tables and of the body."""


def seal(texts: bytes, tables: bytes, images: bytes) -> bytes:
    """Returns a payload: a header before records as JSON texts, tables and images."""
    body = texts + tables + images
    offset = HEADER.size + len(texts)
    fields = (HEADER.size + len(body), offset, len(tables), zlib.crc32(tables), zlib.crc32(body))
    unchecked = HEADER.pack(MAGIC, VERSION, 0, *fields)
    return HEADER.pack(MAGIC, VERSION, zlib.crc32(unchecked[16:]), *fields) + body


def read_texts(section: bytes) -> bytes:
    """Returns the records of a payload as JSON texts, each with a NUL; none where the place is empty.

    Raises:
        ValueError: it is damaged, or of another version.
    """
    if len(section) < HEADER.size:
        raise ValueError(f"the section {SECTION} is too short")
    magic, version, checked, size, offset, _, _, checksum = HEADER.unpack_from(section)
    if magic == MAGIC and version == 0:
        return b""
    if magic == MAGIC and version != VERSION:
        raise ValueError(f"its device modules have version {version}, expected {VERSION}")
    sums = (zlib.crc32(section[16 : HEADER.size]), zlib.crc32(section[HEADER.size : size]))
    if magic != MAGIC or size > len(section) or sums != (checked, checksum):
        raise ValueError(f"the section {SECTION} is damaged")
    return section[HEADER.size : offset]
