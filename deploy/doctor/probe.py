"""Asks ONNX Runtime in a process of its own, so that a crash there ends nothing else.

python -m twinop.deploy.doctor.probe: prints what the installed ONNX Runtime is, as JSON.
python -m twinop.deploy.doctor.probe PROVIDER: runs the model of standard input, y = f(x), on the provider.
"""

import json
import sys

import numpy as np
import onnxruntime

from twinop.deploy import cuda

_CPU = "CPUExecutionProvider"


def describe() -> None:
    """Prints ONNX Runtime's version, its providers, its CUDA, and the CUDA libraries that it lacks."""
    missing = []
    if cuda.runtime_has_cuda():
        _load_cuda_libraries()
        missing = cuda.missing_libraries()
    facts = {
        "version": onnxruntime.__version__,
        "cuda": cuda.runtime_cuda_version(),
        "providers": onnxruntime.get_available_providers(),
        "missing": missing,
    }
    print(json.dumps(facts))


def run(provider: str, model: bytes) -> None:
    """Runs a model on a provider, which must take all of its nodes."""
    if provider == cuda.CUDA:
        _load_cuda_libraries()
    options = onnxruntime.SessionOptions()
    if provider != _CPU:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    session = onnxruntime.InferenceSession(model, options, providers=[provider], enable_fallback=0)
    session.run(None, {"x": np.ones(4, np.float32)})


def _load_cuda_libraries() -> None:
    """Loads CUDA's libraries as `twinop.deploy.session` does."""
    if cuda.driver_version() is not None:
        cuda.import_torch()
    cuda.preload()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(sys.argv[1], sys.stdin.buffer.read())
    else:
        describe()
