"""Runs samples of an op in ONNX Runtime."""

from typing import Any

import torch

from twinop.record.op_spec import OpSpec

from .one_node import make_session, one_node_model, run_bound
from .samples import Sample
from .under_test import library_of


class OrtRunner:
    """Runs samples. It keeps one session for each presence pattern and attribute set."""

    def __init__(self, record: OpSpec, dtypes: dict[str, str], device: str, threads: int = 0) -> None:
        self.record, self.dtypes, self.device, self.threads = record, dtypes, device, threads
        self.sessions: dict[str, Any] = {}

    def __call__(self, sample: Sample, outputs: tuple[torch.Tensor, ...]) -> None:
        present = [given is not None for given in sample.inputs.values()]
        key = f"{present}{sample.attributes}"
        if key not in self.sessions:
            model = one_node_model(self.record, self.dtypes, present, sample.attributes)
            self.sessions[key] = make_session(
                model, library_of(self.record), self.device, threads=self.threads
            )
        outputs_by_name = dict(zip(self.record.outputs, outputs, strict=True))
        run_bound(self.sessions[key], sample.tensors(), outputs_by_name)


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """Returns memory for an output, filled with a value that no op returns by chance."""
    return torch.full_like(like, 123, memory_format=torch.contiguous_format)
