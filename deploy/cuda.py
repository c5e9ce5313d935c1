"""Finds out why CUDA cannot be used. ONNX Runtime itself only falls back to the CPU."""

import contextlib
import ctypes
import importlib.util
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinop.installation import how_to_build
from twinop.libraries.library import Library, needed_libraries

CUDA = "CUDAExecutionProvider"

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_WORKS = {0, 600, *range(900, 909)}  # success, CUDA_ERROR_NOT_READY, and that a graph is being captured


# ------------------------------------------------------------------------------------------------ probes


def driver() -> Any:
    """Returns the CUDA driver (libcuda.so.1) as a ctypes library, or None where it is not installed."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def driver_version() -> int | None:
    """Returns the newest CUDA version that the driver supports (13000 is 13.0), or None without a driver."""
    library = driver()
    if library is None:
        return None
    version = ctypes.c_int()
    return version.value if library.cuDriverGetVersion(ctypes.byref(version)) == 0 else None


def cuda_text(version: int) -> str:
    """Returns a version of CUDA as people write it: "13.0" for the driver's 13000."""
    return f"{version // 1000}.{version % 1000 // 10}"


def device_count() -> tuple[int, str]:
    """Returns the number of GPUs that this process sees, and the name of the error if the driver fails."""
    library = driver()
    if library is None:
        return 0, ""
    count = ctypes.c_int()
    code = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    if code in (0, _NO_DEVICE):
        return count.value, ""
    return 0, _error_name(library, code)


def _error_name(library: Any, code: int) -> str:
    name = ctypes.c_char_p()
    library.cuGetErrorName(code, ctypes.byref(name))
    return (name.value or b"").decode() or f"error {code}"


def fatal_error(device: int) -> str:
    """Returns the driver's error if this process cannot use a GPU any more, "" if it can.

    After an illegal memory access or a failed assertion of a kernel, every later call fails with that error.
    This asks for it without waiting for the GPU. Call it after a failed run, from any thread.
    """
    library = driver()
    if library is None:
        return ""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    code = (
        library.cuInit(0)
        or library.cuDeviceGet(ctypes.byref(handle), device)
        or library.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
    )
    if code == 0:
        code = library.cuCtxPushCurrent_v2(context)
        if code == 0:
            code = library.cuStreamQuery(None)
            library.cuCtxPopCurrent_v2(ctypes.byref(context))
        library.cuDevicePrimaryCtxRelease_v2(handle)
    return "" if code in _WORKS else _error_name(library, code)


def compute_capability(device: int) -> int:
    """Returns the compute capability of a device: 90 for an H100 or H200."""
    library = driver()
    handle = ctypes.c_int()
    library.cuDeviceGet(ctypes.byref(handle), device)
    numbers = []
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
        value = ctypes.c_int()
        library.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
        numbers.append(value.value)
    return 10 * numbers[0] + numbers[1]


def runtime_has_cuda() -> bool:
    """Returns whether the installed ONNX Runtime has the CUDA provider."""
    import onnxruntime

    built_with = getattr(onnxruntime, "get_build_info", str)()  # in 1.32 it may be a plugin
    return CUDA in onnxruntime.get_available_providers() or "cuda-plugin-ep=" in built_with


def missing_libraries() -> list[str]:
    """Returns the shared libraries that the CUDA provider needs and the loader does not find."""
    import onnxruntime

    # The provider itself cannot be loaded here: before ONNX Runtime loads it, it would lack its host.
    provider = Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
    missing = []
    for name in needed_libraries(provider) if provider.is_file() else []:
        if name.startswith("libonnxruntime"):
            continue
        try:
            ctypes.CDLL(name)
        except OSError:
            missing.append(name)
    return missing


def import_torch() -> None:
    """Imports torch where it is installed, so that ONNX Runtime uses torch's CUDA libraries."""
    if importlib.util.find_spec("torch") is not None:
        import torch  # noqa: F401


def preload() -> None:
    """Loads the CUDA libraries from pip's nvidia packages."""
    import onnxruntime

    if hasattr(onnxruntime, "preload_dlls"):
        with contextlib.redirect_stdout(io.StringIO()):  # missing_libraries reports what it would print
            onnxruntime.preload_dlls()


# ------------------------------------------------------------------------------------------------ diagnosis


def has_gpu() -> bool:
    return device_count()[0] > 0


def unavailable_reasons(device: int, libraries: Sequence[Library]) -> list[str]:
    """Returns every reason why CUDA cannot be used on a device, with what to do about it."""
    found = _driver_reasons(device)
    if not runtime_has_cuda():
        found.append(
            "this ONNX Runtime has no CUDA provider: it is the wheel for CPUs, or that one overwrote files "
            "of the other. pip uninstall onnxruntime onnxruntime-gpu, then pip install onnxruntime-gpu"
        )
    elif not found:
        preload()
        if missing := missing_libraries():
            import onnxruntime

            found.append(
                f"ONNX Runtime's CUDA provider lacks {', '.join(missing)}. "
                f"pip install 'onnxruntime-gpu[cuda,cudnn]=={onnxruntime.__version__}'"
            )
    usable = device if not found else None
    for library in libraries:
        if library.by_onnx_name:
            found += _library_reasons(library, usable)
    return found


def _driver_reasons(device: int) -> list[str]:
    version = driver_version()
    if version is None:
        return ["no NVIDIA driver: libcuda.so.1 cannot be loaded. In a container, start it with --gpus all"]
    import onnxruntime

    built_for = getattr(onnxruntime, "cuda_version", "")  # "" in a build for the CPU
    if built_for and version // 1000 < int(built_for.split(".")[0]):
        return [
            f"the NVIDIA driver is too old: it serves CUDA {cuda_text(version)}, this "
            f"ONNX Runtime needs CUDA {built_for}. Update the driver (nvidia-smi shows it), or install an "
            f"onnxruntime-gpu built for CUDA {version // 1000}"
        ]
    count, error = device_count()
    if error:
        return [f"the NVIDIA driver does not start: {error}. Check with nvidia-smi"]
    if count == 0:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        return ["no NVIDIA GPU" + (f" (CUDA_VISIBLE_DEVICES is '{hidden}')" if hidden is not None else "")]
    if device >= count:
        return [f"no CUDA device {device}: this process sees {count}, numbered from 0"]
    return []


def _library_reasons(library: Library, device: int | None) -> list[str]:
    archs = library.cuda_archs
    if archs in ("", "none"):
        return [
            f"{library.path} was built without CUDA: its nodes would run on the CPU. "
            f"{how_to_build(library.domain, needs_cuda=True)}"
        ]
    if device is None:
        return []
    capability = compute_capability(device)
    if has_code_for(archs, capability):
        return []
    return [
        f"{library.path} has GPU code for {archs}, and device {device} has compute capability {capability}. "
        f"{how_to_build(library.domain, str(capability))}"
    ]


def has_code_for(archs: str, capability: int) -> bool:
    """Whether code for `archs` runs: 90-real from 9.0 up to below 10, 90-virtual from 9.0 on, 90 is both.

    80:90 is the code of 8.0 as 90-real.
    """
    for source, number, suffix, kind in re.findall(r"(\d+:)?(\d+)([af]?)(-real|-virtual)?", archs):
        arch = int(number)
        same_major = capability // 10 == arch // 10 and capability >= arch
        if suffix:  # 90a: this capability only; 100f: its family
            matches = same_major if suffix == "f" else capability == arch
        else:
            matches = same_major if source or kind == "-real" else capability >= arch
        if matches:
            return True
    return False
