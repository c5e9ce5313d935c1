"""Writes a payload as bytes, which `kernels/aot_kernels/payload.cpp` reads.

In the tables, numbers are little-endian, texts and lists have their length before them, and images are
referred to by their place. Records are there, and as JSON for `twinop/library.py`.
"""

import json
import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cache
from typing import TypeVar

import twinop

from ..errors import BuildError
from ..library import ABI_VERSION
from ..module_texts import HEADER, seal
from ..record import Record
from .expression import Expression, Opcode
from .plan import (
    POINTER,
    SCALAR_TYPES,
    Body,
    DeviceOp,
    Fill,
    Image,
    Kernel,
    Launch,
    Payload,
    Plan,
    Pointer,
    Refuse,
    Scalar,
    Variant,
)

MAX_OPS = 64
"""The ops that a payload can hold."""

_MAX_ARGUMENTS, _MAX_TEMPORARIES, _MAX_DEPTH = 128, 64, 64  # of a launch, a plan, an expression

T = TypeVar("T")

_TEXTS = (
    "schema", "dtypes", "shapes", "input_shapes", "limits", "in_place", "choices", "rows", "layout", "memory",
)  # fmt: skip
_BASES = ("input", "output", "temporary")
_REQUIREMENTS = ("divisible_by_16", "fits_i32")
_TYPES = (POINTER, *SCALAR_TYPES)
_DTYPES = (  # as kernels/abi.h numbers them
    "none", "float32", "float16", "bfloat16", "float64", "int8", "int16", "int32", "int64", "uint8", "bool",
    "complex64", "complex128", "uint16", "uint32", "uint64",
)  # fmt: skip


def encode(payload: Payload) -> bytes:
    """Returns the payload as a library carries it.

    Raises:
        BuildError: more ops than a library can have, an op that takes a list of tensors, or one whose plan
            is too large.
    """
    if len(payload.ops) > MAX_OPS:
        raise BuildError(
            f"{len(payload.ops)} ops in one library, at most {MAX_OPS} are supported. Build several libraries"
        )
    for op in payload.ops:
        if op.record.has_repeated_input:
            raise BuildError(f"{op.record.name}: kernels in Python take no list of tensors (Tensor[])")
    texts = b"".join(json.dumps(fields).encode() + b"\0" for fields in _texts(payload))
    texts += bytes(-(HEADER.size + len(texts)) % 16)
    # The size of the tables does not depend on where the images lie.
    end = HEADER.size + len(texts) + len(_Writer(payload, 0).tables)
    padding = bytes(-end % 16)
    writer = _Writer(payload, end + len(padding))
    return seal(texts, bytes(writer.tables), padding + bytes(writer.images))


def _texts(payload: Payload) -> Iterable[dict[str, object]]:
    yield {
        "twinop": twinop.__version__,
        "abi": ABI_VERSION,
        "domain": payload.domain,
        "domain_version": payload.domain_version,
        "cuda_archs": payload.cuda_archs,
        "cuda_version": payload.cuda_version,
        "source": payload.source,
    }
    for op in payload.ops:
        yield _record_fields(op)


def _record_fields(op: DeviceOp) -> dict[str, object]:
    """The fields that `Record.from_json` reads."""
    fields = asdict(op.record)
    for name in ("domain", "domain_version", "torch_namespace"):
        del fields[name]
    fields["attributes"] = [
        {"name": entry.name, "kind": entry.kind}
        | ({} if entry.default_text is None else {"default": entry.default_text})
        for entry in op.record.attributes
    ]
    fields["devices"] = [*(["cpu"] if op.bodies else []), *(["cuda"] if op.plans else [])]
    return fields


