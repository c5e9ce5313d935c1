"""Kernels in CUDA C++ that NVRTC compiles: neither nvcc nor a GPU is needed."""

import linecache
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from ..errors import BuildError
from .plan import POINTER, Image, Kernel, Pointer

if TYPE_CHECKING:
    from ..triton.recorder import Recorder
    from ..triton.traced import TracedLaunch

_PTX_TYPES = {"u8": "u8", "u16": "i16", "u32": "i32", "u64": "i64", "f32": "fp32", "f64": "fp64"}

Parameters = tuple[tuple[int, str], ...]
"""As in `plan.Variant`."""


def cuda_kernel(source: str, name: str, *options: str) -> "CudaKernel":
    """Makes a kernel of CUDA C++: the launcher of an op launches it by `kernel[grid, block](x, y, n)`.

    Args:
        source: the text, with `extern "C" __global__ void name(...)`.
        name: the kernel's name.
        options: of NVRTC, such as "--std=c++17".
    """
    frame = sys._getframe(1)
    return CudaKernel(source, name, options, frame.f_code.co_filename, frame.f_lineno)


@contextmanager
def cuda_launches(recorder: "Recorder") -> Iterator[None]:
    """Records the launches of these kernels while a launcher is traced."""

    def run(kernel: CudaKernel, *arguments: Any, grid: Any, block: Any) -> None:
        named = {f"argument {index + 1}": value for index, value in enumerate(arguments)}
        recorder.launch(kernel, kernel.label, grid, named, block=block)

    with mock.patch.object(CudaKernel, "run", run):
        yield


class CudaKernel:
    """A kernel of CUDA C++ (`cuda_kernel`)."""

    def __init__(self, source: str, name: str, options: Sequence[str], file: str, line: int) -> None:
        text = "".join(linecache.getlines(file))
        before = text.partition(source)[0] if source in text else "\n" * (line - 1)
        self.source, self.name, self.options = source, name, tuple(options)
        self.file, self.line = Path(file).name, before.count("\n") + 1
        self.label = f"{name}, {self.file}:{line}"

    def __getitem__(self, place: tuple[Any, Any]) -> Callable[..., None]:
        grid, block = place
        return lambda *arguments: self.run(*arguments, grid=grid, block=block)

    def run(self, *arguments: Any, grid: Any, block: Any) -> None:
        """Raises BuildError: the kernel runs in a library. It is replaced while a launcher is traced."""
        raise BuildError(f"{self.label}: it runs in a library. Build the op's file with `twinop build` first")

    def compile_launch(
        self, launch: "TracedLaunch", archs: Sequence[int], ptx: bool
    ) -> tuple[Parameters, Kernel]:
        """Compiles the kernel for a launch of it.

        Raises:
            BuildError: the source does not compile, or its parameters are not those of the launch.
        """
        text = self._compile(f"compute_{min(archs)}", "PTX").rstrip(b"\0")
        kernel = Kernel(
            self.name,
            launch.label,
            tuple(Image(str(arch), self._compile(f"sm_{arch}", "CUBIN")) for arch in archs)
            + ((Image(str(min(archs)), text, is_ptx=True),) if ptx else ()),
        )
        return self._parameters(text.decode(), launch), kernel

    def _parameters(self, ptx: str, launch: "TracedLaunch") -> Parameters:
        """Reads the types of the parameters: the source alone says how wide ints are."""
        found = re.search(rf"\.entry {re.escape(self.name)}\(([^)]*)\)", ptx)
        if not found:
            raise BuildError(
                f'{launch.label}: the source has no kernel of this name. Expected extern "C" __global__ void '
                f"{self.name}(...)"
            )
        types = re.findall(r"\.param (?:\.align \d+ )?\.(\w+)", found[1])
        if len(types) != (count := len(launch.arguments)):
            raise BuildError(
                f"{launch.label}: {launch.line} gives it {count} arguments; expected {len(types)}"
            )
        parameters = []
        for index, (kind, argument) in enumerate(zip(types, launch.arguments, strict=True)):
            if isinstance(argument, Pointer):
                given, expected = "a tensor", {"u64": POINTER}
            else:
                given, expected = f"a number of type {argument.type}", _PTX_TYPES
                if argument.type.startswith("fp"):
                    expected = {name: value for name, value in _PTX_TYPES.items() if value.startswith("fp")}
            if kind not in expected:
                raise BuildError(
                    f"{launch.label}: {launch.line} gives {given} as argument {index + 1}; its parameter has "
                    f"the type {kind} in PTX"
                )
            parameters.append((index, expected[kind]))
        return tuple(parameters)

    def _compile(self, target: str, form: str) -> bytes:
        try:
            from cuda.bindings import nvrtc
        except ImportError as error:
            raise BuildError(
                f"{self.label}: NVRTC cannot be imported: {error}. pip install cuda-bindings[all]"
            ) from None
        source = f'#line {self.line} "{self.file}"\n{self.source}'
        _, program = nvrtc.nvrtcCreateProgram(source.encode(), self.file.encode(), 0, [], [])
        options = [f"--gpu-architecture={target}", *self.options]
        (failed,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if failed:
            log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0").decode()
            raise BuildError(f"{self.label}: it does not compile for {target}:\n{log}")
        return _read(nvrtc, program, form)


def _read(nvrtc: Any, program: Any, what: str) -> bytes:
    _, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    buffer = b" " * size  # the binding writes into it
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer
