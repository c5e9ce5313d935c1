"""The rewrites in the order in which they run, and the driver that runs them."""

from collections.abc import Callable, Iterable, Sequence

import onnx_ir as ir

from . import (
    activations,
    ada_layer_norm,
    addcmul,
    attention,
    batched_heads,
    cached_attention,
    dequantize,
    embedding,
    gated,
    growing_caches,
    linear,
    merge_linear,
    norm_inputs,
    norms,
    packed_attention,
    precision,
    rotary,
    split_linear,
    standard_ops,
    unflatten,
    unfuse_ort,
)
from . import graph as g
from .prepare import clean
from .rewrite import Rewrite, fused, skipped


def _function(
    title: str, function: Callable[[g.RewriteContext], None], only: str = "", is_half: bool = False
) -> type[Rewrite]:
    class Function(Rewrite[None]):
        name = title
        device = only
        sixteen_bits_only = is_half

        def match(self, node: ir.Node) -> str:
            return ""

        def apply(self, node: ir.Node, match: None) -> None: ...

        def call(self, model: ir.Model) -> ir.passes.PassResult:
            before = dict(self.context.made)
            function(self.context)
            clean(model)
            return ir.passes.PassResult(model, before != self.context.made)

    return Function


PASSES: Sequence[type[Rewrite]] = (
    dequantize.Dequantize,
    _function("unfuse_ort", unfuse_ort.rewrite),
    embedding.Embeddings,
    unflatten.Unflatten,
    activations.Activations,
    norms.Norms,
    _function("rotary", rotary.rewrite),
    batched_heads.BatchedHeads,
    _function("growing_caches", growing_caches.rewrite, "cpu"),
    _function("attention", attention.rewrite),
    gated.Gates,
    split_linear.SplitLinear,
    ada_layer_norm.AdaLayerNorm,
    addcmul.Addcmul,
    linear.Linears,
    merge_linear.MergeLinear,
    _function("packed_attention", packed_attention.rewrite, "cuda", True),
    _function("cached_attention", cached_attention.rewrite, "cuda", True),
    norm_inputs.EmbedNorm,
    norm_inputs.AddNorm,
    standard_ops.Replace,
)
"""In the order in which they run. Those with a `device` are no faster than ONNX Runtime on another one."""


def chosen(device: str, dtype: str, without: Iterable[str] = ()) -> list[type[Rewrite]]:
    """Returns the rewrites for a device and a dtype, in order."""
    return [
        each
        for each in PASSES
        if each.device in ("", device)
        and (dtype in precision.DTYPES or not each.sixteen_bits_only)
        and each.name not in without
    ]


class RewriteError(Exception):
    """A rewrite fails on a graph that it was not written for."""

    def __init__(self, name: str, failure: Exception) -> None:
        super().__init__(f"fails: {type(failure).__name__}: {failure}")
        self.name = name


def apply_passes(
    context: g.RewriteContext,
    passes: Iterable[type[Rewrite]],
    progress: Callable[[str], None] = lambda step: None,
) -> set[str]:
    """Applies rewrites to the model of a context; returns the names of those that changed it.

    Raises:
        RewriteError: one fails.
    """
    acting = set[str]()
    for each in passes:
        progress(f"rewriting: {each.name}")
        try:
            acting |= {each.name} if each(context)(context.model).modified else set()
        except Exception as failure:
            raise RewriteError(each.name, failure) from failure
    return acting


def counts(context: g.RewriteContext) -> tuple[dict[str, int], dict[str, int]]:
    """Returns what was fused and what was skipped, the most frequent first."""
    found = fused(context.model) + context.made, skipped(context.model) + context.left
    return dict(found[0].most_common()), dict(found[1].most_common())
