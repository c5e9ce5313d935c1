"""Loads libraries and registers with torch what it derives from each record."""

import ctypes
import os
import warnings
from collections import ChainMap, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from twinop.errors import LibraryError, RecordError, TwinopWarning
from twinop.installation import how_to_build
from twinop.libraries.built import warn_if_old
from twinop.libraries.declare import cpu_function
from twinop.libraries.library import Library, find_library, read_library
from twinop.record.op_spec import DOMAIN, OpSpec
from twinop.record.record_checks import check_formulas
from twinop.system.python_child import require_loads

from .autograd import make_function
from .mutation import register_mutating, torch_library
from .rules import autocast_rule, cpu_rule, fake_rule, refuse, vmap_kernel
from .sharding import register_sharding_rule

Function = Callable[..., Any]


class _OwnOps(dict[str, Function]):
    def __missing__(self, name: str) -> Function:
        raise LibraryError(missing_op(name))


functions_by_namespace: dict[str, dict[str, Function]] = defaultdict(dict)  # and op name
functions: dict[str, Function] = functions_by_namespace.setdefault(DOMAIN, _OwnOps())
"""The ops of twinop's own domain as Python functions, by name. Unlike `torch.ops.custom_domain.*`, they work
under torch.func."""


@dataclass(frozen=True)
class Ops:
    """The ops of a loaded library as attributes: Python functions that work under torch.func."""

    library: Library
    functions: Mapping[str, Function]

    @property
    def records(self) -> dict[str, OpSpec]:
        return self.library.records

    def __getattr__(self, name: str) -> Function:
        if name in self.functions:
            return self.functions[name]
        raise AttributeError(
            f"{self.library.path.name} has no op {name!r}; it has: {', '.join(self.functions)}"
        )


_loaded: dict[tuple[Path, str], Ops] = {}  # by file and namespace
_stamps: dict[Path, tuple[int, int]] = {}  # of these files, when they were loaded
_owners: dict[str, tuple[OpSpec, Path]] = {}  # by the op's name in torch's dispatcher
_without_cpu_kernel: set[str] = set()  # OpSpec.key

# Tensors that no kernel reads. Without these entries, torch's error is a dump of its dispatch table.
_KINDS = {"Sparse": "sparse", "SparseCsr": "sparse compressed", "Quantized": "quantized"}
_FOREIGN_KEYS = {kind + on: text for kind, text in _KINDS.items() for on in ("CPU", "CUDA")} | {
    "MkldnnCPU": "MKL-DNN",
    **dict.fromkeys(("NestedTensorCPU", "NestedTensorCUDA", "AutogradNestedTensor"), "nested"),
}


def records() -> dict[str, OpSpec]:
    """Returns the records of all loaded ops by `OpSpec.key`, `relu` or `mish::mish`: those loaded last."""
    return {record.key: record for record, _ in _owners.values()}


def library_of(record: OpSpec) -> Path | None:
    """Returns the library from which torch has an op."""
    _, path = _owners.get(record.torch_name, (None, None))
    if path is not None:
        _warn_if_replaced(path)
    return path


def _warn_if_replaced(path: Path) -> None:
    """Warns where a file is not the one that was loaded: the loader goes by its path, and keeps the old."""
    with suppress(OSError):
        status = path.stat()
        stamp = status.st_ino, status.st_mtime_ns
        if _stamps.setdefault(path, stamp) != stamp:
            warnings.warn(
                f"{path} was built again after this process loaded it, and torch runs what it loaded then. "
                "Start Python again",
                TwinopWarning,
                stacklevel=3,
            )


def missing_op(name: str) -> str:
    """Returns what to say of an op of twinop's own domain that no loaded library has."""
    said = f"twinop.torch_op has no op {name!r}; loaded ops: {', '.join(sorted(functions))}"
    loaded = {path.stem for _, path in _owners.values()}
    only_relu = "libcustom_relu" in loaded and "libcustom_ops" not in loaded
    return said + (f". ./build.sh demo builds relu alone. {how_to_build()}" if only_relu else "")


def runs_on_cpu(record: OpSpec) -> bool:
    """Whether a loaded op takes CPU tensors: with its kernel, or with the body in its Python module."""
    return has_cpu_kernel(record) or cpu_function(record) is not None


def has_cpu_kernel(record: OpSpec) -> bool:
    """Whether a loaded op has a kernel for the CPU. Without one, each runtime computes its body."""
    return "cpu" in record.devices and record.key not in _without_cpu_kernel


