"""Loads libraries and derives, from each record, what torch wants to know of an op."""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from twinop.errors import LibraryError
from twinop.library import Library, read_library
from twinop.record import DOMAIN, Record
from twinop.torch_op.autograd import make_function
from twinop.torch_op.rules import autocast_rule, fake_rule, refuse, vmap_rule

functions: dict[str, Callable[..., Any]] = {}
"""The ops as Python functions, by name. Unlike `torch.ops.custom_domain.*` they work under torch.func."""

_libraries: dict[Path, Library] = {}
_torch_library = torch.library.Library(DOMAIN, "FRAGMENT")

# Tensors that no kernel reads. Without these entries torch answers with a dump of its dispatch table.
_FOREIGN_KEYS = {
    "SparseCPU": "sparse",
    "SparseCUDA": "sparse",
    "SparseCsrCPU": "sparse compressed",
    "SparseCsrCUDA": "sparse compressed",
    "QuantizedCPU": "quantized",
    "QuantizedCUDA": "quantized",
    "MkldnnCPU": "MKL-DNN",
}


def records() -> dict[str, Record]:
    """The records of all loaded libraries, by op name."""
    return {name: record for library in _libraries.values() for name, record in library.records.items()}


def load_library(path: str | os.PathLike[str]) -> Library:
    """Registers a library's ops with torch; loading the same file again does nothing.

    Raises:
        LibraryError: the file is missing, damaged or not a twinop torch library, or one of its ops is
            registered already, by another library.
    """
    path = Path(path).resolve()
    if path in _libraries:
        return _libraries[path]
    library = read_library(path)
    for name in library.records:
        _refuse_duplicate(name, path)
    try:
        register = ctypes.CDLL(str(path)).twinop_register_torch_ops
    except AttributeError:
        hint = "; it is an ONNX Runtime library: register it with a session" if library.exports_ort else ""
        raise LibraryError(
            f"{path}: not a twinop torch library (no twinop_register_torch_ops){hint}"
        ) from None
    except OSError as error:
        raise LibraryError(f"{path}: cannot be loaded into torch {torch.__version__}: {error}") from error
    register.restype = ctypes.c_char_p
    if (message := register()) is not None:
        raise LibraryError(f"{path}: torch refused its ops: {message.decode()}")
    _libraries[path] = library
    for record in library.records.values():
        _derive(record)
    return library


def _refuse_duplicate(name: str, path: Path) -> None:
    owner = next((str(other) for other, library in _libraries.items() if name in library.records), None)
    if owner is None and hasattr(getattr(torch.ops, DOMAIN), name):
        owner = "code outside twinop"
    if owner is not None:
        raise LibraryError(
            f"{path}: op {DOMAIN}::{name} is registered already, by {owner}. "
            "One process can hold one definition: load one of the two, or rename the op"
        )


def _derive(record: Record) -> None:
    name = f"{DOMAIN}::{record.name}"
    op = getattr(getattr(torch.ops, DOMAIN), record.name).default
    function, autograd_kernel = make_function(record, op, functions)
    functions[record.name] = function
    torch.library.register_fake(name, fake_rule(record), lib=_torch_library)
    torch.library.register_vmap(name, vmap_rule(record, op), lib=_torch_library)
    _torch_library.impl(record.name, autograd_kernel, "Autograd")
    if record.autocast == "widest":
        for device in ("CPU", "CUDA"):
            _torch_library.impl(record.name, autocast_rule(record, op, device.lower()), f"Autocast{device}")
    for key, kind in _FOREIGN_KEYS.items():
        _torch_library.impl(record.name, refuse(record, kind), key)
