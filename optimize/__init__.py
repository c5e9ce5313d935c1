"""Optimises ONNX files for ONNX Runtime with twinop's ops: `twinop optimize`.

    from twinop.optimize import optimize

    print(optimize("old.onnx", "fast.onnx", dtype="bfloat16"))

`load.py` reads a model. `prepare.py` converts it to fp32, folds constants and infers shapes. Then the
rewrites run, in the order of `PASSES` in `passes.py`. Each is a module whose docstring says what it
matches and what it writes.
`verifier.py` compares the result with the original, and `precision.py` converts it to 16 bits. `float8.py`
then puts matmuls in 8 bits.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .genai import optimize_folder as optimize_folder
    from .optimizer import chosen_device as chosen_device
    from .optimizer import optimize as optimize
    from .report import OptimizeReport as OptimizeReport

__all__ = ["OptimizeReport", "chosen_device", "optimize", "optimize_folder"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"twinop.optimize has no attribute {name!r}")
    from .genai import optimize_folder
    from .optimizer import chosen_device, optimize
    from .report import OptimizeReport

    found = (OptimizeReport, chosen_device, optimize, optimize_folder)
    return {each.__name__: each for each in found}[name]
