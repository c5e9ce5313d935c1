"""Judges the facts: each check is a function from them to findings."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Literal

from twinop.installation import version_numbers
from twinop.libraries.built import changed_since
from twinop.libraries.find import package_key
from twinop.libraries.library import in_use

from ..check_nodes import misfits
from ..cuda import CUDA, cuda_text
from .facts import Environment

_OLDEST_RUNTIME = (1, 18)
_OLDEST_TORCH = (2, 10)
_OLDEST_GPU = 80  # as in TwinopCuda.cmake
_BOTH = "pip uninstall -y onnxruntime onnxruntime-gpu && pip install"
_BUILD = "build the library again"

Level = Literal["OK", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """What is as it is, and for a warning or an error what to do. `subject` is what it is about."""

    level: Level
    subject: str
    cause: str
    cure: str = ""


ok, warning, error = partial(Finding, "OK"), partial(Finding, "warning"), partial(Finding, "error")


def old_driver(facts: Environment, subject: str, needed: str, other: str) -> Iterator[Finding]:
    """Finds a driver that is too old for a build with CUDA `needed`. `other`: how to do without it."""
    if facts.gpus and facts.driver_cuda and needed and version_numbers(needed)[0] > facts.driver_cuda // 1000:
        yield error(
            subject,
            f"the NVIDIA driver is too old: it serves CUDA {cuda_text(facts.driver_cuda)}, and {subject} is "
            f"built with CUDA {needed}",
            f"update the driver, or {other.format(facts.driver_cuda // 1000)}",
        )


def from_message(level: Level, subject: str, message: str, cure: str) -> Finding:
    """Makes a finding of an error's message, whose last sentence mostly is the cure."""
    cause, found, last = one_line(message).rpartition(". ")
    return Finding(level, subject, cause, last) if found else Finding(level, subject, last, cure)


def one_line(text: str) -> str:
    return " ".join(text.split())


def check_driver(facts: Environment) -> Iterator[Finding]:
    if facts.smi_problem:
        yield error(
            "driver",
            f"nvidia-smi fails: {one_line(facts.smi_problem)}",
            "load or install the NVIDIA driver again and reboot; in a container, start it with --gpus all",
        )
    elif not facts.gpus:
        yield ok("driver", "no NVIDIA GPU: models and ops run on the CPU")
    else:
        names = ", ".join(f"{gpu.name} (compute_{gpu.capability})" for gpu in facts.gpus)
        yield ok("driver", f"{names}; the driver serves CUDA {cuda_text(facts.driver_cuda or 0)}")


def check_compilers(facts: Environment) -> Iterator[Finding]:
    if facts.compiler_problem:
        yield from_message("warning", "compiler", facts.compiler_problem, "install g++")
    elif facts.compiler:
        command = " ".join(facts.compiler.command)
        yield ok("compiler", f"{command} is {facts.compiler.kind} {facts.compiler.version}")
    if facts.nvcc_problem:
        yield from_message("error", "nvcc", facts.nvcc_problem, "set CUDACXX to an nvcc")
    elif facts.nvcc:
        known = ", ".join(facts.nvcc.known)
        yield ok("nvcc", f"{facts.nvcc.path} is CUDA {facts.nvcc.version}, for {known}")
        yield from _nvcc_and_gpus(facts)
        yield from old_driver(facts, "nvcc", facts.nvcc.version, "set CUDACXX to the nvcc of CUDA {}")
    elif facts.gpus:
        yield warning(
            "nvcc",
            "no nvcc found: twinop build builds for the CPU only",
            "install the CUDA toolkit, and put nvcc on PATH or set CUDACXX to it",
        )


