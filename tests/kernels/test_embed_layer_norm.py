"""embed_layer_norm: ids of both types, rows of one or of all sequences, errors. Other tests cover more."""

import pytest
import torch
from linear_calls import random
from samples import DEVICES

from twinop import torch_op
from twinop.errors import RecordError

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
        shifted = torch.cat([table.new_zeros(1), table.flatten()])[1:].view(table.shape)
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


@pytest.mark.parametrize("wrong", [ENTRIES, -ENTRIES - 1, 2**40])
def test_ids_outside_of_the_table(wrong: int) -> None:
    ids = torch.tensor([[0, 1], [2, wrong]])
    with pytest.raises(RuntimeError, match=rf"ids\[1, 1\] is {wrong}; the table has 19 rows"):
        call(ids)


@pytest.mark.cuda
def test_ids_outside_of_the_table_read_nothing_else_on_cuda() -> None:
    table = torch.arange(ENTRIES, device="cuda").float()[:, None].expand(-1, 4).contiguous()
    ids = torch.tensor([[ENTRIES, 2**40, -ENTRIES - 1, -(2**40)]], device="cuda")
    rows, weight = torch.zeros(1, 4, 4, device="cuda"), torch.ones(4, device="cuda")
    total = torch_op.embed_layer_norm(table, ids, rows, weight)[1]
    assert total[0, :, 0].tolist() == [ENTRIES - 1, ENTRIES - 1, 0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_fit(device: str) -> None:
    ids = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="rows is for 2 sequences; expected 1, for all, or 3, as ids has"):
        call(ids, sequences=2, device=device)
    with pytest.raises(RuntimeError, match="the table has no rows to choose from"):
        call(ids, entries=0, device=device)
    with pytest.raises((RuntimeError, RecordError), match="no kernel takes these dtypes"):
        call(ids.float(), device=device)
    assert call(ids[:0], device=device).shape == (0, 2, 4)
