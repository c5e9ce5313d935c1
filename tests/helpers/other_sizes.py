"""Compares an optimised model with the original on inputs that the optimizer did not try."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from twinop import deploy


def both(folder: Path, feeds: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Runs old.onnx and fast.onnx, which `optimized` wrote, each on inputs in its own dtypes."""
    found = list[dict[str, Any]]()
    for name in ("old.onnx", "fast.onnx"):
        session = deploy.session(folder / name, ["CPUExecutionProvider"])
        kinds = {key: spec.numpy_dtype for key, spec in session.inputs.items()}
        found.append(session.run({key: np.asarray(each, kinds[key]) for key, each in feeds.items()}))
    return found


def assert_same(folder: Path, rtol: Any = 2e-4, atol: Any = 2e-5, **feeds: Any) -> None:
    """Asserts that both return the same for arrays, or for random ones of a shape."""
    rng = np.random.default_rng(7)
    given = {
        name: each if isinstance(each, np.ndarray) else rng.standard_normal(each).astype(np.float32)
        for name, each in feeds.items()
    }
    expected, found = both(folder, given)
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name].astype(array.dtype), array, rtol, atol, err_msg=name)
