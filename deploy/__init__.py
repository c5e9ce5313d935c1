"""Runs exported models in ONNX Runtime: finds the libraries, checks the model, runs tensors without copies.

    from twinop import deploy

    session = deploy.session("custom_relu.onnx")   # CUDA where it works, else CPU; session.reason says why
    y = session.run({"x": x})["y"]                 # numpy in, numpy out; torch in, torch out, no copy

Nothing here needs torch. Torch tensors are accepted where the caller has torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "twinop.deploy":
    raise ImportError(
        f"import twinop.deploy, not {__name__}: put the repository root on PYTHONPATH, no folder inside it"
    )

if TYPE_CHECKING:
    from .check_nodes import check_model as check_model
    from .choose_library import Libraries as Libraries
    from .create_session import session as session
    from .errors import FeedError as FeedError
    from .errors import ModelError as ModelError
    from .errors import ProviderError as ProviderError
    from .errors import RunError as RunError
    from .inference_session import NodeRun as NodeRun
    from .inference_session import Session as Session

_MODULES = {  # imported when they are used
    "FeedError": "errors",
    "Libraries": "choose_library",
    "ModelError": "errors",
    "NodeRun": "inference_session",
    "ProviderError": "errors",
    "RunError": "errors",
    "Session": "inference_session",
    "check_model": "check_nodes",
    "session": "create_session",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"twinop.deploy has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
