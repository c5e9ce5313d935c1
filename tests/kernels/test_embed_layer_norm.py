"""embed_layer_norm: ids of both types, rows of one or of all sequences, errors. Other tests cover more."""

import pytest
import torch
from linear_calls import random
from samples import ALL, DEVICES, moved

from twinop import torch_op
from twinop.libraries.library import find_library
from twinop.model.attach import attach_bodies
from twinop.testing.one_node import body_session, make_session, one_node_model

ENTRIES = 19
WIDTHS = (1, 33, 64, 512, 768, 1152, 2049, 4096, 5120, 20000)  # each way to hold a row


def exact(
    table: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """In fp64, with the sum rounded as the op does."""
    total = (table.double()[ids.long()] + rows.double()).to(table.dtype).double()
    return torch.nn.functional.layer_norm(total, total.shape[-1:], weight.double(), bias.double()), total


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_values(dtype: torch.dtype, columns: int, device: str) -> None:
    """Several rows and one, aligned and not, a table in a wider tensor, negative ids."""
    for batch, length, of_rows in ((3, 5, 1), (2, 9, 2), (1, 1, 1), (4, 1, 4)):
        table = random(ENTRIES, columns, dtype=dtype).to(device)
        rows = random(of_rows, length, columns, dtype=dtype).to(device)
        weight, bias = (random(columns + i, dtype=dtype).to(device)[i:] for i in (0, 1))
        ids = torch.arange(batch * length, device=device).view(batch, length) * 7 % (2 * ENTRIES) - ENTRIES
        wider = torch.cat([table, table], 1)[:, :columns]
        shifted = moved(table)
        y, total = exact(table, ids, rows, weight, bias)
        for given, chosen in ((table, ids), (wider, ids.int()), (shifted, ids.repeat(1, 2)[:, :length])):
            found = torch_op.embed_layer_norm(given, chosen, rows, weight, bias)
            assert torch.equal(found[1].double(), total)
            bound = 2 * max(torch.finfo(dtype).eps, 1e-6) * float(y.abs().max())
            if columns > 1 or dtype == torch.float64:  # else 0 / sqrt(eps) shows nothing
                assert float((found[0].double() - y).abs().max()) <= bound, (batch, length)


def call(
    ids: torch.Tensor, *, entries: int = ENTRIES, sequences: int = 1, device: str = "cpu"
) -> torch.Tensor:
    table, rows = torch.ones(entries, 4), torch.ones(sequences, ids.shape[-1], 4)
    given = [each.to(device) for each in (table, ids, rows, torch.ones(4))]
    return torch_op.embed_layer_norm(*given)[1]


WRONG = [ENTRIES, -ENTRIES - 1, 2**31 - 1, -(2**31), 2**40, -(2**40), 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_ids_outside_of_the_table(dtype: torch.dtype, columns: int, device: str) -> None:
    """Their rows are NaN, others as without them; aligned and not, of both types of ids."""
    sizes = (ENTRIES, columns), (1, 9, columns)
    table, rows = (random(*size, dtype=dtype).to(device) for size in sizes)
    weight = random(columns, dtype=dtype).to(device)
    shifted = moved(table)
    right = torch.tensor([[0, 1, 2, 3, 4, -1, -ENTRIES, ENTRIES - 1, 5]], device=device)
    for kind, wrong in ((torch.int64, WRONG), (torch.int32, WRONG[:4])):
        ids = right.to(kind).repeat(2, 1)
        ids[0, : len(wrong)] = torch.tensor(wrong, device=device).to(kind)
        ids[1, 8] = wrong[0]
        for given in (table, shifted):
            expected = torch_op.embed_layer_norm(given, right.repeat(2, 1), rows, weight)
            results = torch_op.embed_layer_norm(given, ids, rows, weight)
            for found, without in zip(results, expected, strict=True):
                is_wrong = torch.zeros(2, 9, dtype=torch.bool, device=device)
                is_wrong[0, : len(wrong)] = is_wrong[1, 8] = True
                assert found[is_wrong].isnan().all()
                assert torch.equal(found[~is_wrong], without[~is_wrong])


@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
def test_ids_outside_of_the_table_in_onnxruntime(kind: torch.dtype) -> None:
    """The kernel and the function body have the same rule."""
    record = ALL["embed_layer_norm"]
    types = dict.fromkeys(("table", "rows", "weight", "bias", "y", "sum"), "float32")
    types["ids"] = str(kind).removeprefix("torch.")
    model = one_node_model(record, types, [1, 1, 1, 1, 0], {})
    ids = torch.tensor([[0, ENTRIES, -ENTRIES], [-ENTRIES - 1, 2**31 - 1, -1]], dtype=kind)
    feeds = {"table": random(ENTRIES, 8), "ids": ids, "rows": random(1, 3, 8), "weight": random(8)}
    expected = torch_op.embed_layer_norm(*feeds.values())
    assert expected[0].isnan().any(-1).tolist() == [[False, True, False], [True, True, False]]
    arrays = {name: each.numpy() for name, each in feeds.items()}
    found = make_session(model, find_library("custom_ops"), "cpu").run(None, arrays)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(torch.from_numpy(a).nan_to_num(9), b.nan_to_num(9))
    in_body = body_session(attach_bodies(model)).run(feeds)
    for name, wanted in zip(("y", "sum"), expected, strict=True):
        torch.testing.assert_close(in_body[name], wanted, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_ids_outside_of_the_table(device: str) -> None:
    """They reach no row of the table."""
    table = random(ENTRIES, 4).to(device).requires_grad_()
    ids = torch.tensor([[0, ENTRIES, -ENTRIES - 1, 2]], device=device)
    y, _ = torch_op.embed_layer_norm(table, ids, random(1, 4, 4).to(device), random(4).to(device))
    (of_table,) = torch.autograd.grad(y[:, [0, 3]].square().sum(), table)
    changed = of_table.isnan().any(-1) | (of_table != 0).any(-1)
    assert changed.nonzero().flatten().tolist() == [0, 2] and not of_table.isnan().any()


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_fit(device: str) -> None:
    ids = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="rows is for 2 sequences; expected 1, for all, or 3, as ids has"):
        call(ids, sequences=2, device=device)
    with pytest.raises(RuntimeError, match="the table has no rows to choose from"):
        call(ids, entries=0, device=device)

    assert call(ids[:0], device=device).shape == (0, 2, 4)
