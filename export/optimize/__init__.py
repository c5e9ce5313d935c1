"""Optimises ONNX files for ONNX Runtime with twinop's ops: `twinop optimize`.

    from twinop.export.optimize import optimize

    print(optimize("old.onnx", "fast.onnx", dtype="bfloat16"))

`prepare.py` brings a model into one form, in fp32. Each rewrite is a module of its own that says what it
matches and what it writes: `embedding.py`, `activations.py`, `norms.py`, `rotary.py`, `attention.py`,
`gated.py`, `unpack.py`, `add_product.py`, `linear.py`. `trial.py` compares the results with the original,
and `precision.py` converts them to 16 bits.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .optimizer import check_device as check_device
    from .optimizer import optimize as optimize
    from .report import OptimizeReport as OptimizeReport

__all__ = ["OptimizeReport", "check_device", "optimize"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"twinop.export.optimize has no attribute {name!r}")
    from .optimizer import check_device, optimize
    from .report import OptimizeReport

    return {"OptimizeReport": OptimizeReport, "check_device": check_device, "optimize": optimize}[name]