class _Writer:
    """Writes the tables, and the images, which begin at `images_offset` of the payload."""

    def __init__(self, payload: Payload, images_offset: int) -> None:
        self.tables, self.images = bytearray(), bytearray()
        self._offset = images_offset
        self._places: dict[bytes, int] = {}
        self._text(payload.domain)
        self._pack("i", payload.domain_version)
        self._text(payload.cuda_archs)
        self._list(payload.kernels, self._kernel)
        self._list(payload.ops, self._op)

    def _pack(self, format: str, *values: int | float) -> None:
        self.tables += struct.pack(f"<{format}", *values)

    def _text(self, text: str) -> None:
        data = text.encode()
        self._pack("I", len(data))
        self.tables += data + b"\0"

    def _list(self, items: Iterable[T], write: Callable[[T], None]) -> None:
        entries = list(items)
        self._pack("I", len(entries))
        for entry in entries:
            write(entry)

    def _bytes(self, data: bytes) -> None:
        if data not in self._places:
            self._places[data] = self._offset + len(self.images)
            self.images += data + bytes(-len(data) % 16)
        self._pack("QQ", self._places[data], len(data))

    def _kernel(self, kernel: Kernel) -> None:
        self._text(kernel.name)
        self._text(kernel.label)
        self._list(kernel.images, self._image)
        self._pack("IBBB", kernel.cluster, kernel.cooperative, kernel.pdl, kernel.scratch_pointers)

    def _image(self, image: Image) -> None:
        is_specific = image.arch.endswith("a")
        self._pack("iBB", int(image.arch.rstrip("a")), is_specific, image.is_ptx)
        self._pack("IIQ", image.threads, image.shared, image.global_scratch)
        data = image.code.rstrip(b"\0") + b"\0" if image.is_ptx else image.code  # a text in C
        packed = _packed(data)
        self._bytes(packed)
        self._pack("QI", len(data), zlib.crc32(packed))

    def _op(self, op: DeviceOp) -> None:
        self._record = op.record
        for name in _TEXTS:
            self._text(getattr(op.record, name))
        self._list(_input_dtypes(op.record), lambda codes: self._list(codes, lambda c: self._pack("B", c)))
        self._list(op.plans, self._plan)
        self._list(op.bodies, self._body)

    def _body(self, body: Body) -> None:
        self._pack("bB", -1 if body.combination is None else body.combination, body.ranks is None)
        self._ranks(body.ranks or ())
        self._bytes(body.model)

    def _ranks(self, ranks: Iterable[int | None]) -> None:
        self._list(ranks, lambda rank: self._pack("b", -1 if rank is None else rank))

    def _plan(self, plan: Plan) -> None:
        self._check(len(plan.temporaries), _MAX_TEMPORARIES, "temporary tensors in one call")
        self._pack("B", plan.combination)
        self._ranks(plan.ranks)
        self._list(plan.guards, self._expression)
        self._list(plan.temporaries, self._expression)
        self._list(
            plan.limits,
            lambda limit: self._pack("BBq", _BASES.index(limit.base), limit.index, limit.elements),
        )
        self._list(plan.steps, self._step)

    def _step(self, step: Launch | Fill | Refuse) -> None:
        if isinstance(step, Launch):
            self._pack("B", 0)
            for size in step.grid:
                self._expression(size)
            self._list(step.block or (), self._expression)
            self._check(len(step.arguments), _MAX_ARGUMENTS, "arguments in a launch of a kernel")
            self._list(step.arguments, self._argument)
            assert step.variants and not step.variants[-1].requirements, "the last variant is not general"
            self._list(step.variants, self._variant)
        elif isinstance(step, Fill):
            self._pack("B", 1)
            self._argument(step.pointer)
            self._expression(step.bytes)
            self._pack("B", step.value)
        else:
            self._pack("B", 2)
            self._text(step.message)

    def _argument(self, argument: Pointer | Scalar) -> None:
        if isinstance(argument, Pointer):
            self._pack("BB", _BASES.index(argument.base), argument.index)
            self._expression(argument.offset)
        else:
            self._pack("B", len(_BASES))
            self._text(argument.name)
            self._expression(argument.value)

    def _variant(self, variant: Variant) -> None:
        self._list(
            variant.requirements,
            lambda entry: self._pack("BB", entry.argument, _REQUIREMENTS.index(entry.kind)),
        )
        self._list(variant.parameters, lambda entry: self._pack("BB", entry[0], _TYPES.index(entry[1])))
        self._pack("I", variant.kernel)

    def _expression(self, expression: Expression) -> None:
        self._check(expression.depth, _MAX_DEPTH, "values at once in a formula")
        self._pack("I", len(expression.code))
        for opcode, operand in expression.code:
            self._pack("B", opcode)
            if opcode is Opcode.CONSTANT_INT:
                self._pack("q", operand)
            elif opcode is Opcode.CONSTANT_FLOAT:
                self._pack("d", operand)
            elif opcode is Opcode.SIZE:
                self._pack("BB", *operand)
            elif opcode is Opcode.ATTRIBUTE:
                self._pack("BB", operand, self._record.attributes[operand].kind == "float")
            elif opcode is Opcode.TEXT_IS:
                self._pack("B", operand[0])
                self._text(operand[1])

    def _check(self, count: int, most: int, what: str) -> None:
        if count > most:
            raise BuildError(f"{self._record.name}: {count} {what}, at most {most} are supported")


@cache
def _packed(data: bytes) -> bytes:
    """Returns an LZ4 block, or the bytes as they are where it would not be smaller, or without lz4."""
    try:
        import lz4.block  # type: ignore[import-untyped]
    except ImportError:
        return data
    block: bytes = lz4.block.compress(data, mode="high_compression", compression=12, store_size=False)
    return block if len(block) < len(data) else data


def _input_dtypes(record: Record) -> list[list[int]]:
    """The numbers of the inputs' dtypes in each combination."""
    return [
        [_DTYPES.index(combination[entry.name]) for entry in record.inputs]
        for combination in record.combinations
    ]
