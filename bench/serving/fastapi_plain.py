"""python -m twinop.bench.serving.fastapi_plain model.onnx provider port: FastAPI by hand, and no protocol.

Raw tensors in, raw tensors out, as somebody writes it in an afternoon; one session, nothing is joined.
"""

import sys

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response

from twinop.bench.serving.models import session_options

_DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64}


def application(path: str, provider: str) -> FastAPI:
    import onnxruntime as ort

    options, providers = session_options(provider)
    session = ort.InferenceSession(path, options, providers=providers)
    app = FastAPI()

    @app.post("/infer")
    async def infer(request: Request) -> Response:
        body = await request.body()
        feeds, at = {}, 0
        for value in session.get_inputs():
            shape = [1, *value.shape[1:]]
            size = int(np.prod(shape)) * np.dtype(_DTYPES[value.type]).itemsize
            feeds[value.name] = np.frombuffer(body[at : at + size], _DTYPES[value.type]).reshape(shape)
            at += size
        return Response(b"".join(array.tobytes() for array in session.run(None, feeds)))

    return app


if __name__ == "__main__":
    _, path, provider, port = sys.argv
    uvicorn.run(application(path, provider), host="127.0.0.1", port=int(port), log_level="warning")