def _nvcc_and_gpus(facts: Environment) -> Iterator[Finding]:
    assert facts.nvcc is not None
    known = sorted(int(arch) for arch in facts.nvcc.known)
    for gpu in dict.fromkeys(facts.gpus):
        if gpu.capability < _OLDEST_GPU:
            yield error(
                "nvcc",
                f"{gpu.name} has compute capability {gpu.capability}: twinop's CUDA kernels need "
                f"{_OLDEST_GPU} (8.0) or later",
                "twinop build --cpu, or another GPU",
            )
        elif gpu.capability not in known:
            yield error(
                "nvcc",
                f"CUDA {facts.nvcc.version} does not compile for {gpu.name}: unsupported gpu architecture "
                f"'compute_{gpu.capability}'",
                f"install a newer CUDA and set CUDACXX to its nvcc; or twinop build --archs {known[-1]}, "
                "whose PTX the driver compiles for this GPU",
            )


def check_torch(facts: Environment) -> Iterator[Finding]:
    torch = facts.torch
    if torch is None:
        yield ok("torch", "not installed: only training and export need it")
        return
    if version_numbers(torch.version) < _OLDEST_TORCH:
        yield error(
            "torch",
            f"torch {torch.version} is too old: libtwinop_torch.so needs 2.10 or later",
            "pip install -U 'torch>=2.10'",
        )
    elif not torch.cuda and facts.gpus:
        yield warning(
            "torch",
            f"torch {torch.version} is a build for the CPU, and this machine has a GPU",
            "pip uninstall -y torch && pip install torch (pytorch.org names the index for your CUDA)",
        )
    else:
        yield ok("torch", f"torch {torch.version}, CUDA: {torch.cuda or 'none'}")
    yield from old_driver(facts, "torch", torch.cuda, "install a torch built for CUDA {}")


def check_runtime(facts: Environment) -> Iterator[Finding]:
    runtime = facts.runtime
    gpu = "-gpu" if facts.gpus else ""
    if runtime is None:
        level: Level = "error" if facts.model or facts.model_problem else "warning"
        yield Finding(
            level,
            "onnxruntime",
            "not installed: models cannot be run or served",
            f"pip install onnxruntime{gpu}",
        )
    elif runtime.problem:
        yield error(
            "onnxruntime", f"it cannot be imported: {one_line(runtime.problem)}", f"{_BOTH} onnxruntime{gpu}"
        )
    elif version_numbers(runtime.version) < _OLDEST_RUNTIME:
        yield error(
            "onnxruntime",
            f"onnxruntime {runtime.version} is too old: custom ops need 1.18 or later",
            f"pip install -U 'onnxruntime{gpu}>=1.18'",
        )
    else:
        plugin = f" (a plugin, {runtime.cuda_plugin})" if runtime.cuda_plugin else ""
        has = ", ".join(f"{name}{plugin if name == CUDA else ''}" for name in runtime.providers)
        yield ok("onnxruntime", f"onnxruntime {runtime.version} with {has}")


def check_providers(facts: Environment) -> Iterator[Finding]:
    runtime = facts.runtime
    if runtime is None or runtime.problem:
        return
    for reason in runtime.unavailable_reasons if facts.gpus else ():
        yield from_message("warning", CUDA, reason, "compare with nvidia-smi")
    for name, problem in runtime.providers.items():
        if not problem:
            yield ok(name, "runs a node")
        elif name == CUDA and not facts.gpus:
            yield ok(name, "not used: this machine has no GPU")
        elif name == CUDA and runtime.unavailable_reasons:
            continue  # that is why
        else:
            level: Level = "error" if name in (CUDA, "CPUExecutionProvider") else "warning"
            yield Finding(
                level,
                name,
                f"it does not run a node: {one_line(problem)}",
                f"install what it needs, or name another one with --provider ({_working(facts)})",
            )


def _working(facts: Environment) -> str:
    assert facts.runtime is not None
    names = [name for name, problem in facts.runtime.providers.items() if not problem]
    return f"these work: {', '.join(names)}" if names else f"none works: {_BOTH} onnxruntime"


