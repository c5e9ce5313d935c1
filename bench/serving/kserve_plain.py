"""python -m twinop.bench.serving.kserve_plain name model.onnx provider --http_port ...: KServe and no more.

One session, run where the request is handled, as the tutorials have it; nothing is joined.
"""

import sys
from typing import Any

from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer

from twinop.bench.serving.models import session_options


class Plain(Model):
    def __init__(self, name: str, path: str, provider: str) -> None:
        super().__init__(name)
        import onnxruntime as ort

        options, providers = session_options(provider)
        self.session = ort.InferenceSession(path, options, providers=providers)
        self.ready = True

    async def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> InferResponse:
        assert isinstance(payload, InferRequest)
        feeds = {each.name: each.as_numpy() for each in payload.inputs}
        outputs = []
        for found, array in zip(self.session.get_outputs(), self.session.run(None, feeds), strict=True):
            output = InferOutput(found.name, list(array.shape), "FP32")
            output.set_data_from_numpy(array, binary_data=True)
            outputs.append(output)
        return InferResponse(
            payload.id or "", self.name, outputs, use_binary_outputs=payload.use_binary_outputs
        )


if __name__ == "__main__":
    name, path, provider = sys.argv[1:4]
    ModelServer().start([Plain(name, path, provider)])
