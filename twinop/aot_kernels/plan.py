"""Which kernels an op launches for which call, and the kernels. `generate.py` writes it as C++."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..record.op_spec import OpSpec
from .expression import Expression, constant

POINTER = "pointer"
"""The type of a parameter that is a pointer."""

ZERO = constant(0)


@dataclass(frozen=True)
class Pointer:
    """An address in a tensor. The pointer to an absent input is null.

    Attributes:
        base: "input", "output", "counts" or "temporary".
        offset: in bytes.
        name: of the kernel's parameter.
        dtype: of the tensor, as far as a trace knows it: "float32".
    """

    base: str
    index: int
    offset: Expression = ZERO
    name: str = field(default="", compare=False)
    dtype: str = field(default="", compare=False)


@dataclass(frozen=True)
class Scalar:
    """A number.

    Attributes:
        type: "i1", "i8" to "i64", "u8" to "u64", "fp16", "bf16", "fp32" or "fp64"; or "int" for an int whose
            width each variant chooses.
        name: of the kernel's parameter.
    """

    value: Expression
    type: str
    name: str = ""


AnyKernel = TypeVar("AnyKernel")


@dataclass(frozen=True)
class Variant(Generic[AnyKernel]):
    """One specialisation of a kernel.

    Attributes:
        requirements: an argument of the launch and what must hold of it, "DivisibleBy16" (of a pointer: its
            address) or "FitsI32"; none: the variant is general.
        parameters: the kernel's parameters: an argument of the launch and a type, `POINTER` or one of
            `Scalar.type`. Arguments that became constants are left out.
        kernel: the index in `Contents.kernels`, or what is to be compiled.
    """

    requirements: tuple[tuple[int, str], ...]
    parameters: tuple[tuple[int, str], ...]
    kernel: AnyKernel


@dataclass(frozen=True)
class Launch:
    """Launches the first variant whose requirements hold. The last one must be general.

    Attributes:
        grid: in programs (blocks); a launch of none is left out.
    """

    grid: tuple[Expression, Expression, Expression]
    arguments: tuple[Pointer | Scalar, ...]
    variants: tuple[Variant[int], ...]


AnyLaunch = TypeVar("AnyLaunch")


@dataclass(frozen=True)
class Fill:
    """Sets bytes to a value."""

    pointer: Pointer
    bytes: Expression
    value: int = 0


@dataclass(frozen=True)
class Refuse:
    """Ends the call with a message: what the launcher raised for these sizes."""

    message: str


@dataclass(frozen=True)
class Plan(Generic[AnyLaunch]):
    """What a call does. The first plan of the op that fits the call is taken.

    Attributes:
        combination: the index in the record's dtype combinations.
        ranks: of the inputs in the schema's order; None for an absent one.
        steps: run in order; a trace has launches whose kernels are not compiled yet.
        guards: expressions that all have another value than 0.
        temporaries: the bytes of each temporary tensor; all live during the whole call.
        limits: of tensors that kernels reach through 32-bit offsets: "input" or "output", the index, and how
            many elements it may have.
    """

    combination: int
    ranks: tuple[int | None, ...]
    steps: tuple[AnyLaunch | Fill | Refuse, ...]
    guards: tuple[Expression, ...] = ()
    temporaries: tuple[Expression, ...] = ()
    limits: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class Image:
    """The code of a kernel for an architecture, and what a launch of this code needs.

    Attributes:
        arch: "80", "90a".
        code: a cubin, or a text in PTX for GPUs that no cubin serves.
        threads: per block, along x.
        shared: the bytes of dynamic shared memory.
        global_scratch: bytes for each block, aligned to 256.
    """

    arch: str
    code: bytes
    is_ptx: bool = False
    threads: int = 128
    shared: int = 0
    global_scratch: int = 0


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes:
        name: its symbol in the images.
        label: its name in messages, "mish_kernel, mish.py:7".
        cluster: the blocks of a cluster; a grid counts clusters (Triton's num_ctas).
        cooperative, pdl: launch attributes.
        scratch_pointers: pointers that follow the parameters (Triton: 2). The first is to the global scratch.
    """

    name: str
    label: str
    images: tuple[Image, ...]
    cluster: int = 1
    cooperative: bool = False
    pdl: bool = False
    scratch_pointers: int = 0


@dataclass(frozen=True)
class Body:
    """An ONNX model that computes the op, for the CPU.

    `combination`, `ranks`: the calls that it is for, as in `Plan`; without ranks: all.
    """

    model: bytes
    combination: int
    ranks: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class DeviceOp:
    """An op, its plans and its bodies."""

    record: OpSpec
    plans: tuple[Plan[Launch], ...]
    bodies: tuple[Body, ...] = ()


@dataclass(frozen=True)
class Contents:
    """What a library has of ops whose kernels are written in Python.

    Attributes:
        cuda_archs: what the kernels were compiled for, "80,90,120-virtual".
        source: a hash of the source, by which Python sees that a library is outdated.
    """

    domain: str
    ops: tuple[DeviceOp, ...]
    kernels: tuple[Kernel, ...]
    cuda_archs: str
    domain_version: int = 1
    source: str = ""
