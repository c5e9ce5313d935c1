"""Kernels of `numba.cuda.jit`, compiled without a GPU: numba makes PTX, nvJitLink cubins."""

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from ..errors import BuildError
from .expression import constant
from .nvrtc import Compilation, as_sequence
from .plan import POINTER, Image, Kernel, Pointer, Scalar

if TYPE_CHECKING:
    from ..triton.recorder import Recorder
    from ..triton.traced import Argument, TracedLaunch


@contextmanager
def numba_launches(recorder: "Recorder") -> Iterator[None]:
    """Records the launches of numba's kernels while a launcher is traced."""
    from numba.cuda.dispatcher import CUDADispatcher

    def configure(dispatcher: Any, grid: Any, block: Any, *more: Any) -> Callable[..., None]:
        kernel = NumbaKernel(dispatcher.py_func)
        if more and any(more):
            raise BuildError(
                f"{kernel.label}: a launch with a stream or shared memory; a library has its own stream"
            )

        def record(*arguments: Any) -> None:
            named = dict(zip(kernel.function.__code__.co_varnames, arguments, strict=False))
            recorder.launch(kernel, kernel.label, as_sequence(grid), named, block=as_sequence(block))

        return record

    with mock.patch.object(CUDADispatcher, "configure", configure):
        yield


class NumbaKernel:
    """A kernel that numba compiles from a Python function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        code = function.__code__
        self.function = function
        self.label = f"{function.__name__}, {Path(code.co_filename).name}:{code.co_firstlineno}"

    def compile_launch(self, launch: "TracedLaunch", archs: Sequence[int], ptx: bool) -> Compilation:
        """Compiles the kernel for the dtypes and ranks of a launch of it.

        Raises:
            BuildError: numba is absent, or refuses the function for these types.
        """
        try:
            from numba import cuda, types
        except ImportError as error:
            raise BuildError(
                f"{self.label}: numba cannot be imported: {error}. pip install numba-cuda[cu13]"
            ) from None
        signature = types.void(*(_type(argument) for argument in launch.arguments))

        def compiled(arch: int) -> str:
            try:
                text, _ = cuda.compile(
                    self.function, signature, device=False, abi="numba", cc=divmod(arch, 10), output="ptx"
                )
            except Exception as error:  # whatever the function makes numba raise
                raise BuildError(
                    f"{self.label}: numba does not compile it for compute capability {arch}:\n{error}"
                ) from error
            # numba's own name for the kernel counts its compilations.
            (name,) = re.findall(r"\.visible \.entry (\w+)\(", text)
            return str(text).replace(name, self.function.__name__)

        texts = {arch: compiled(arch) for arch in sorted(archs)}
        images = [Image(str(arch), _cubin(text, arch)) for arch, text in texts.items()]
        images += [Image(str(min(archs)), texts[min(archs)].encode(), is_ptx=True)] * ptx
        kernel = Kernel(self.function.__name__, launch.label, tuple(images))
        values = [value for argument in launch.arguments for value in _expanded(argument)]
        parameters = tuple((index, kind) for index, (_, kind) in enumerate(values))
        return tuple(value for value, _ in values), parameters, kernel


def _type(argument: "Argument") -> Any:
    """Returns the type that numba gives an argument of a call: a contiguous array, int64, float64 or bool."""
    from numba import from_dtype, types
    from numba.core.errors import NumbaError
    from numpy import dtype

    if isinstance(argument.value, Pointer):
        try:
            return types.Array(from_dtype(dtype(str(argument.dtype))), len(argument.shape), "C")
        except (TypeError, NumbaError):
            raise BuildError(
                f"{argument.name}: numba has no arrays of {argument.dtype}; leave it out of the op's dtypes"
            ) from None
    return {"int": types.int64, "i1": types.boolean}.get(argument.value.type, types.float64)


def _expanded(argument: "Argument") -> list[tuple[Pointer | Scalar, str]]:
    """Returns the parameters of an argument; of an array: two owners (none), sizes, data and strides."""
    value = argument.value
    if isinstance(value, Scalar):
        return [(value, {"int": "i64", "i1": "i1"}.get(value.type, "fp64"))]
    from numpy import dtype

    def number(expression: Any) -> tuple[Pointer | Scalar, str]:
        return Scalar(expression, "i64", argument.name), "i64"

    item = dtype(str(argument.dtype)).itemsize
    strides = [constant(item)] if argument.shape else []
    for length in reversed(argument.shape[1:]):
        strides.insert(0, strides[0] * length)
    elements = reduce(operator.mul, argument.shape, constant(1))
    owners = [number(constant(0))] * 2
    lengths = [number(each) for each in (*argument.shape, *strides)]
    return [*owners, number(elements), number(constant(item)), (value, POINTER), *lengths]


def _cubin(ptx: str, arch: int) -> bytes:
    from cuda.bindings import nvjitlink

    linker = nvjitlink.create(1, [f"-arch=sm_{arch}"])
    try:
        data = ptx.encode()
        nvjitlink.add_data(linker, nvjitlink.InputType.PTX, data, len(data), "kernel")
        nvjitlink.complete(linker)
        image = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, image)
        return bytes(image)
    finally:
        nvjitlink.destroy(linker)
