"""`twinop doctor`: say what is wrong with a machine, a library or a model, and the cure."""

import dataclasses
import importlib.util
import json
import re
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from twinop.building.toolchain import find_compiler, find_gpus, find_nvcc
from twinop.cli.console import out
from twinop.errors import ForeignLibraryError, TwinopError, TwinopWarning
from twinop.installation import version_numbers
from twinop.libraries.built import changed_since
from twinop.libraries.find import project_libraries
from twinop.libraries.library import Library, library_folders, read_library

from . import cuda
from .check_nodes import require_fit
from .choose_library import choose_libraries
from .custom_nodes import load_model
from .ort_process import SERVER, time_limit

_OLDEST_TORCH = (2, 10)
_SECONDS = 120  # for one question to another process
_ELSEWHERE = "AzureExecutionProvider"  # runs models of another machine
_NODE = '<ir_version: 8, opset_import: ["": 14]> probe (float[4] x) => (float[4] y) { y = Add(x, x) }'
_STYLES = {"OK": "green", "warning": "yellow", "error": "bold red"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is as it is, and for a warning or an error what to do. `subject` is what it is about."""

    level: Literal["OK", "warning", "error"]
    subject: str
    text: str


ok, warning, error = partial(Finding, "OK"), partial(Finding, "warning"), partial(Finding, "error")


def main(
    model: Annotated[Path | None, typer.Argument(help="An .onnx file.")] = None,
    library: Annotated[Path | None, typer.Argument(help="The .so file to check the model with.")] = None,
    allow_model_libraries: Annotated[
        bool, typer.Option("--allow-model-libraries", help="Look at those in the model's own folder too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what is wrong with this machine, a library or a model, and the cure.

    Looks at the NVIDIA driver, the compilers, torch, ONNX Runtime and its
    providers, and the custom-op libraries. A model's custom nodes are compared
    with them, and ONNX Runtime opens it in another process. Changes nothing,
    and needs neither torch nor ONNX Runtime. The exit code is 1 if there is an
    error.

    Examples:

        twinop doctor

        twinop doctor net.onnx build/libmish.so

        twinop doctor net.onnx --json
    """
    if library is None and model is not None and model.suffix == ".so":
        model, library = None, model
    findings = list(examine(model, library, allow_model_libraries))
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    for each in findings if not as_json else ():
        out.print(each.level, style=_STYLES[each.level], end="")
        out.print(f": {each.subject}: {each.text}", soft_wrap=True)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


def examine(model: Path | None, named: Path | None, allow_model_libraries: bool = False) -> Iterator[Finding]:
    """Yields what there is to say about this machine, and about a model and a library if they are named."""
    gpus, problem = find_gpus()
    if problem:
        cure = "Install the NVIDIA driver again and reboot; in a container, start it with --gpus all"
        yield error("driver", f"nvidia-smi fails: {' '.join(problem.split())}. {cure}")
    else:
        names = ", ".join(f"{gpu.name} (compute_{gpu.capability})" for gpu in gpus)
        serves = cuda.cuda_text(cuda.driver_version() or 0)
        yield ok("driver", f"{names}; the driver serves CUDA {serves}" if gpus else "no NVIDIA GPU")
    yield from _compilers(gpus)
    yield from _torch(bool(gpus))
    libraries = []
    for found in _libraries(named):
        if isinstance(found, Library):
            libraries.append(found)
        else:
            yield found
    yield from _runtime(bool(gpus), libraries)
    if model is not None:
        yield from _model(model, named, allow_model_libraries)


def _compilers(gpus: Any) -> Iterator[Finding]:
    try:
        yield ok("compiler", find_compiler())
    except TwinopError as problem:
        yield warning("compiler", str(problem))
    try:
        nvcc = find_nvcc()
    except TwinopError as problem:
        yield error("nvcc", str(problem))
        return
    if nvcc is None:
        if gpus:
            cure = "Install the CUDA toolkit, and put nvcc on PATH or set CUDACXX to it"
            yield warning("nvcc", f"no nvcc found: twinop build builds for the CPU only. {cure}")
        return
    yield ok("nvcc", f"{nvcc.path} is CUDA {nvcc.version}, for {', '.join(nvcc.known)}")


def _torch(has_gpu: bool) -> Iterator[Finding]:
    """Reads the module of torch that holds its version: an import of torch takes seconds, and may fail."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        yield ok("torch", "not installed: only training and export need it")
        return
    file = Path(spec.origin).with_name("version.py")
    text = file.read_text() if file.is_file() else ""
    said = dict(re.findall(r"^(__version__|cuda)\b.*= '(.*)'", text, re.MULTILINE))
    version, built_for = said.get("__version__", "0"), said.get("cuda", "")
    if version_numbers(version) < _OLDEST_TORCH:
        yield error("torch", f"torch {version} is too old: pip install -U 'torch>=2.10'")
    elif has_gpu and not built_for:
        cure = "pip uninstall -y torch && pip install torch (pytorch.org names the index for your CUDA)"
        yield warning("torch", f"torch {version} is a build for the CPU, and this machine has a GPU. {cure}")
    else:
        yield ok("torch", f"torch {version}, CUDA: {built_for or 'none'}")


def _libraries(named: Path | None) -> Iterator[Library | Finding]:
    paths = [*([named] if named is not None else []), *project_libraries()]
    paths += [file for folder in library_folders() for file in sorted(folder.glob("lib*.so"))]
    for path in dict.fromkeys(paths):
        try:
            library = read_library(path)
        except TwinopError as problem:
            if path == named or not isinstance(problem, ForeignLibraryError):
                yield Finding("error" if path == named else "warning", "library", str(problem))
            continue
        yield library
        yield ok(
            "library",
            f"{path}: domain {library.domain} {library.domain_version}, twinop {library.version}, "
            f"{len(library.by_onnx_name)} ops, GPU code for {library.cuda_archs or 'none'}",
        )
        if said := changed_since(path):
            yield warning("library", said)
        if not library.exports_ort:
            yield warning("library", f"{path} does not export RegisterCustomOps: twinop build links it")


def _runtime(has_gpu: bool, libraries: list[Library]) -> Iterator[Finding]:
    wheel = "onnxruntime-gpu" if has_gpu else "onnxruntime"
    if importlib.util.find_spec("onnxruntime") is None:
        yield warning("onnxruntime", f"not installed: models cannot be run or served. pip install {wheel}")
        return
    try:
        with time_limit(_SECONDS):
            version, *names = SERVER.run(_describe)
    except TwinopError as problem:
        cure = f"pip uninstall -y onnxruntime onnxruntime-gpu && pip install {wheel}"
        yield error("onnxruntime", f"it cannot be imported: {problem}. {cure}")
        return
    yield ok("onnxruntime", f"onnxruntime {version} with {', '.join(names)}")
    for name in names:
        if name == cuda.CUDA and not has_gpu:
            yield ok(name, "not used: this machine has no GPU")
        elif name != _ELSEWHERE:
            try:
                with time_limit(_SECONDS):
                    problems = SERVER.run(_run_node, name, libraries)
            except TwinopError as problem:
                problems = [str(problem)]
                SERVER.close()  # a GPU's error may stay in the process
            yield from (warning(name, each) for each in problems)
            yield from () if problems else (ok(name, "runs a node"),)


def _describe() -> Iterator[str]:
    """Yields ONNX Runtime's version and its providers, in another process: a crash there ends nothing."""
    import onnxruntime

    yield onnxruntime.__version__
    yield from onnxruntime.get_available_providers()


def _run_node(provider: str, libraries: list[Library]) -> Iterator[str]:
    """Runs a node on a provider, in another process; yields what keeps the libraries from the GPU."""
    import onnx

    from .create_session import session

    if provider == cuda.CUDA and (found := cuda.unavailable_reasons(0, libraries)):
        yield from found
        return
    session(onnx.parser.parse_model(_NODE), [provider]).run({"x": np.ones(4, np.float32)})


def _open(path: Path, named: Path | None, allow: bool) -> Iterator[str]:
    """Opens a session, in another process; yields its device, and what it warns of."""
    from .create_session import choose_providers, open_session, with_kernels

    model = load_model(path)
    libraries = choose_libraries(model, named, allow_model_libraries=allow)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TwinopWarning)
        choice = choose_providers(None, libraries)
        opened = open_session(model, with_kernels(model, libraries, choice), choice)
    yield opened.device
    yield from (str(each.message) for each in caught)


