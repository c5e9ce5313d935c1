"""Computes the convolution of patches that lie side by side as a matmul.

Matches: Conv with strides of its kernel's size, no padding, groups or dilation, and what makes tokens of its
result, as in vision transformers: Reshape [B, N, H*W] and Transpose [B, H*W, N], or Transpose [B, H, W, N].
Writes: the patches as rows, a MatMul and, for a bias, Add.
Leaves alone: images of unknown size or with a rest beside the patches; patches whose number of elements is no
multiple of 8, which are misaligned in 16 bits.
"""

import onnx_ir as ir

from twinop.model import weights

from . import graph as g
from .rewrite import Rewrite

_Match = tuple[list[int], list[g.Dim], ir.Node]


class Patches(Rewrite[_Match], key="patches", op_types=("Conv",), device="cuda"):
    """Finds the sizes of C, H, rows, W and columns; the shape of the tokens, and the node that makes them."""

    def match(self, node: ir.Node) -> _Match | str:
        image, kernel = g.dims(node.inputs[0]), g.dims(node.inputs[1])
        if image is None or kernel is None or len(kernel) != 4 or not g.is_constant(node.inputs[1]):
            return "it is no convolution of two dimensions with a constant weight"
        batch, _, height, width = image
        channels, rows, columns = (int(size or 0) for size in kernel[1:])
        if (
            g.attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID")
            or any(g.attribute(node, "pads", [0]))
            or list(g.attribute(node, "strides", [1, 1])) != [rows, columns]
            or g.attribute(node, "group", 1) != 1
            or any(step != 1 for step in g.attribute(node, "dilations", [1]))
        ):
            return "its patches overlap, are padded or are divided into groups"
        if not isinstance(height, int) or not isinstance(width, int) or height % rows or width % columns:
            return "the image has no known number of whole patches"
        if channels * rows * columns % 8:
            return "the number of elements of a patch is no multiple of 8"
        sizes = [channels, height // rows, rows, width // columns, columns]
        last, user = None, g.only_user(node.outputs[0])
        places: list[g.Dim] = [sizes[1], sizes[3]]
        if g.has_permutation(user, [0, 2, 3, 1]):
            last = user
        elif user is not None and user.op_type == "Reshape":
            places = [sizes[1] * sizes[3]]
            is_row = g.same_dims(g.dims(user.outputs[0]), [batch, kernel[0], *places])
            last = g.only_user(user.outputs[0]) if is_row else None
            last = last if g.has_permutation(last, [0, 2, 1]) else None
        if last is None:
            return "no tokens are made of it"
        return sizes, [batch, *places, kernel[0]], last

    def apply(self, node: ir.Node, match: _Match) -> None:
        (x, kernel, *bias), (sizes, shape, last) = node.inputs, match
        tensor, depth = g.tensor(kernel), sizes[0] * sizes[2] * sizes[4]
        assert x is not None and kernel is not None and tensor is not None
        patches = g.reshape(last, x, [0, *sizes], [shape[0], *sizes])
        patches = g.transpose(last, patches, [0, 2, 4, 1, 3, 5])
        places = [int(size or 0) for size in shape[1:-1]]
        patches = g.reshape(last, patches, [0, *places, depth], [*shape[:-1], depth])
        matrix = weights.reshape(tensor, [tensor.size // depth, depth])
        weight = g.initializer(self.context.graph, matrix, f"{kernel.name}_rows")
        result = g.add(last, "MatMul", [patches, g.transpose(last, weight, [1, 0])], shape=shape)
        if bias and bias[0] is not None:
            result = g.add(last, "Add", [result, bias[0]], shape=shape)
        self.replace(last.outputs[0], result)
