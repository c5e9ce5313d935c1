"""The rewrites in the order in which they run, and the driver that runs them."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

import onnx_ir as ir

from twinop.errors import ExportError, option
from twinop.system.progress import Progress, silent

from . import (
    activations,
    ada_layer_norm,
    addcmul,
    attention,
    batched_heads,
    cached_attention,
    dequantize,
    einsum,
    embedding,
    equivalence,
    gated,
    growing_caches,
    invariance,
    linear,
    linear_fp8,
    merge_linear,
    norm_inputs,
    norm_into_matmul,
    norms,
    packed_attention,
    patches,
    precision,
    quantised,
    rotary,
    split_linear,
    unflatten,
    unfuse_ort,
)
from . import graph as g
from .rewrite import Rewrite

PASSES: Sequence[type[Rewrite]] = (
    dequantize.Dequantize,
    unfuse_ort.UnfuseOrt,
    einsum.Einsum,
    embedding.Embeddings,
    patches.Patches,
    batched_heads.BatchedHeads,
    unflatten.Unflatten,
    activations.Activations,
    norms.Norms,
    rotary.Rotary,
    growing_caches.GrowingCaches,
    attention.Attention,
    gated.Gates,
    split_linear.SplitLinear,
    ada_layer_norm.AdaLayerNorm,
    addcmul.Addcmul,
    linear_fp8.LinearFp8,
    linear.Linears,
    merge_linear.MergeLinear,
    packed_attention.PackedAttention,
    cached_attention.CachedAttention,
    norm_inputs.EmbedNorm,
    norm_inputs.AddNorm,
)
"""In the order in which they run. Those with a `device` are no faster than ONNX Runtime on another one."""
LATE: Sequence[type[Rewrite]] = (
    quantised.QuantisedGates,
    quantised.Quantised,
    linear_fp8.InFp8,
    norm_into_matmul.NormIntoMatmul,
    invariance.Invariance,
)
"""Those that run on the model in 16 bits."""


def chosen(device: str, dtype: str, without: Iterable[str] = ()) -> list[type[Rewrite]]:
    """Returns the rewrites for a device and a dtype, in order."""
    in_16_bits = device == "cuda" and dtype in precision.DTYPES
    fitting = [each for each in PASSES if each.device in ("", device) and each.name not in without]
    return [each for each in fitting if in_16_bits or not each.sixteen_bits_only]


def apply_passes(
    context: g.RewriteContext, passes: Iterable[type[Rewrite]], progress: Progress = silent
) -> set[str]:
    """Applies rewrites to the model of a context; returns the names of those that changed it. NotEquivalent:
    one fails, on a graph that it was not written for."""
    acting = set[str]()
    for each in passes:
        progress(f"rewriting: {each.name}")
        try:
            acting |= {each.name} if each(context)(context.model).modified else set()
        except Exception as failure:
            text = f"fails: {type(failure).__name__}: {failure}"
            raise equivalence.NotEquivalent(text, each.name) from failure
    return acting


def explain(context: g.RewriteContext, name: str, passes: Iterable[type[Rewrite]]) -> str:
    """Applies rewrites, and says which condition failed in each that starts from a node, by its name or that
    of an output, or from its readers; ExportError: the model has no such node."""
    nodes = {str(value.name): node for node in context.graph for value in node.outputs}
    nodes |= {str(node.name): node for node in context.graph}
    if (found := nodes.get(name)) is None:
        near = ", ".join(get_close_matches(name, nodes, cutoff=0.3)) or "none"
        raise ExportError(
            f"{option('explain', name)}: no node or value has this name after constant folding; similar "
            f"names: {near}"
        )
    names, lines = {str(each.name) for each in found.outputs}, [f"{found.op_type} {name}:"]
    for each in passes:
        rewrite = each(context)

        def watch(node: ir.Node, outcome: object, rewrite: Rewrite = rewrite) -> None:
            is_start = not names.isdisjoint(str(value.name) for value in node.outputs)
            is_reader = not names.isdisjoint(str(value.name) for value in node.inputs if value is not None)
            why = str(outcome) if isinstance(outcome, g.Skipped | str) else "matches"
            if is_start or (is_reader and not isinstance(outcome, str)):
                where = "" if is_start else f" from {node.op_type} {node.outputs[0].name}"
                lines.append(f"  {rewrite.name}{where}: {why}")

        rewrite.watch = watch
        rewrite(context.model)
        if names.isdisjoint(str(value.name) for node in context.graph for value in node.outputs):
            return "\n".join([*lines, f"  {rewrite.name}: fused, so its value is internal to the new node"])
    return "\n".join(lines if lines[1:] else [*lines, "  no rewrite starts from it, or from what reads it"])
