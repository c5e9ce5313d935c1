"""Runs exported models in ONNX Runtime: finds the libraries, checks the model, runs tensors without copies.

    from twinop import deploy

    session = deploy.session("custom_relu.onnx")   # CUDA where it works, else CPU; session.reason says why
    y = session.run({"x": x})["y"]                 # numpy in, numpy out; torch in, torch out, no copy

Nothing here needs torch. Torch tensors are accepted where the caller has torch.
"""

if __name__ != "twinop.deploy":
    raise ImportError(
        f"import twinop.deploy, not {__name__}: put the repository root on PYTHONPATH, no folder inside it"
    )

from .check_nodes import check_model
from .choose_library import Libraries
from .create_session import session
from .errors import FeedError, ModelError, ProviderError, RunError
from .inference_session import Session
from .node_providers import Cost, NodeRun, costs

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
