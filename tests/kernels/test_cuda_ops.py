"""Ops run on more than 2^31 elements."""

import pytest
import torch
from same_bits import assert_same_bits
from samples import ALL, RECORDS, Sample, library_of, make_sample

from twinop import torch_op
from twinop.record.op_spec import OpSpec
from twinop.testing.one_node import make_session, one_node_model, run_bound
from twinop.testing.samples import why_not_derived
from twinop.torch_op.rules import as_tuple

pytestmark = pytest.mark.cuda
MANY = (1 << 31) + 9


def call(record: OpSpec, sample: Sample) -> tuple[torch.Tensor, ...]:
    return as_tuple(getattr(torch_op, record.name)(*sample.inputs.values(), **sample.attributes))


ROWWISE = [
    record
    for record in ALL.values()
    if record.rows
    and not why_not_derived(record)
    and {"bfloat16"} in [set(c.values()) for c in record.combinations]
]


@pytest.mark.parametrize("record", ROWWISE, ids=lambda record: record.name)
def test_rows_beyond_2_to_the_31_elements(record: OpSpec) -> None:
    """Offsets have 64 bits. Rows at both ends and near 2^31 elements have the right results."""
    dtypes = next(c for c in record.combinations if set(c.values()) == {"bfloat16"})
    columns = 4098
    rows = MANY // columns + 3
    shapes = {
        name: t.shape for name, t in make_sample(record, dtypes, (1, columns)).inputs.items() if t is not None
    }
    present = {entry.name: not entry.optional or not record.is_backward for entry in record.inputs}
    inputs: dict[str, torch.Tensor | None] = {}
    for name, shape in shapes.items():
        whole = (rows, shape[-1]) if len(shape) == 2 else tuple(shape)
        inputs[name] = None
        if present[name]:
            tensor = inputs[name] = torch.empty(whole, dtype=torch.bfloat16, device="cuda")
            for part in tensor.flatten().split(1 << 28):
                part.normal_()
    results = call(record, Sample(inputs))
    for begin in (0, rows // 2, MANY // columns - 2, rows - 4):
        few = Sample({n: t if t is None or t.dim() < 2 else t[begin : begin + 4] for n, t in inputs.items()})
        for name, a, b in zip(record.outputs, results, call(record, few), strict=True):
            if a.dim() == 2:  # not a sum over the rows
                assert_same_bits(a[begin : begin + 4], b, f"{record.name}.{name} from row {begin}")


@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("large", ["table", "ids"])
def test_embeddings_beyond_2_to_the_31_elements(large: str, ids_dtype: torch.dtype) -> None:
    """embed_layer_norm of a table that large, or with results that large."""
    columns = 4098
    count = MANY // columns + 3
    ends = [0, 1, count // 2, MANY // columns - 1, MANY // columns, count - 1, -1, -count]
    table = torch.empty(count if large == "table" else 7, columns, dtype=torch.bfloat16, device="cuda")
    for part in table.flatten().split(1 << 28):
        part.normal_()
    rows, weight = (torch.randn(columns, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    ids = torch.tensor(ends) if large == "table" else torch.arange(count) % 7
    ids = ids.to("cuda", ids_dtype)[:, None]
    results = torch_op.embed_layer_norm(table, ids, rows.view(1, 1, -1), weight)
    chosen = torch.arange(len(ends)) if large == "table" else torch.tensor(ends)
    few_ids = torch.arange(len(ends), dtype=ids_dtype, device="cuda")[:, None]
    few = torch_op.embed_layer_norm(table[ids[chosen.cuda(), 0].long()], few_ids, rows.view(1, 1, -1), weight)
    for name, a, b in zip(("y", "sum"), results, few, strict=True):
        assert_same_bits(a[chosen.cuda()], b, f"{name}, large {large}")


@pytest.mark.parametrize("name", ["softmax", "rms_norm", "layer_norm"])
def test_one_row_beyond_2_to_the_31_columns(name: str) -> None:
    x = torch.ones(1, MANY, dtype=torch.bfloat16, device="cuda")
    y = getattr(torch_op, name)(x)
    expected = {"softmax": 1 / MANY, "rms_norm": 1.0, "layer_norm": 0.0}[name]
    for part in y.flatten().split(1 << 28):
        torch.testing.assert_close(part, torch.full_like(part, expected))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_more_than_2_to_the_31_elements(dtype: str) -> None:
    """Counts and offsets have 64 bits in torch and ONNX Runtime, for aligned and misaligned inputs."""
    size = MANY
    record = RECORDS["relu"]
    dtypes = next(c for c in record.combinations if c["x"] == dtype)
    buffer = torch.empty(size + 1, dtype=getattr(torch, dtype), device="cuda")
    for part in buffer.split(1 << 28):
        part.normal_()
    for x in (buffer[:size], buffer[1 : size + 1]):
        result = torch_op.relu(x)
        for mine, theirs in zip(result.split(1 << 28), x.split(1 << 28), strict=True):
            assert torch.equal(mine, torch.relu(theirs))
        actual = torch.full_like(result, 7.0)
        session = make_session(one_node_model(record, dtypes, [True], {}), library_of(record), "cuda")
        run_bound(session, {"x": x}, {"y": actual})
        for mine, theirs in zip(actual.split(1 << 28), result.split(1 << 28), strict=True):
            assert torch.equal(mine, theirs)
        del result, actual
