"""Asks ONNX Runtime in a process of its own, so that a crash there ends nothing else.

python -m twinop.deploy.doctor.probe describe LIBRARY...: prints what ONNX Runtime is installed, as JSON.
python -m twinop.deploy.doctor.probe run PROVIDER: runs the model of standard input, y = f(x), on a provider.
python -m twinop.deploy.doctor.probe take PROVIDER MODEL LIBRARY...: prints which of a model's nodes it takes.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

from twinop.deploy import cuda, plugins
from twinop.deploy.create_session import session as open_session
from twinop.libraries.library import read_library


def describe(*libraries: str) -> None:
    """Prints ONNX Runtime's version, its providers, and what keeps libraries from the GPU."""
    facts = {
        "version": onnxruntime.__version__,
        "providers": onnxruntime.get_available_providers(),
        "plugins": list(plugins.installed()),
        "cuda_plugin": cuda.plugin_version(),
        "obstacles": cuda.obstacles(0, [read_library(library) for library in libraries]),
    }
    print(json.dumps(facts))


def run(provider: str) -> None:
    """Runs a model on a provider, which must take all of its nodes."""
    if provider == cuda.CUDA:
        cuda.preload()
    if provider not in onnxruntime.get_available_providers():
        opened = open_session(sys.stdin.buffer.read(), [provider, "CPUExecutionProvider"])
        opened.run({"x": np.ones(4, np.float32)})
        return
    options = onnxruntime.SessionOptions()
    if provider != "CPUExecutionProvider":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    model = sys.stdin.buffer.read()
    session = onnxruntime.InferenceSession(model, options, providers=[provider], enable_fallback=0)
    session.run(None, {"x": np.ones(4, np.float32)})


def take(provider: str, model: str, *libraries: str) -> None:
    """Prints which nodes of a model each provider takes."""
    opened = open_session(
        model, [provider, "CPUExecutionProvider"], [Path(each) for each in libraries] or False
    )
    print(plugins.taken_text(opened.taken))


if __name__ == "__main__":
    if cuda.driver_version() is not None:
        cuda.import_torch()  # as `twinop.deploy.session` does
    if sys.argv[1] == "run":
        run(sys.argv[2])
    elif sys.argv[1] == "take":
        take(*sys.argv[2:])
    else:
        describe(*sys.argv[2:])
