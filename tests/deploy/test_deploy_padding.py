"""Masks of models that were made with `twinop optimize --padding right`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from twinop.deploy import FeedError, Session, session
from twinop.deploy.tensor_specs import RIGHT_PADDED
from twinop.record.dtypes import to_tensor

KINDS: dict[str, Callable[[np.ndarray], Any]] = {"numpy": np.asarray, "torch": to_tensor}


@pytest.fixture(scope="module", params=["int64", "float", "bfloat16"])
def padded(request: pytest.FixtureRequest) -> Session:
    """y = mask."""
    kind = request.param
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20]> g ({kind}[B, T] mask) => ({kind}[B, T] y) '
        "{ y = Identity(mask) }"
    )
    onnx.helper.set_model_props(model, {RIGHT_PADDED: "mask"})
    return session(model, ["CPUExecutionProvider"])


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Callable[[np.ndarray], Any]:
    return KINDS[request.param]


@pytest.mark.parametrize("rows", [[[1, 1, 1]], [[1, 1, 0], [1, 1, 1], [1, 0, 0]], [[1], [1]], [[], []]])
def test_padding_at_the_end_is_accepted(padded: Session, kind: Any, rows: list[list[int]]) -> None:
    mask = np.array(rows, padded.inputs["mask"].numpy_dtype)
    [y] = padded.run({"mask": kind(mask)}).values()
    assert tuple(y.shape) == mask.shape


@pytest.mark.parametrize(
    ("row", "rows"),
    [
        (0, [[0, 1, 1]]),
        (1, [[1, 1, 0], [1, 0, 1]]),
        (1, [[1, 0], [0, 0]]),
        (0, [[2, 1, 0]]),
        (1, [[1], [-1]]),
    ],
)
def test_other_masks_are_refused(padded: Session, kind: Any, row: int, rows: list[list[int]]) -> None:
    mask = np.array(rows, padded.inputs["mask"].numpy_dtype)
    expected = (
        f"^input mask, row {row}: expected ones, then zeros. The model was made with `twinop optimize "
        "--padding right`.* Pad sequences at their end, or optimise the model again without --padding right$"
    )
    with pytest.raises(FeedError, match=expected):
        padded.run({"mask": kind(mask)})


def test_random_inputs_fit(padded: Session) -> None:
    """They are what `twinop run` and the service's first run take."""
    mask = padded.inputs["mask"].random((3, 5), np.random.default_rng(0))
    assert (mask == 1).all()
    padded.run({"mask": mask})
