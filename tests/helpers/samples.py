"""twinop's ops and the two test ops, for tests of their own; `twinop.testing` derives their inputs."""

from collections.abc import Mapping
from typing import Any

import op_bodies
import own_references
import pytest
import torch

from twinop.record.op_spec import OpSpec
from twinop.testing.samples import (  # noqa: F401
    Sample,
    attribute_variants,
    call,
    has_derivative,
    large_sample,
    make_sample,
    presence_patterns,
    run_in_torch,
    samples,
    torch_dtype,
)
from twinop.testing.under_test import add_library, library_of, records_under_test  # noqa: F401
from twinop.testing.values import plain_values, values  # noqa: F401

for module in (own_references, op_bodies):
    add_library(module.library_path(), module)

ALL = records_under_test()
RECORDS = {name: record for name, record in ALL.items() if not record.is_backward}
HALVES = (torch.float16, torch.bfloat16)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def moved(tensor: torch.Tensor, by: int = 1) -> torch.Tensor:
    """Copies the tensor to `by` elements after an aligned address."""
    memory = torch.empty(tensor.numel() + by, dtype=tensor.dtype, device=tensor.device)
    return memory[by:].view(tensor.shape).copy_(tensor)


def combinations(records: Mapping[str, OpSpec]) -> list[Any]:
    """Returns (record, dtypes) for every dtype combination of every op: a list for `parametrize`."""
    return [
        pytest.param(record, dtypes, id=f"{record.name}-{'-'.join(dict.fromkeys(dtypes.values()))}")
        for record in records.values()
        for dtypes in record.combinations
    ]
