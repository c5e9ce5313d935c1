"""kernels/abi.h in ctypes. It calls a library's launcher like a runtime's adapter."""

import ctypes
from ctypes import (
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_double,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_void_p,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:  # importing it takes the processes of tests two seconds
    import torch

RANGE = ctypes.CFUNCTYPE(None, c_int64, c_int64, c_void_p)
PARALLEL_FOR = ctypes.CFUNCTYPE(None, c_void_p, c_int64, c_int64, RANGE, c_void_p)
SET = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_size_t)
FLOAT32 = 1


def fields(**types: Any) -> list[tuple[str, Any]]:
    return [*types.items()]


class Tensor(Structure):
    _fields_: ClassVar = fields(
        data=c_void_p, sizes=POINTER(c_int64), strides=POINTER(c_int64), numel=c_int64, rank=c_size_t,
        dtype=c_int32, present=c_int32,
    )  # fmt: skip

    @staticmethod
    def of(tensor: "torch.Tensor") -> "Tensor":
        """A view of a contiguous fp32 tensor."""
        sizes = (c_int64 * tensor.dim())(*tensor.shape)
        return Tensor(tensor.data_ptr(), sizes, None, tensor.numel(), tensor.dim(), FLOAT32, 1)


class Attribute(Structure):
    _fields_: ClassVar = fields(
        i=c_int64, f=c_double, s=c_char_p, s_size=c_size_t, ints=POINTER(c_int64), count=c_size_t
    )


class Context(Structure):
    _fields_: ClassVar = fields(
        device_type=c_int32, device_index=c_int32, stream=c_void_p, parallel_for=PARALLEL_FOR, pool=c_void_p
    )


class Call(Structure):
    _fields_: ClassVar = fields(
        inputs=POINTER(Tensor), outputs=POINTER(Tensor), attributes=POINTER(Attribute), scratch=c_void_p,
        state=c_void_p, context=POINTER(Context), input_count=c_size_t, counts=POINTER(c_int64),
    )  # fmt: skip


class Error(Structure):
    _fields_: ClassVar = [("set", SET)]


LAUNCH = ctypes.CFUNCTYPE(c_int32, POINTER(Call), POINTER(Error))
NAME, TEXT = c_char * 48, c_char_p * 2  # a text: its data and, as a pointer, its size


class Argument(Structure):
    _fields_: ClassVar = fields(
        name=NAME, kind=c_int32, is_written=c_int32, on_host=c_int32, shape=c_int32, shape_text=TEXT,
        has_default=c_int32, default_int=c_int64, default_float=c_double, default_ints=c_int64 * 8,
        default_count=c_size_t, default_text=TEXT,
    )  # fmt: skip


class Output(Structure):
    _fields_: ClassVar = fields(
        name=NAME, shape=c_int32, shape_text=TEXT, in_place=c_int32, is_optional=c_int32
    )


class Limit(Structure):
    _fields_: ClassVar = fields(attribute=c_int32, rule=c_int32, value=c_int64, number=c_double, text=TEXT)


class Node(Structure):
    _fields_: ClassVar = fields(operation=c_int8, index=c_int8, a=c_int8, b=c_int8, value=c_int64, text=TEXT)


class Size(Structure):
    _fields_: ClassVar = fields(name=NAME, bound=c_int32, bound_text=TEXT)


class Rows(Structure):
    _fields_: ClassVar = fields(given=c_int32, to_the_end=c_int32, attribute=c_int32, value=c_int64)


class Op(Structure):
    _fields_: ClassVar = fields(
        struct_size=c_size_t, schema=c_char_p, dtypes=c_char_p, domain=c_char_p, name=NAME, onnx_name=NAME,
        arguments=Argument * 16, input_count=c_size_t, attribute_count=c_size_t,
        outputs=Output * 8, output_count=c_size_t, returned_count=c_size_t,
        input_types=c_int32 * 16 * 16, output_types=c_int32 * 8 * 16, combination_count=c_size_t,
        limits=Limit * 48, limit_count=c_size_t, nodes=Node * 96, node_count=c_size_t,
        sizes=Size * 4, size_count=c_size_t, is_elementwise=c_int32, rows=Rows, cpu=LAUNCH, cuda=LAUNCH,
        scratch_size=c_void_p, create=c_void_p, destroy=c_void_p, body=c_void_p,
        row_body=c_int32, two_pass=c_int32,
    )  # fmt: skip


class Table(Structure):
    _fields_: ClassVar = fields(
        abi_version=c_uint32, struct_size=c_uint32, twinop_version=c_char_p, domain=c_char_p,
        domain_version=c_int32, cuda_archs=c_char_p, op_count=c_size_t, ops=POINTER(POINTER(Op)),
    )  # fmt: skip


def read_table(library: Path, version: int = 2) -> Any:
    """Returns the table of a library; None if it has none."""
    function = ctypes.CDLL(str(library)).twinop_library
    function.restype = POINTER(Table)
    found = function(version)
    return found.contents if found else None


def launch_unary(op: Any, x: "torch.Tensor", y: "torch.Tensor", stream: int = 0) -> str:
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
