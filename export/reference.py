"""What torch computes: the outputs with which an exported file is compared, and how certain they are."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from math import inf
from typing import Any

import onnx_ir as ir
import torch
from torch.utils._pytree import tree_leaves

from twinop.errors import ExportError, TwinopError
from twinop.optimize.inputs import edge_cases
from twinop.record.dtypes import to_array, to_tensor, torch_name
from twinop.record.tolerance import accepted, difference, nudged, same_bits, scale_of

from .inputs import Dynamic, as_module, bind_inputs, check_dynamic, leaves, resized
from .state import changed_weights, kept_state
from .verify import Case

Tensors = Mapping[str, torch.Tensor]
Outputs = dict[str, torch.Tensor]


class Reference:
    """A model, its example inputs with their dynamic axes, and the outputs for them by name, after `run`."""

    def __init__(
        self, model: Any, args: Any, kwargs: Mapping[str, Any] | None, dynamic: Dynamic | None
    ) -> None:
        self.model = as_module(model)
        self.inputs = bind_inputs(self.model, args, kwargs)
        self.axes = check_dynamic(dynamic, self.inputs.tensors)
        self.expected: Outputs = {}

    def run(self) -> list[str]:
        """Runs the model on its example inputs; returns a note for each write that the file will not have."""
        notes: list[str] = []
        self.expected = self._outputs(self.inputs.tensors, notes)
        return notes

    @property
    def output_names(self) -> list[str]:
        """The names in the graph: y, or y_0, y_1 ..., or a dict's keys."""
        names = [n if n and not n[0].isdigit() else f"y_{n}".rstrip("_") for n in self.expected]
        return [f"{name}_out" if name in self.inputs.tensors else name for name in names]

    def cases(self, notes: list[str]) -> list[Case]:
        """Returns the example inputs and larger ones, with outputs; `notes` says why there are no larger."""
        found = [self._case(self.inputs.tensors, self.expected)]
        if self.axes:
            try:
                found.append(self._larger_case())
            except ExportError as error:
                notes.append(f"not compared at other sizes: {error}")
        return found

    def edge_cases(self, exported: ir.Model) -> Iterator[Case]:
        """Yields numbers that are all 0, all 1 or large, with outputs, where torch runs the model."""
        scales = [*map(scale_of, self.expected.values())]
        arrays = {name: to_array(tensor) for name, tensor in self.inputs.tensors.items()}
        for edge, case in edge_cases(exported, arrays, ()).items():
            device = {name: tensor.device for name, tensor in self.inputs.tensors.items()}
            tensors = {name: to_tensor(array).to(device[name]) for name, array in case.items()}
            with suppress(ExportError):
                yield self._case(tensors, None, edge, scales)

    def _larger_case(self) -> Case:
        """Returns inputs with one more entry on each dynamic axis, and torch's outputs; ExportError: torch
        runs the model neither with fresh data nor with the example's."""
        try:
            return self._case(resized(self.inputs.tensors, self.axes, fresh=True))
        except ExportError:  # values that depend on each other, such as sorted offsets
            return self._case(resized(self.inputs.tensors, self.axes, fresh=False))

    def _case(
        self, tensors: Tensors, outputs: Outputs | None = None, edge: str = "", scales: Sequence[float] = ()
    ) -> Case:
        expected = list((outputs or self._outputs(tensors)).values())
        noise = cache(partial(self._noise, tensors, expected, bool(edge), scales))
        return Case(tensors, expected, noise, edge, scales)

    def _noise(
        self, tensors: Tensors, expected: Sequence[torch.Tensor], edge: bool, scales: Sequence[float]
    ) -> list[float]:
        """Returns by how much each output changes with the last bits of the inputs and the weights.

        Zeros of edge inputs become tiny numbers, which shows what is a choice among equals; that NaN
        becomes a number there is no noise. Infinity is in fp16: ONNX Runtime keeps results in fp32, which do
        not overflow.
        """
        scales = scales or [0.0] * len(expected)
        again = self._outputs(tensors).values()
        for index, (a, b, least) in enumerate(zip(expected, again, scales, strict=True)):
            if not difference(a, b, least) <= accepted(torch_name(a.dtype)):
                raise ExportError(
                    f"the model draws random numbers: output {index} differs from call to call. Export it "
                    "with dropout off, or make the random numbers an input"
                )
        numbers = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        zeros = not any(tensor.any() for tensor in numbers.values())
        try:
            arrays = {name: nudged(to_array(tensor), zeros=edge) for name, tensor in numbers.items()}
            changed = {name: to_tensor(each).to(numbers[name].device) for name, each in arrays.items()}
            with changed_weights(self.model):
                other = self._outputs(dict(tensors) | changed).values()
        except ExportError:
            return [inf] * len(expected)
        errors = []
        for a, b, least in zip(expected, other, scales, strict=True):
            error, wide = difference(a, b, least), a.dtype is not torch.float16
            if wide and zeros and a.is_floating_point() and error == inf:
                error = 0.0
            errors.append(error if wide or a.isfinite().all() else inf)
        return errors

    def _outputs(self, tensors: Tensors, lost: list[str] | None = None) -> Outputs:
        """Returns the outputs by name. `lost` gets a note for each write that the file does not have. What
        the model writes into itself has its old values again afterwards, as in the file."""
        copies = {name: tensor.clone() for name, tensor in tensors.items()}  # a model may write to its inputs
        try:
            with torch.no_grad(), kept_state(self.model) as written:
                result = self.inputs.call(self.model, dict(copies))
                given = dict(leaves(result, outputs=True))
                outputs = {name: value.clone() for name, value in given.items()}  # of a buffer's view
        except TwinopError:
            raise
        except Exception as error:
            raise ExportError(f"the model fails on its example inputs, in torch: {error}") from error
        if not outputs:
            raise ExportError(f"the model returns {type(result).__name__}; expected at least one tensor")
        if lost is not None:
            numbers = [each for each in tree_leaves(result) if isinstance(each, (int, float, str))]
            if numbers:
                self.inputs.returned = frozenset(outputs)
                shown = ", ".join(map(repr, numbers))
                lost.append(f"the model returns {shown} beside tensors: the file has no output for it")
            kept = {id(tensor) for tensor in given.values()}
            lost += (
                f"the model writes into its input {name}, and does not return it: the file has no output for "
                "it"
                for name, copy in copies.items()
                if copy._version > 0 and id(copy) not in kept
            )
            lost += (
                f"the model writes into its buffer {name}. In the file it is a constant: make it an input "
                "that the model returns"
                for name in written.buffers
            )
            if written.attributes and self._keeps_state(tensors, outputs):
                names = ", ".join(sorted(written.attributes))
                lost.append(
                    f"the model's outputs depend on what earlier calls left in {names}. The file always "
                    "computes the first call: make it an input that the model returns"
                )
        return outputs

    def _keeps_state(self, tensors: Tensors, outputs: Outputs) -> bool:
        """Whether a second call gives other outputs than the first one's."""
        try:
            with kept_state(self.model):
                for _ in range(2):
                    with torch.no_grad():
                        copies = {name: tensor.clone() for name, tensor in tensors.items()}
                        result = self.inputs.call(self.model, copies)
                second = dict(leaves(result, outputs=True))
                return any(not same_bits(second[name], first) for name, first in outputs.items())
        except Exception:  # such as other sizes
            return True
