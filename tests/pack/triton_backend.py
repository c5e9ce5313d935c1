"""A backend for ONNX Runtime in Python, for a Triton without one: registers the libraries, opens the session.

Triton's core parses config.pbtxt, checks requests and schedules them; this runs what it hands over.
"""

import json
import os
import sys

sys.path.insert(0, os.environ["TRITON_SITE_PACKAGES"])

import numpy as np
import onnxruntime
import triton_python_backend_utils as triton  # type: ignore[import-not-found]


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        options = onnxruntime.SessionOptions()
        for library in config["model_operations"]["op_library_filename"]:
            options.register_custom_ops_library(library)
        model = os.path.join(
            args["model_repository"], args["model_version"], config["default_model_filename"]
        )
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self._outputs = [each["name"] for each in config["output"]]
        self._joins = config["max_batch_size"] > 0

    def execute(self, requests: list) -> list:
        # By dlpack: with NumPy 2, as_numpy() and Tensor(name, array) give garbage.
        inputs = [{each.name(): np.from_dlpack(each) for each in request.inputs()} for request in requests]
        if not self._joins:
            return [self._response(self._session.run(self._outputs, each)) for each in inputs]
        joined = {name: np.concatenate([each[name] for each in inputs]) for name in inputs[0]}
        ends = np.cumsum([len(next(iter(each.values()))) for each in inputs])[:-1]
        parts = [np.split(result, ends) for result in self._session.run(self._outputs, joined)]
        return [self._response(results) for results in zip(*parts, strict=True)]

    def _response(self, results: list) -> object:
        arrays = map(np.ascontiguousarray, results)
        pairs = zip(self._outputs, arrays, strict=True)
        return triton.InferenceResponse([triton.Tensor.from_dlpack(name, array) for name, array in pairs])
