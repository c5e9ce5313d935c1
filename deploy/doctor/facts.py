"""Looks at this machine: GPUs, compilers, torch, ONNX Runtime, libraries and a model, and changes nothing."""

import importlib.util
import json
import re
import subprocess
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from twinop.building.toolchain import Compiler, Gpu, Nvcc, find_compiler, find_gpus, find_nvcc
from twinop.errors import ForeignLibraryError, TwinopError, TwinopWarning
from twinop.libraries.find import Package, installed_packages, project_libraries
from twinop.libraries.library import Library, library_folders, read_library
from twinop.system import python_child

from .. import cuda
from ..choose_library import choose_libraries
from ..custom_nodes import Model, load_model

T = TypeVar("T")
_SECONDS = 120  # for one question to another process
_ELSEWHERE = {"AzureExecutionProvider"}  # runs models of another machine


@dataclass(frozen=True)
class Runtime:
    """The ONNX Runtime that Python imports.

    Attributes:
        problem: why it cannot be imported.
        providers: by name, why the provider does not run a node, or "".
        cuda_plugin: the version of the CUDA provider where it is a plugin, or "".
        unavailable_reasons: why it cannot use the GPU, with the libraries of the facts.
    """

    version: str = ""
    problem: str = ""
    providers: dict[str, str] = field(default_factory=dict)
    cuda_plugin: str = ""
    unavailable_reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Torch:
    """The installed torch. `cuda`: the CUDA version that it was built with, or ""."""

    version: str
    cuda: str


@dataclass(frozen=True)
class Environment:
    """What the checks look at. A `..._problem` is the message of the error that was found instead of a fact.

    Attributes:
        driver_cuda: the newest CUDA that the driver serves (13000 is 13.0), or None without a driver.
        smi_problem: why nvidia-smi does not list the GPUs.
        libraries: those that a session of the model would register; without a model, all that are found.
        named: the library that the user named.
        broken: the messages about libraries that cannot be read or found.
    """

    driver_cuda: int | None = None
    gpus: tuple[Gpu, ...] = ()
    smi_problem: str = ""
    compiler: Compiler | None = None
    compiler_problem: str = ""
    nvcc: Nvcc | None = None
    nvcc_problem: str = ""
    torch: Torch | None = None
    runtime: Runtime | None = None
    packages: tuple[Package, ...] = ()
    libraries: tuple[Library, ...] = ()
    named: Path | None = None
    broken: tuple[str, ...] = ()
    model: Model | None = None
    model_problem: str = ""


def collect(
    model: Path | None = None, library: Path | None = None, allow_model_libraries: bool = False
) -> Environment:
    """Returns the facts about this machine, and about a model and a library if they are named."""
    loaded, model_problem = _tried(load_model, model) if model is not None else (None, "")
    compiler, compiler_problem = _tried(find_compiler)
    nvcc, nvcc_problem = _tried(find_nvcc)
    gpus, smi_problem = find_gpus()
    if loaded is not None:
        chosen, problem = _tried(_choose, loaded, library, allow_model_libraries)
        libraries, broken = chosen or (), (problem,) * bool(problem)
    else:
        libraries, broken = _libraries(library)
    return Environment(
        driver_cuda=cuda.driver_version(),
        gpus=gpus,
        smi_problem=smi_problem,
        compiler=compiler,
        compiler_problem=compiler_problem,
        nvcc=nvcc,
        nvcc_problem=nvcc_problem,
        torch=_torch(),
        runtime=_runtime(libraries),
        packages=tuple(installed_packages()),
        libraries=libraries,
        named=library,
        broken=broken,
        model=loaded,
        model_problem=model_problem,
    )


def _tried(function: Callable[..., T], *arguments: Any) -> tuple[T | None, str]:
    """Returns the result, or the message of the error."""
    try:
        return function(*arguments), ""
    except TwinopError as error:
        return None, str(error)


def _torch() -> Torch | None:
    """Reads the module of torch that holds its version: an import of torch takes seconds, and may fail."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    text = file.read_text() if file.is_file() else ""
    said = dict(re.findall(r"^(__version__|cuda)\b.*= '(.*)'", text, re.MULTILINE))
    return Torch(said.get("__version__", "unknown"), said.get("cuda", ""))


def _runtime(libraries: Sequence[Library]) -> Runtime | None:
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    answer, problem = _ask("describe", *(str(library.path) for library in libraries))
    if problem:
        return Runtime(problem=problem)
    facts = json.loads(answer.splitlines()[-1])
    names = dict.fromkeys(
        (*facts["providers"], *facts["plugins"], *([cuda.CUDA] if facts["cuda_plugin"] else []))
    )
    return Runtime(
        version=facts["version"],
        providers={name: _ask("run", name)[1] for name in names if name not in _ELSEWHERE},
        cuda_plugin=facts["cuda_plugin"],
        unavailable_reasons=tuple(facts["unavailable_reasons"]),
    )


def _ask(*arguments: str) -> tuple[str, str]:
    """Runs `probe`. Returns its answer, and what went wrong."""
    command = python_child.module("twinop.deploy.doctor.probe", *arguments)
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {_SECONDS} s"
    if done.returncode < 0:
        return "", f"the process ended with signal {-done.returncode}"
    lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it ended without a message"]
    logged = next((line.partition("] ")[2] for line in lines if "[E:onnxruntime" in line), "")
    return done.stdout.decode(), (logged or lines[-1]) if done.returncode else ""


def _choose(model: Model, named: Path | None, allow_model_libraries: bool) -> tuple[Library, ...]:
    """Returns what a session registers. The checks say themselves if a library is old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TwinopWarning)
        return tuple(choose_libraries(model, named, allow_model_libraries=allow_model_libraries))


def _libraries(named: Path | None) -> tuple[tuple[Library, ...], tuple[str, ...]]:
    libraries, broken = [], []
    paths = [*([named] if named is not None else []), *project_libraries()]
    paths += [file for folder in library_folders() for file in sorted(folder.glob("lib*.so"))]
    for path in dict.fromkeys(paths):
        try:
            libraries.append(read_library(path))
        except ForeignLibraryError as error:
            broken += [str(error)] if path == named else []
        except TwinopError as error:
            broken.append(str(error))
    return tuple(libraries), tuple(broken)
