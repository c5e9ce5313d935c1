"""ada_layer_norm: each sequence has its own scale and shift. The tests of all ops cover the rest."""

import pytest
import torch
from linear_calls import random
from samples import DEVICES

from twinop import torch_op

DTYPES = {
    "float32": (torch.float32, torch.float32),
    "float16": (torch.float16, torch.float16),
    "float16, scale in float32": (torch.float16, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float64": (torch.float64, torch.float64),
}
WIDTHS = (1, 33, 64, 512, 1024, 1152, 2049, 4096, 5120, 11008, 20000)  # each way to hold a row


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=list(DTYPES))
def test_values(dtypes: tuple[torch.dtype, ...], columns: int, device: str) -> None:
    """Rows that threads share with rows of other sequences, aligned and not, scale and shift views of one."""
    for rows in ((3, 5), (2, 1, 9), (1, 40), (7,)):
        x = random(*rows, columns, dtype=dtypes[0]).to(device)
        both = random(rows[0], 2 * columns, dtype=dtypes[1]).to(device)
        for scale, shift in (both.chunk(2, -1), [each.contiguous() for each in both.chunk(2, -1)]):
            place = (slice(None), *[None] * (len(rows) - 1))
            normal = torch.nn.functional.layer_norm(x.double(), (columns,), eps=1e-6)
            exact = normal * (1 + scale.double()[place]) + shift.double()[place]
            for given in (x, torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)):
                found = torch_op.ada_layer_norm(given, scale, shift).double()
                bound = 2 * max(torch.finfo(dtypes[0]).eps, 1e-6) * float(exact.abs().max())
                if columns > 1 or dtypes[0] == torch.float64:  # else 0 / sqrt(eps) shows nothing
                    assert float((found - exact).abs().max()) <= bound, (rows, scale.is_contiguous())
