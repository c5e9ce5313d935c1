"""Asks ONNX Runtime in a process of its own, so that a crash there ends nothing else.

python -m twinop.deploy.doctor.probe describe LIBRARY...: prints what ONNX Runtime is installed, as JSON.
python -m twinop.deploy.doctor.probe run PROVIDER: runs a model of one node on a provider.
"""

import json
import sys

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

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
        "unavailable_reasons": cuda.unavailable_reasons(0, [read_library(library) for library in libraries]),
    }
    print(json.dumps(facts))


def run(provider: str) -> None:
    """Runs a node on a provider, which must take it."""
    if provider == cuda.CUDA:
        cuda.preload()
    if provider not in onnxruntime.get_available_providers():
        opened = open_session(_model(), [provider, "CPUExecutionProvider"])
        opened.run({"x": np.ones(4, np.float32)})
        return
    options = onnxruntime.SessionOptions()
    if provider != "CPUExecutionProvider":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    session = onnxruntime.InferenceSession(_model(), options, providers=[provider], enable_fallback=0)
    session.run(None, {"x": np.ones(4, np.float32)})


def _model() -> bytes:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "probe", [x], [y])
    imports = [helper.make_opsetid("", 14)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString()


if __name__ == "__main__":
    if cuda.driver_version() is not None:
        cuda.import_torch()  # as `twinop.deploy.session` does
    if sys.argv[1] == "run":
        run(sys.argv[2])
    else:
        describe(*sys.argv[2:])
