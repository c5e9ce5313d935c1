"""Compares an optimised model with the original at sizes that the optimizer did not try."""

from pathlib import Path

import numpy as np

from twinop import deploy


def assert_same(folder: Path, **shapes: tuple[int, ...]) -> None:
    """Runs old.onnx and fast.onnx, which `optimized` wrote, on random inputs with these shapes."""
    rng = np.random.default_rng(7)
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    found = [
        deploy.session(folder / name, ["CPUExecutionProvider"]).run(feeds)
        for name in ("old.onnx", "fast.onnx")
    ]
    assert found[0].keys() == found[1].keys()
    for name, expected in found[0].items():
        np.testing.assert_allclose(found[1][name], expected, rtol=2e-4, atol=2e-5, err_msg=name)