def load(path: str | os.PathLike[str], namespace: str | None = None) -> Ops:
    """Registers the ops of a library with torch, as `torch.ops.<domain>.<op>` ("_" for "." in a domain).

    An op that is already registered, from this file or from another one with the same op, stays unchanged.

    Args:
        namespace: another name in `torch.ops`, so that one process can hold several versions of an op. ONNX
            models have the domain all the same, and `torch.ops.<domain>` is an alias of the namespace that
            was loaded last, unless a library is loaded without one.

    Raises:
        LibraryError: the file is missing, damaged, not a twinop library, or one of another version; or one of
            its ops has a wrong derivative, or is already registered with another schema.
    """
    path = Path(path).resolve()
    key = path, namespace or ""
    _warn_if_replaced(path)
    if key in _loaded:
        for record in _loaded[key].records.values():
            _owners[record.torch_name] = _owners.pop(record.torch_name)  # the last one of its key
        _set_alias(_loaded[key].library, namespace)
        return _loaded[key]
    library = read_library(path)
    warn_if_old(path)
    if namespace is not None:
        named = {name: replace(entry, torch_namespace=namespace) for name, entry in library.records.items()}
        library = replace(library, records=named)
    _set_alias(library, namespace)
    space = namespace or library.domain.replace(".", "_")
    fresh = [record for record in library.records.values() if not _is_registered(record, path)]
    known = functions_by_namespace[space].keys() | functions.keys() | library.records.keys()
    for record in fresh:
        try:
            check_formulas(record, known, torch)
        except RecordError as error:
            raise LibraryError(f"{path}: {error}") from error
    if problem := require_loads(path, str(path)):
        raise LibraryError(f"{path}: cannot be loaded: {problem}")
    try:
        function = ctypes.CDLL(str(path)).twinop_library
    except AttributeError:
        raise LibraryError(
            f"{path}: it has no function twinop_library, which torch needs. Build it again with this twinop"
        ) from None
    except OSError as error:
        raise LibraryError(f"{path}: cannot be loaded: {error}") from error
    schemas = {each.name: each.schema for each in fresh}
    schemas |= {each.functional_name: each.functional_schema for each in fresh}
    lines = "".join(f"{name} {schema}\n" for name, schema in schemas.items())
    pointer = ctypes.cast(function, ctypes.c_void_p)
    message = _adapter().twinop_torch_register(pointer, space.encode(), lines.encode())
    if message is not None:
        raise LibraryError(f"{path}: {message.decode()}")
    for record in fresh:
        _derive(record)
        _owners[record.torch_name] = record, path
    here = functions_by_namespace[space]
    names = [name for each in library.records.values() for name in (each.name, each.functional_name)]
    _loaded[key] = Ops(library, {name: here[name] for name in names})
    return _loaded[key]


def _set_alias(library: Library, namespace: str | None) -> None:
    """Makes `torch.ops.<domain>` mean another namespace, or itself again."""
    usual = library.domain.replace(".", "_")
    if namespace is None:
        if getattr(torch.ops, usual).name != usual:
            delattr(torch.ops, usual)
    elif not any(record.namespace == usual for record, _ in _owners.values()):
        setattr(torch.ops, usual, getattr(torch.ops, namespace))


@cache
def _adapter() -> ctypes.CDLL:
    """`libtwinop_torch.so`, which registers the tables of libraries with torch."""
    path = find_library("twinop_torch")
    try:
        adapter = ctypes.CDLL(str(path))
        adapter.twinop_torch_register.restype = ctypes.c_char_p
    except (AttributeError, OSError) as error:
        raise LibraryError(
            f"{path}: cannot be loaded into torch {torch.__version__}: {error}. {how_to_build()}"
        ) from error
    return adapter


def _is_registered(record: OpSpec, path: Path) -> bool:
    """Returns whether torch has the op. Raises LibraryError if torch has another op of this name."""
    if record.torch_name in _owners:
        other, owner = _owners[record.torch_name]
        if (other.domain, other.schema_hash) == (record.domain, record.schema_hash):
            return True
        said = f"from {owner}, as {other.domain}::{other.schema}"
    elif record.name in functions_by_namespace[record.namespace]:
        raise LibraryError(
            f"{path}: op {record.domain}::{record.schema} runs in this process already, without a "
            "library. Load the library before the op's first call"
        )
    elif hasattr(getattr(torch.ops, record.namespace), record.name):
        said = "by code outside twinop"
    else:
        return False
    raise LibraryError(
        f"{path}: op {record.domain}::{record.schema} is registered already, {said}. One process holds one "
        "definition: load one of the two, or rename the op"
    )


def _derive(record: OpSpec) -> None:
    name, library = record.torch_name, torch_library(record.namespace)
    op = getattr(getattr(torch.ops, record.namespace), record.functional_name).default
    here = functions_by_namespace[record.namespace]
    here[record.functional_name], autograd_kernel, _ = make_function(record, op, ChainMap(here, functions))
    infer = fake_rule(record)

    def fake(*args: Any, **kwargs: Any) -> Any:
        register_sharding_rule(record)  # DTensor runs the fake before it looks for the rule
        return infer(*args, **kwargs)

    torch.library.register_fake(name, fake, lib=library)
    library.impl(record.functional_name, vmap_kernel(record, op), "FuncTorchBatched")
    library.impl(record.functional_name, autograd_kernel, "Autograd")
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
        library.impl(record.functional_name, cpu_rule(record), "CPU")
        _without_cpu_kernel.add(record.key)
    if record.autocast != "keep":
        for device in ("CPU", "CUDA"):
            rule = autocast_rule(record, op, device.lower())
            library.impl(record.functional_name, rule, f"Autocast{device}")
    for each in {record.name, record.functional_name}:
        for key, kind in _FOREIGN_KEYS.items():
            library.impl(each, refuse(record, kind), key)
    if record.written:
        on_cpu = None if has_cpu_kernel(record) else cpu_rule(record)
        here[record.name] = register_mutating(record, library, fake, on_cpu)
