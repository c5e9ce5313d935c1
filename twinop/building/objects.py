"""The ops of object files with functions of tvm-ffi's C signature, `__tvm_ffi_<name>`."""

import json
import re
import struct
from collections.abc import Sequence
from pathlib import Path

from ..errors import BuildError
from ..libraries.library import sections_of
from ..record.names import check_op_name
from ..record.schema_text import record_of
from .cache import write

_OF_CUDA = re.compile(r"_{0,2}cu(da)?[A-Z]")
_MACROS = {"cpu": "TWINOP_CPU_OP", "cuda": "TWINOP_CUDA_OP", "both": "TWINOP_OP"}
_HEADER = """\
// Written by `twinop build`. A header of your own may say the same, and more.
#include "twinop/tvm_ffi.h"

namespace twinop {{

TWINOP_TVM_FFI({symbol});
{macro}({op}, {record}, CallTvmFfi<__tvm_ffi_{symbol}>)

}}  // namespace twinop
"""


def _wanted_of_others(paths: Sequence[Path]) -> set[str]:
    """Returns the symbols that objects want; BuildError, LibraryError: damaged, or for another machine."""
    wanted = set[str]()
    for path in paths:
        with path.open("rb") as file:
            head = file.read(17)
        if not head.startswith(b"\x7fELF") or head[16:] != b"\x01":
            raise BuildError(
                f"{path}: not an object file (ELF). Expected what a compiler writes with -c, such as kernel.o"
            )
        table, names = sections_of(path, path, ".symtab", ".strtab")
        try:
            for name, info, _, section, _, _ in struct.iter_unpack("<IBBHQQ", table):
                if info >> 4 and not section:
                    wanted.add(names[name : names.index(b"\0", name)].decode())
        except (struct.error, ValueError) as error:
            raise BuildError(f"{path}: the file is damaged or cut short. Compile it again") from error
    return wanted


def write_header(
    folder: Path,
    paths: Sequence[Path],
    schema: str,
    symbol: str | None = None,
    device: str | None = None,
    texts: Sequence[str] = (),
) -> Path:
    """Writes the header of an op that is one function of object files, and returns its path.

    The function has the op's name, unless `symbol` is another. The device is cpu, cuda, or both, whose
    tensors the function is called for; by default cuda if the objects call CUDA. `texts` are of the record:
    "dtypes=float32; float16". BuildError: no object file, an unknown device or text. RecordError: a text does
    not parse. TwinopError: the op has a name that it cannot have.
    """
    from ..aot_kernels.generate import TEXTS

    objects = [path for path in paths if path.suffix == ".o" and path.is_file()]
    if not objects:
        said = ", ".join(f"{p}{'' if p.exists() else ', which does not exist,'}" for p in paths) or "no file"
        raise BuildError(f"--schema: needs an object file, such as kernel.o, and {said} is none")
    parts = (text.partition("=") for text in texts)
    given = {name.strip(): value.strip() for name, _, value in parts}
    if unknown := [name for name, text in given.items() if name not in TEXTS or not text]:
        raise BuildError(f"--record {unknown[0]}: expected <name>=<text>, with a name of {', '.join(TEXTS)}")
    record = record_of(schema, "", **given)
    check_op_name(record.name)
    if device is None:
        device = "cuda" if any(map(_OF_CUDA.match, _wanted_of_others(objects))) else "cpu"
    if device not in _MACROS:
        raise BuildError(f"--device {device}: expected {', '.join(_MACROS)}")
    symbol = symbol or record.name
    if not re.fullmatch(r"[A-Za-z_]\w*", symbol, re.ASCII):
        raise BuildError(f"--symbol {symbol}: expected the name of a C function, such as scale")
    calls = "".join(f".{name}({json.dumps(text)})" for name, text in given.items())
    text = _HEADER.format(
        symbol=symbol,
        op=record.name,
        macro=_MACROS[device],
        record=f"Record({json.dumps(record.schema)}){calls}",
    )
    file = folder / f"{record.name}.generated.h"
    write(file, text.encode())
    return file
