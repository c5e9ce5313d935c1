"""Small ops with kernels that were compiled ahead, and libraries of them."""

import os
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from record_driver import precompiled

from twinop import __version__
from twinop.aot_kernels.expression import as_expression
from twinop.aot_kernels.generate import generate
from twinop.aot_kernels.plan import Contents, DeviceOp, Image, Kernel, Launch, Plan, Variant
from twinop.building.toolchain import find_installation
from twinop.libraries.library import get_include
from twinop.record.op_spec import Attribute, OpSpec
from twinop.record.schema_text import record_of

InProcess = Callable[..., Any]
"""Runs a function of device_calls.py where the CUDA driver is the stand-in."""

LibraryOf = Callable[..., Path]
"""Makes a library of an op and its kernels, or of contents."""

ONE = as_expression(1)
GENERAL = Variant((), (), 0)


def _compiler() -> list[str]:
    macros = {"VERSION": __version__, "CUDA_ARCHS": "none", "CUDA_VERSION": ""}
    flags = ["-std=c++17", "-O0", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", f"-I{get_include()}"]
    defined = [f'-DTWINOP_{macro}="{value}"' for macro, value in macros.items()]
    return [os.environ.get("CXX", "g++"), *flags, *defined]


def compile_library(contents: Contents, folder: Path, name: str) -> Path:
    """Writes the source of contents, and compiles it without optimization."""
    source, library = folder / f"{name}.cpp", folder / f"lib{name}.so"
    generate(contents, source)
    archive = str(find_installation() / "libtwinop_ort.a")
    headers = str(precompiled(("twinop/aot_kernels/op.h",), *_compiler()))
    command = [*_compiler(), "-shared", "-include", headers, str(source), archive, "-ldl"]
    command += ["-Wl,--undefined=RegisterCustomOps,-Bsymbolic,-z,nostart-stop-gc,-z,nodelete"]
    done = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


def cubins(codes: Mapping[str, bytes], **fields: Any) -> tuple[Image, ...]:
    return tuple(Image(arch, code, **fields) for arch, code in codes.items())


KERNEL = Kernel("k|", "k_kernel, k.py:7", cubins({"90": b"cubin 90", "80": b"cubin 80"}))


def contents_of(op: DeviceOp, *kernels: Kernel) -> Contents:
    return Contents("aot", (op,), kernels or (KERNEL,), "80,90")


def several(ops: Iterable[DeviceOp], *kernels: Kernel) -> Contents:
    """A library of ops k0, k1 and so on."""
    named = []
    for i, op in enumerate(ops):
        schema = op.record.schema.replace("k(", f"k{i}(", 1)
        renamed = replace(op.record, name=f"k{i}", onnx_name=f"CustomK{i}", schema=schema)
        named.append(replace(op, record=renamed))
    return replace(contents_of(named[0], *kernels), ops=tuple(named))


def record(
    inputs: int = 1, attributes: tuple[Attribute, ...] = (), dtypes: str = "float32; float16"
) -> OpSpec:
    texts = [f"Tensor x{i}" for i in range(inputs)]
    texts += [f"{entry.kind} {entry.name}" for entry in attributes]
    return record_of(f"k({', '.join(texts)}) -> Tensor", "aot", dtypes=dtypes)


def plan_of(launch: Launch, rank: int = 1, **fields: Any) -> Plan:
    return replace(Plan(0, (rank,), (launch,)), **fields)


def op_of(launch: Launch, rank: int = 1, **fields: Any) -> DeviceOp:
    return DeviceOp(record(), (plan_of(launch, rank, **fields),))