def _model(path: Path, named: Path | None, allow_model_libraries: bool) -> Iterator[Finding]:
    try:
        model = load_model(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TwinopWarning)  # `_libraries` says it
            libraries = choose_libraries(model, named, allow_model_libraries=allow_model_libraries)
        require_fit(model, libraries)
    except TwinopError as problem:
        yield error("model", str(problem).replace("(--library ", f"(twinop doctor {path} "))
        return
    imports = dict.fromkeys(f"{each.domain or 'ai.onnx'} {each.version}" for each in model.proto.opset_import)
    nodes = sorted({"::".join(node.node_type) for node in model.nodes})
    yield ok("model", f"{path}: {', '.join(imports)}; custom nodes: {', '.join(nodes) or 'none'}")
    for library in libraries:
        yield ok("model", f"its nodes of {library.domain} fit {library.path}")
    known = {(library.domain, op) for library in libraries for op in library.by_onnx_name}
    for domain, op in sorted({node.node_type for node in model.nodes} - known):
        cure = "Build it (twinop build), install its package, or name its library"
        yield warning("model", f"no library has {domain}::{op}: its function body runs, slower. {cure}")
    if importlib.util.find_spec("onnxruntime") is not None:
        try:
            with time_limit(_SECONDS), warnings.catch_warnings():
                warnings.simplefilter("ignore", TwinopWarning)
                device, *notes = SERVER.run(_open, path, named, allow_model_libraries)
        except TwinopError as problem:
            yield error("model", str(problem))
            return
        yield from (warning("model", each) for each in notes)
        yield ok("model", f"ONNX Runtime opens it on {device}")
