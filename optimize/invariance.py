"""Lets matmuls add up in one order for any number of rows: `twinop optimize --invariant`.

Matches: CustomLinear, CustomLinearSwiglu, CustomLinearQ and CustomLinearQSwiglu, in the model in 16 bits.
Writes: their attribute `invariant`. Without the option, in models with attention over a cache, `few_rows` of
the first two, so that a step of up to 64 sequences has one order; the other two have it anyway. Leaves alone,
and names: matmuls without such a kernel, and other nodes whose sums or choices may depend on the batch.
"""

import re

import onnx_ir as ir

from twinop.record.op_spec import DOMAIN

from . import graph as g
from .precision import DTYPES
from .rewrite import Rewrite, label

INVARIANT = "matmuls of one order of sums"  # in the `meta` of a graph: whether they are wanted
_SUMS = re.compile("Attention|Conv|Einsum|Gemm|GRU|LSTM|MatMul|MoE|(?<!Max)Pool|Reduce|RNN")
_OF_INTEGERS = re.compile("Integer$|^QLinear")


class Invariance(Rewrite[bool], key="invariance", sixteen_bits_only=True):
    """Sets an attribute of matmuls. Finds whether they are to be invariant."""

    def candidates(self) -> list[ir.Node]:
        if self.context.graph.meta.get(INVARIANT):
            return [*self.context.graph.all_nodes()]
        ops = ("linear", "linear_swiglu") if self.context.op_nodes("attention_cached") else ()
        return [node for op in ops for node in self.context.op_nodes(op)]

    def match(self, node: ir.Node) -> bool | g.Skipped | str:
        if not self.context.graph.meta.get(INVARIANT):
            return False
        is_matmul = node.domain == DOMAIN and node.op_type.startswith("CustomLinear")
        if reason := why_not_invariant(node) if is_matmul else _why_not(node):
            return g.Skipped(f"not invariant: {reason}")
        return is_matmul or "it is no matmul, and does not depend on the batch"

    def apply(self, node: ir.Node, match: bool) -> None:
        name, value = ("invariant", 1) if match else ("few_rows", 64)
        node.attributes[name] = ir.AttrInt64(name, value)
        if match:
            label(node, "invariant matmuls")


def why_not_invariant(node: ir.Node) -> str:
    """Returns why a matmul has no kernel for any number of rows, or "" if it has one."""
    weight, layout = node.inputs[1], g.attribute(node, "layout", "nk")
    if weight is None or weight.dtype is ir.DataType.UINT8:  # linear_q has one for each weight that it takes
        return ""
    sizes = [each if isinstance(each, int) else "?" for each in g.dims(weight) or (None, None)]
    n, k = sizes if layout == "nk" else reversed(sizes)
    step = 16 if node.op_type.endswith("Swiglu") else 8
    is_known = isinstance(n, int) and isinstance(k, int)
    fits = weight.dtype in DTYPES.values() and layout == "nk" and is_known and n % step == k % 64 == 0
    takes = f"it takes 16 bits, N a multiple of {step} and K of 64 as nk"
    return "" if fits else f"N = {n} and K = {k} as {layout} in {weight.dtype}; {takes}"


def _why_not(node: ir.Node) -> str:
    """Returns why the bits of another node may depend on the batch, or ""."""
    if node.domain not in ("", g.MICROSOFT, DOMAIN):
        return f"an op of {node.domain}"
    if node.op_type == "If":  # Phi-3 takes its long or short table by the longest sequence
        return "its choice may depend on the batch"
    if node.op_type in ("ReduceMax", "ReduceMin"):  # so Phi-3 finds the longest sequence where If is missing
        axes = g.ints(node, "axes", 1)
        of_all = axes is None or {0, -g.rank(node.inputs[0])} & {*axes}
        return "its value is that of the whole batch" if of_all else ""
    if node.op_type.startswith("DynamicQuantize"):  # also those of Linear and MatMul
        return "it has one scale for the batch"
    kind = node.inputs[0].dtype if node.inputs and node.inputs[0] is not None else None
    is_reduction = node.op_type.startswith("Reduce") and kind is not None and not kind.is_floating_point()
    is_exact = is_reduction or _OF_INTEGERS.search(node.op_type)  # a sum of integers has one value
    adds_up = _SUMS.search(node.op_type) or g.attribute(node, "reduction", "none") in ("add", "mul")
    return "its sums may depend on the batch" if adds_up and not is_exact and node.domain != DOMAIN else ""
