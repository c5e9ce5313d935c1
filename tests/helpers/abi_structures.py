"""kernels/abi.h in ctypes. It calls a library's launcher like a runtime's adapter."""

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any, ClassVar

import torch

RANGE = ctypes.CFUNCTYPE(None, c_int64, c_int64, c_void_p)
PARALLEL_FOR = ctypes.CFUNCTYPE(None, c_void_p, c_int64, c_int64, RANGE, c_void_p)
SET = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_size_t)
FLOAT32 = 1


class Tensor(Structure):
    _fields_: ClassVar = [
        ("data", c_void_p),
        ("sizes", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("numel", c_int64),
        ("rank", c_size_t),
        ("dtype", c_int32),
        ("present", c_int32),
    ]

    @staticmethod
    def of(tensor: torch.Tensor) -> "Tensor":
        """A view of a contiguous fp32 tensor."""
        sizes = (c_int64 * tensor.dim())(*tensor.shape)
        return Tensor(tensor.data_ptr(), sizes, None, tensor.numel(), tensor.dim(), FLOAT32, 1)


class Attribute(Structure):
    _fields_: ClassVar = [
        ("i", c_int64),
        ("f", c_double),
        ("s", c_char_p),
        ("s_size", c_size_t),
        ("ints", POINTER(c_int64)),
        ("count", c_size_t),
    ]


class Context(Structure):
    _fields_: ClassVar = [
        ("device_type", c_int32),
        ("device_index", c_int32),
        ("stream", c_void_p),
        ("parallel_for", PARALLEL_FOR),
        ("pool", c_void_p),
    ]


class Call(Structure):
    _fields_: ClassVar = [
        ("inputs", POINTER(Tensor)),
        ("outputs", POINTER(Tensor)),
        ("attributes", POINTER(Attribute)),
        ("scratch", c_void_p),
        ("state", c_void_p),
        ("context", POINTER(Context)),
        ("input_count", c_size_t),
        ("counts", POINTER(c_int64)),
    ]


class Error(Structure):
    _fields_: ClassVar = [("set", SET)]


LAUNCH = ctypes.CFUNCTYPE(c_int32, POINTER(Call), POINTER(Error))
TEXTS = [
    "schema",
    "dtypes",
    "shapes",
    "input_shapes",
    "limits",
    "in_place",
    "choices",
    "rows",
    "layout",
    "memory",
]


class Op(Structure):
    _fields_: ClassVar = [
        ("struct_size", c_size_t),
        *((name, c_char_p) for name in TEXTS),
        ("cpu", LAUNCH),
        ("cuda", LAUNCH),
        *((name, c_void_p) for name in ("scratch_size", "create", "destroy", "body")),
        ("row_body", c_int32),
        ("sizes", c_char_p),
        ("two_pass", c_int32),
    ]


class Table(Structure):
    _fields_: ClassVar = [
        ("abi_version", c_uint32),
        ("struct_size", c_uint32),
        ("twinop_version", c_char_p),
        ("domain", c_char_p),
        ("domain_version", c_int32),
        ("cuda_archs", c_char_p),
        ("op_count", c_size_t),
        ("ops", POINTER(POINTER(Op))),
    ]


def read_table(library: Path) -> Any:
    function = ctypes.CDLL(str(library)).twinop_library
    function.restype = POINTER(Table)
    return function(1).contents


def launch_unary(op: Any, x: torch.Tensor, y: torch.Tensor, stream: int = 0) -> str:
    """Launches an op y = f(x) on the tensors' device; returns the text of its failure, or ""."""
    failure: list[bytes] = []
    context = Context(
        int(x.is_cuda),
        x.device.index or 0,
        stream,
        PARALLEL_FOR(lambda pool, count, grain, work, argument: work(0, count, argument)),
        None,
    )
    inputs, outputs = (Tensor * 1)(Tensor.of(x)), (Tensor * 1)(Tensor.of(y))
    attributes = (Attribute * 1)(Attribute(s=b""))
    call = Call(inputs, outputs, attributes, None, None, ctypes.pointer(context), 1)
    error = Error(SET(lambda self, text, size: failure.append(ctypes.string_at(text, size))))
    code = (op.cuda if x.is_cuda else op.cpu)(ctypes.byref(call), ctypes.byref(error))
    assert (code != 0) == bool(failure)
    return failure[0].decode() if failure else ""
