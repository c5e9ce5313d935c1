"""A Ray Serve deployment: each replica has a session with the checked custom-op library.

serve run --app-dir examples/ray serve_model:app model=/models/custom_relu.onnx
"""

import asyncio
from typing import Any

import numpy as np
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

from twinop import deploy
from twinop.errors import TwinopError


@serve.deployment(
    autoscaling_config={"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 4},
    max_ongoing_requests=16,
    health_check_period_s=2,
    ray_actor_options={"num_cpus": 1},
)
class Model:
    """Runs one model. A model that does not fit its library ends the deployment with that message."""

    def __init__(self, path: str, library: str | None = None) -> None:
        self.session = deploy.session(path, library=library)

    async def __call__(self, request: Request) -> JSONResponse:
        """Answer {"x": [[1, 2]]} with the outputs in the same form."""
        try:
            given: dict[str, Any] = await request.json()
            known = self.session.inputs
            feeds = {
                name: np.asarray(value, known[name].numpy_dtype if name in known else None)
                for name, value in given.items()
            }
            outputs = await asyncio.to_thread(self.session.run, feeds)
        except (TwinopError, ValueError, TypeError, AttributeError) as error:
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse({name: value.tolist() for name, value in outputs.items()})


def app(arguments: dict[str, str]) -> serve.Application:
    """Return the application for `serve run`: `model` is a path on each node, and so is `library`."""
    return Model.bind(arguments["model"], arguments.get("library"))  # type: ignore[attr-defined]
