"""What Session.run says of feeds that do not fit the model, or its `twinop optimize --padding right`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from models import make_model

from twinop.deploy import FeedError, RunError, Session, session
from twinop.deploy.tensor_specs import RIGHT_PADDED
from twinop.record.dtypes import to_tensor


@pytest.mark.parametrize("make", [np.zeros, torch.zeros], ids=["numpy", "torch"])
def test_wrong_feeds(make: Any, relu: Session) -> None:
    double = np.float64 if make is np.zeros else torch.float64
    half = np.complex64 if make is np.zeros else torch.complex64
    good = make((2, 4), dtype=np.float32 if make is np.zeros else torch.float32)
    cases = [
        ({"z": good}, "the model has no input 'z'; its inputs: x"),
        ({"x": good, "z": good}, "the model has no input 'z'; its inputs: x"),
        ({}, "input missing: x .*given: none"),
        ({"x": make((2, 4), dtype=double)}, r"x is float64\[2, 4\].*takes float32\[N, 4\]: convert it to"),
        ({"x": make((2, 4), dtype=half)}, "x is complex64.*convert it to float32"),
        ({"x": good[0]}, r"x is float32\[4\].*it must have 2 dimensions, not 1"),
        ({"x": good[:, :3]}, r"x is float32\[2, 3\].*dimension 1 must be 4, not 3"),
    ]
    for feeds, message in cases:
        with pytest.raises(FeedError, match=message):
            relu.run(feeds)


def test_what_is_not_a_dict_of_inputs(relu: Session) -> None:
    array = np.ones((2, 4), np.float32)
    start = r'run takes a dict of the inputs by name .*: run\(\{"x": x\}\); given: '
    cases: list[tuple[Any, Any, str]] = [
        (torch.ones(2, 4), torch.ones(2, 4), "a torch tensor and a torch tensor$"),
        (array, None, "a numpy array$"),
        (["y"], {"x": array}, "a list and a dict$"),
    ]
    for feeds, outputs, message in cases:
        with pytest.raises(FeedError, match=start + message):
            relu.run(feeds, outputs)


def test_feeds_of_several_kinds() -> None:
    opened = session(make_model("CustomPadAffine", shape=(4,), inputs=["x", "w"]))
    array, tensor = np.ones(4, np.float32), torch.ones(4)
    for first, second, message in (
        (array, tensor, "w is a torch tensor and others are numpy arrays"),
        (tensor, array, "w is a numpy array and others are torch tensors"),
        (tensor, [1.0], "w is a list and others are torch tensors"),
    ):
        with pytest.raises(FeedError, match=message):
            opened.run({"x": first, "w": second})
    with pytest.raises(FeedError, match="x is a set, not an array|x is object"):
        opened.run({"x": {1}, "w": array})
    with pytest.raises(FeedError, match="x on cpu, w on meta. Move them to one"):
        opened.run({"x": tensor, "w": tensor.to("meta")})


def test_tensors_without_readable_memory(relu: Session) -> None:
    from torch._subclasses import FakeTensorMode

    x = torch.ones(2, 4)
    with pytest.raises(FeedError, match="x is a meta tensor: it has no data to run on"):
        relu.run({"x": x.to("meta")})
    for sparse in (x.to_sparse(), x.to_sparse_csr()):
        with pytest.raises(FeedError, match=r"x is sparse \(torch.sparse_.*\): pass a dense tensor"):
            relu.run({"x": sparse})
    with FakeTensorMode() as mode, pytest.raises(FeedError, match="x has no storage that can be read"):
        relu.run({"x": mode.from_tensor(x)})
    with pytest.raises(FeedError, match="x has no storage that can be read"):
        torch.func.vmap(lambda row: relu.run({"x": row})["y"])(torch.ones(3, 2, 4))


def test_tensors_that_lost_their_memory(relu: Session) -> None:
    """FSDP releases storages so. Feeds and the memory of outputs would end the process."""
    x = torch.ones(16, 4)
    whole, wide = torch.ones(4, 16).t(), torch.ones(32, 4)[16:]
    for size, lost in ((0, x.clone()), (100, x.clone()), (0, whole), (64, wide)):
        lost.untyped_storage().resize_(size)
        with pytest.raises(FeedError, match="input x has lost its memory: .* as FSDP does. Gather it"):
            relu.run({"x": lost})
        with pytest.raises(FeedError, match="the memory of output y (has lost its|is a torch tensor)"):
            relu.run({"x": x}, {"y": lost})
    empty = torch.ones(0, 4)
    empty.untyped_storage().resize_(0)
    assert relu.run({"x": empty})["y"].shape == (0, 4)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nested_tensors(relu: Session, layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout)
    with pytest.raises(FeedError, match="x is nested: pass a dense tensor"):
        relu.run({"x": nested})
    with pytest.raises(FeedError, match="the memory of output y is"):
        relu.run({"x": torch.ones(2, 4)}, {"y": nested})


def test_numbers_of_another_machine(relu: Session) -> None:
    array = np.ones((2, 4), ">f4")
    with pytest.raises(FeedError, match=r"x has its bytes in the other order \(>f4\): pass x.astype\("):
        relu.run({"x": array})
    assert relu.run({"x": array.astype(array.dtype.newbyteorder("="))})["y"].sum() == 8


def test_what_a_kernel_refuses_is_one_message() -> None:
    opened = session(make_model("CustomPadAffine", pads=[-1, 0]))
    for x in (np.ones((2, 4), np.float32), torch.ones(2, 4)):
        with pytest.raises(RunError) as error:
            opened.run({"x": x})
        assert str(error.value).startswith("CustomPadAffine node 'node' (CPU): custom_domain::pad_affine(x: ")
        assert "pads must be two numbers >= 0" in str(error.value)


def test_another_thread_can_end_a_run(relu: Session) -> None:
    options = onnxruntime.RunOptions()
    x = np.ones((2, 4), np.float32)
    assert (relu.run({"x": x}, options=options)["y"] == 1).all()
    options.terminate = True
    with pytest.raises(RunError, match="terminate flag"):
        relu.run({"x": x}, options=options)
    with pytest.raises(FeedError, match="run options are for numpy arrays, not for torch"):
        relu.run({"x": torch.from_numpy(x)}, options=options)


KINDS: dict[str, Callable[[np.ndarray], Any]] = {"numpy": np.asarray, "torch": to_tensor}


@pytest.fixture(scope="module", params=["int64", "float", "bfloat16"])
def padded(request: pytest.FixtureRequest) -> Session:
    """y = mask."""
    kind = request.param
    text = f"({kind}[B, T] mask) => ({kind}[B, T] y) {{ y = Identity(mask) }}"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> g {text}')
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
