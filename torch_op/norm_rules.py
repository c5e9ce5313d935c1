"""The derivative of `ada_layer_norm`, whose scale and shift belong to a batch's entries."""

from torch import Tensor

from twinop.own_op import DERIVATIVES

from .registry import functions


def _ada_layer_norm_backward(
    grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, y: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    between = tuple(range(1, x.dim() - 1))  # the dimensions that share scale and shift
    normal = functions["layer_norm"](x.to(scale.dtype), None, None, -1, eps)
    scaled = grad * (1 + scale.reshape(scale.shape[0], *[1] * len(between), scale.shape[-1]))
    grad_x, _, _ = functions["layer_norm_backward"](scaled.to(x.dtype), x, None, None, None, -1, eps)

    def sum_of_batch(each: Tensor) -> Tensor:
        each = each.to(scale.dtype)
        return each.sum(between) if between else each

    return grad_x, sum_of_batch(grad * normal), sum_of_batch(grad)


def register_norm_rules() -> None:
    """Registers the derivative."""
    DERIVATIVES["ada_layer_norm"] = _ada_layer_norm_backward