def check_packages(facts: Environment) -> Iterator[Finding]:
    for domain, group in groupby(facts.packages, lambda package: package.domain):
        packages = list(group)
        names = " and ".join(f"{package.name} {package.version}" for package in packages)
        if len(packages) > 1:
            yield error(
                "packages",
                f"{names} both have ops of the domain {domain}",
                f"pip uninstall {packages[-1].name}, or name the library to use with --library",
            )
        else:
            yield ok("packages", f"{names} has ops of the domain {domain}")


def check_libraries(facts: Environment) -> Iterator[Finding]:
    for message in facts.broken:
        asked = facts.model is not None or message.startswith(str(facts.named))
        level: Level = "error" if asked else "warning"
        message = message.replace("(--library ", "(twinop doctor MODEL ")
        yield from_message(level, "library", message, "copy or build it again, or remove it")
    nodes = {node.node_type for node in facts.model.nodes} if facts.model is not None else set()
    for library in facts.libraries:
        dtypes = {
            dtype
            for record in library.records.values()
            for each in record.combinations
            for dtype in each.values()
        }
        count = len(library.by_onnx_name)
        yield ok(
            "library",
            f"{library.path}: domain {library.domain} {library.domain_version}, twinop {library.version}, "
            f"{count} op{'s' * (count != 1)} for {', '.join(sorted(dtypes))}, GPU code for "
            f"{library.cuda_archs or 'none'}",
        )
        if said := changed_since(library.path):
            yield from_message("warning", "library", said, _BUILD)
        if facts.model is not None and not in_use([library], nodes):
            text = f"{library.path}: no node of {facts.model.name} uses it"
            yield warning("library", text, "leave it out, or name the library of its nodes")
        if not library.exports_ort:
            yield warning(
                "library",
                f"{library.path} does not export RegisterCustomOps: ONNX Runtime cannot load it",
                "link libtwinop_ort.a into it: twinop build does so",
            )
        if library.cuda_archs not in ("", "none"):
            yield from old_driver(facts, library.path.name, library.cuda_version, f"{_BUILD} with CUDA {{}}")


def check_model(facts: Environment) -> Iterator[Finding]:
    if facts.model_problem:
        yield from_message("error", "model", facts.model_problem, "export it again")
    if facts.model is not None:
        imports = facts.model.proto.opset_import
        opsets = ", ".join(dict.fromkeys(f"{each.domain or 'ai.onnx'} {each.version}" for each in imports))
        nodes = sorted({"::".join(node.node_type) for node in facts.model.nodes})
        yield ok("model", f"{facts.model.name}: {opsets}; custom nodes: {', '.join(nodes) or 'none'}")


def check_nodes(facts: Environment) -> Iterator[Finding]:
    if facts.model is None:
        return
    known = {(library.domain, op) for library in facts.libraries for op in library.by_onnx_name}
    for domain, op in sorted({node.node_type for node in facts.model.nodes} & facts.model.bodies - known):
        package = facts.model.metadata.get(package_key(domain))
        install = f"pip install {package}" if package else "install the package that has it"
        text = f"no library has {domain}::{op}: its function body runs, which is slower"
        yield warning("model", text, f"{install}, build it (twinop build), or name its library")
    without_body = (node for node in facts.model.nodes if node.node_type not in facts.model.bodies)
    if inside := [node for node in without_body if " in function " in node.label]:
        text = f"{inside[0].label}: ONNX Runtime infers few types in functions, and may refuse the model"
        yield warning("model", text, "twinop.export.attach_bodies puts such functions into the graph")
    problems = list(misfits(facts.model, facts.libraries))
    for problem in problems:
        yield from_message("error", "model", problem, "export the model again, or use a library that has it")
    for library in facts.libraries:
        if not problems:
            yield ok("model", f"its nodes of {library.domain} fit {library.path}")


CHECKS = (
    check_driver, check_compilers, check_torch, check_runtime, check_providers,
    check_packages, check_libraries, check_model, check_nodes,
)  # fmt: skip
