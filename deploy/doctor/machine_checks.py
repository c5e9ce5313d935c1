"""Judges drivers, compilers, torch and ONNX Runtime. Each check is a function from facts to findings."""

from collections.abc import Iterator

from twinop.installation import version_numbers

from ..cuda import CUDA, cuda_text
from .facts import Environment
from .finding import Finding, Level, error, from_message, ok, old_driver, one_line, warning

_OLDEST_RUNTIME = (1, 18)
_OLDEST_TORCH = (2, 10)
_OLDEST_GPU = 80  # as in TwinopCuda.cmake
_FIRST_NVCC = {100: "12.8", 103: "12.9", 110: "13.0", 120: "12.8", 121: "12.9"}
_BOTH = "pip uninstall -y onnxruntime onnxruntime-gpu && pip install"


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
            first = _FIRST_NVCC.get(gpu.capability)
            newer = f"CUDA {first} or later" if first else "a newer CUDA"
            yield error(
                "nvcc",
                f"CUDA {facts.nvcc.version} does not compile for {gpu.name}: unsupported gpu architecture "
                f"'compute_{gpu.capability}'",
                f"install {newer} and set CUDACXX to its nvcc; or twinop build --archs {known[-1]}, whose "
                "PTX the driver compiles for this GPU",
            )


def check_gcc_and_nvcc(facts: Environment) -> Iterator[Finding]:
    if not facts.compiler or not facts.nvcc or not facts.newest_gcc or facts.compiler.kind != "GCC":
        return
    if version_numbers(facts.compiler.version)[0] > facts.newest_gcc:
        yield error(
            "compiler",
            f"GCC {facts.compiler.version} is newer than CUDA {facts.nvcc.version} accepts: unsupported GNU "
            f"version! gcc versions later than {facts.newest_gcc} are not supported",
            f"install g++-{facts.newest_gcc} and set CXX=g++-{facts.newest_gcc}, or install a newer CUDA",
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
    for obstacle in runtime.obstacles if facts.gpus else ():
        yield from_message("warning", CUDA, obstacle, "compare with nvidia-smi")
    for name, problem in runtime.providers.items():
        nodes, refused = runtime.taken.get(name, ("runs a node", ""))
        if not problem and not refused:
            yield ok(name, one_line(nodes))
        elif name == CUDA and not facts.gpus:
            yield ok(name, "not used: this machine has no GPU")
        elif name == CUDA and runtime.obstacles:
            continue  # that is why
        else:
            level: Level = "error" if name in (CUDA, "CPUExecutionProvider") else "warning"
            what = "run a node" if problem else "open the model"
            yield Finding(
                level,
                name,
                f"it does not {what}: {one_line(problem or refused)}",
                f"install what it needs, or name another one with --provider ({_working(facts)})",
            )


def _working(facts: Environment) -> str:
    assert facts.runtime is not None
    names = [name for name, problem in facts.runtime.providers.items() if not problem]
    return f"these work: {', '.join(names)}" if names else f"none works: {_BOTH} onnxruntime"
