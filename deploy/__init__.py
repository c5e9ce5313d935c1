"""Serve exported models with ONNX Runtime: finds the library, checks the model, runs tensors without copies.

    from twinop import deploy

    session = deploy.session("custom_relu.onnx")   # CUDA where it works, else CPU; session.reason says why
    y = session.run({"x": x})["y"]                 # numpy in, numpy out; torch in, torch out, no copy

Nothing here needs torch; torch tensors are taken where the caller has torch.
"""

if __name__ != "twinop.deploy":
    raise ImportError(
        f"import twinop.deploy, not {__name__}: put the repository root on PYTHONPATH, no folder inside it"
    )

from twinop.deploy.check_nodes import Libraries, check_model
from twinop.deploy.create_session import session
from twinop.deploy.errors import FeedError, ModelError, ProviderError, RunError
from twinop.deploy.inference_session import Session
from twinop.deploy.node_providers import Cost, NodeRun, costs

__all__ = [
    "Cost",
    "FeedError",
    "Libraries",
    "ModelError",
    "NodeRun",
    "ProviderError",
    "RunError",
    "Session",
    "check_model",
    "costs",
    "session",
]
