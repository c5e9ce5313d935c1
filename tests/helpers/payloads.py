"""Small ops whose kernels are device modules."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from twinop.aot_kernels.plan import DeviceOp, Image, Kernel, Launch, Payload, Plan, Variant, as_expression
from twinop.record import Attribute, Input, Record

InProcess = Callable[..., Any]
"""Runs a function of device_calls.py where the CUDA driver is the stand-in."""

Packed = Callable[..., Path]
"""Makes a library of an op and its kernels, or of a payload."""

ONE = as_expression(1)
GENERAL = Variant((), (), 0)


def cubins(codes: Mapping[str, bytes], **fields: Any) -> tuple[Image, ...]:
    return tuple(Image(arch, code, **fields) for arch, code in codes.items())


KERNEL = Kernel("k|", "k_kernel, k.py:7", cubins({"90": b"cubin 90", "80": b"cubin 80"}))


def payload_of(op: DeviceOp, *kernels: Kernel) -> Payload:
    return Payload("packed", (op,), kernels or (KERNEL,), "80,90")


def record(
    inputs: int = 1, attributes: tuple[Attribute, ...] = (), dtypes: str = "float32; float16"
) -> Record:
    names = [f"x{i}" for i in range(inputs)]
    texts = [f"Tensor {name}" for name in names]
    texts += [f"{entry.kind} {entry.name}" for entry in attributes]
    return Record(
        name="k",
        onnx_name="CustomK",
        schema=f"k({', '.join(texts)}) -> Tensor",
        inputs=tuple(map(Input, names)),
        attributes=attributes,
        outputs=("y",),
        dtypes=dtypes,
        domain="packed",
    )


def plan_of(launch: Launch, rank: int = 1, **fields: Any) -> Plan:
    return replace(Plan(0, (rank,), (launch,)), **fields)


def op_of(launch: Launch, rank: int = 1, **fields: Any) -> DeviceOp:
    return DeviceOp(record(), (plan_of(launch, rank, **fields),))
