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
    """An address in a tensor. The pointer to an absent input is null."""

    base: str  # "input", "output", "counts" or "temporary"
    index: int
    offset: Expression = ZERO  # in bytes
    name: str = field(default="", compare=False)  # of the kernel's parameter
    dtype: str = field(default="", compare=False)  # of the tensor, as far as a trace knows it: "float32"


@dataclass(frozen=True)
class Scalar:
    """A number."""

    value: Expression
    # "i1", "i8" to "i64", "u8" to "u64", "fp16" to "fp64", "bf16"; "int": each variant has its width.
    type: str
    name: str = ""  # of the kernel's parameter


AnyKernel = TypeVar("AnyKernel")


@dataclass(frozen=True)
class Variant(Generic[AnyKernel]):
    """One specialisation of a kernel; one without requirements is general."""

    # An argument, and "DivisibleBy16" (of a pointer: its address) or "FitsI32".
    requirements: tuple[tuple[int, str], ...]
    # An argument, and `POINTER` or a `Scalar.type`; without constants.
    parameters: tuple[tuple[int, str], ...]
    kernel: AnyKernel  # the index in `Contents.kernels`, or what is to be compiled


@dataclass(frozen=True)
class Launch:
    """Launches the first variant whose requirements hold. The last one must be general."""

    grid: tuple[Expression, Expression, Expression]  # in programs (blocks); a launch of none is left out
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
    """What a call does. The first plan of the op that fits the call is taken."""

    combination: int  # the index in the record's dtype combinations
    ranks: tuple[int | None, ...]  # of the inputs in the schema's order; None for an absent one
    # In order; a trace has launches whose kernels are not compiled yet.
    steps: tuple[AnyLaunch | Fill | Refuse, ...]
    guards: tuple[Expression, ...] = ()  # expressions that all have another value than 0
    # The bytes of each temporary tensor; all live during the whole call.
    temporaries: tuple[Expression, ...] = ()
    # Of tensors that kernels reach through 32-bit offsets: "input" or "output", the index, the most elements.
    limits: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class Image:
    """The code of a kernel for an architecture, and what a launch of this code needs."""

    arch: str  # "80", "90a"
    code: bytes  # a cubin, or a text in PTX for GPUs that no cubin serves
    is_ptx: bool = False
    threads: int = 128  # per block, along x
    shared: int = 0  # bytes of dynamic shared memory
    global_scratch: int = 0  # bytes for each block, aligned to 256


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel; `cooperative` and `pdl` are launch attributes."""

    name: str  # its symbol in the images
    label: str  # its name in messages, "mish_kernel, mish.py:7"
    images: tuple[Image, ...]
    cluster: int = 1  # the blocks of a cluster; a grid counts clusters (Triton's num_ctas)
    cooperative: bool = False
    pdl: bool = False
    scratch_pointers: int = 0  # behind the parameters (Triton: 2); the first is to the global scratch


@dataclass(frozen=True)
class Body:
    """An ONNX model that computes the op on the CPU, for calls of a combination and, if given, of ranks."""

    model: bytes
    combination: int  # as in `Plan`
    ranks: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class DeviceOp:
    """An op, its plans and its bodies."""

    record: OpSpec
    plans: tuple[Plan[Launch], ...]
    bodies: tuple[Body, ...] = ()


@dataclass(frozen=True)
class Contents:
    """What a library has of ops whose kernels are written in Python."""

    domain: str
    ops: tuple[DeviceOp, ...]
    kernels: tuple[Kernel, ...]
    cuda_archs: str  # what the kernels were compiled for, "80,90,120-virtual"
    source: str = ""  # a hash of the source, by which Python sees that a library is outdated
