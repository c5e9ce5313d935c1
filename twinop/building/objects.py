"""Object files with functions of tvm-ffi's C signature, `__tvm_ffi_<name>`: what they have, and their ops."""

import json
import re
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import BuildError
from ..libraries.library import sections_of
from ..record.names import check_op_name
from ..record.op_spec import OpSpec
from ..record.schema_text import record_of
from ..system.python_child import bare
from .cache import write
from .project import Project

_PREFIX, _METADATA = "__tvm_ffi_", "__tvm_ffi__metadata_"
_OF_CUDA = re.compile(r"_{0,2}cu(da)?[A-Z]")
_CALLED = re.compile(
    r"\bTWINOP_(?:CPU_|CUDA_)?OP\s*\(\s*(\w+)(?:(?!\bTWINOP_\w*OP\b).)*?CallTvmFfi<([\w\s,]+)>", re.DOTALL
)
_MACROS = {"cpu": "TWINOP_CPU_OP", "cuda": "TWINOP_CUDA_OP", "both": "TWINOP_OP"}
_HEADER = """\
// Written by `twinop build`. A header of your own may say the same, and more.
#include "twinop/tvm_ffi.h"

namespace twinop {{

TWINOP_TVM_FFI({symbol});
{macro}({op}, {record}, CallTvmFfi<__tvm_ffi_{symbol}>)

}}  // namespace twinop
"""
# Prints the text that a function gives: an Any with a pointer to an object, whose fourth word is the address.
_ASK = """
import ctypes, sys
result = (ctypes.c_int64 * 2)()
if not getattr(ctypes.CDLL(sys.argv[1]), sys.argv[2])(None, None, 0, result):
    words = (ctypes.c_int64 * 5).from_address(result[1])
    print(ctypes.string_at(words[3], words[4]).decode())
"""


def symbols_of(paths: Sequence[Path]) -> tuple[set[str], set[str]]:
    """Returns what objects define, and want of others; BuildError, LibraryError: damaged, or for others."""
    defined, wanted = set[str](), set[str]()
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
                if info >> 4:  # not of the file alone
                    (defined if section else wanted).add(names[name : names.index(b"\0", name)].decode())
        except (struct.error, ValueError) as error:
            raise BuildError(f"{path}: the file is damaged or cut short. Compile it again") from error
    return defined, wanted


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
        device = "cuda" if any(map(_OF_CUDA.match, symbols_of(objects)[1])) else "cpu"
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


def _functions(project: Project) -> list[tuple[str, str]]:
    """Returns the names of ops and of the functions of objects that they call."""
    found = [each for source in project.sources for each in _CALLED.findall(source.path.read_text())]
    return [(op, name) for op, names in found for name in re.findall(rf"{_PREFIX}(\w+)", names)]


def check_functions(project: Project) -> None:
    """Checks that the objects are some for this machine, and have the functions that ops call."""
    objects = [path for path in project.objects if path.suffix == ".o"]
    defined, _ = symbols_of(objects)
    for op, function in _functions(project):
        if _PREFIX + function not in defined and objects == list(project.objects):  # no archive
            there = sorted(re.findall(rf"\b{_PREFIX}(?!_)(\w+)", " ".join(defined)))
            raise BuildError(
                f"the op {op} calls {function}, and no object file defines {_PREFIX}{function}. There are "
                f"these functions of tvm-ffi: {', '.join(there) or 'none'}"
            )


def check_arguments(library: Path, project: Project, records: Mapping[str, OpSpec]) -> None:
    """Raises BuildError where metadata of tvm-ffi say another number of arguments than the record."""
    for op, function in _functions(project):
        taken = _parameters(library, function)
        if taken is None or op not in records:
            continue
        record = records[op]
        given = [*record.parameters, *(name for name in record.outputs if name not in record.written)]
        if len(given) != len(taken):
            raise BuildError(
                f"{function} takes {len(taken)} arguments ({', '.join(taken)}), and "
                f"the op {op} gives {len(given)}: {', '.join(given)}. Expected the inputs, the attributes "
                "and the outputs, in this order"
            )


def _parameters(library: Path, function: str) -> list[str] | None:
    """Returns the types of a function's parameters; None where its object has no metadata that says them."""
    command = bare(_ASK, str(library), _METADATA + function)
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    try:
        schema = json.loads(json.loads(said)["type_schema"])
        taken = schema["named_args"]["params"] if "named_args" in schema else schema["args"][1:]
        return [each["type"] for each in taken]
    except (ValueError, KeyError, TypeError):
        return None
