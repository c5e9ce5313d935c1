"""Replaces modules of torch and transformers in an existing model by twinop's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from . import modules as ours
from .registry import functions


@dataclass(frozen=True)
class Replacement:
    """What happens to one module. If the module stays, `twin` is None and `reason` says why."""

    path: str
    module: str
    twin: str | None
    reason: str = ""

    def __str__(self) -> str:
        where = self.path or "the model itself"
        return f"{where}: {self.module} " + (f"-> {self.twin}" if self.twin else f"stays: {self.reason}")


class _Stays(Exception):
    """A module that looks like one of ours computes something that the op does not compute."""


@dataclass(frozen=True)
class _Rule:
    """How to replace a module."""

    op: str
    twin: type[nn.Module]
    attributes: Callable[[Any], dict[str, Any]] = lambda module: {}  # those that the twin lacks; or _Stays
    drops: tuple[str, ...] = ()  # submodules that the twin does not use


def _softplus(module: nn.Softplus) -> dict[str, Any]:
    if (module.beta, module.threshold) != (1, 20):
        raise _Stays(
            f"beta {module.beta}, threshold {module.threshold}; the op has beta 1 and torch's default, 20"
        )
    return {}


def _softmax(module: nn.Softmax) -> dict[str, Any]:
    if module.dim is None:
        raise _Stays("it has no dim: torch guesses one from the input's rank. Give it a dim")
    return {}


def _gated_mlp(module: Any) -> dict[str, Any]:
    act = type(module.act_fn)
    if act not in (nn.SiLU, ours.CustomSiLU) and _transformers_name(module.act_fn) != "SiLUActivation":
        raise _Stays(f"its act_fn is {act.__name__}; swiglu has SiLU")
    return {}


def _gelu(approximate: str) -> _Rule:
    return _Rule("gelu", ours.CustomGELU, lambda module: {"approximate": approximate})


def _rms_norm(eps: str, offset: int) -> _Rule:
    def attributes(module: Any) -> dict[str, Any]:
        return {
            "normalized_shape": tuple(module.weight.shape),
            "eps": getattr(module, eps),
            "elementwise_affine": True,
            "offset": offset,
        }

    return _Rule("rms_norm", ours.CustomRMSNorm, attributes)


_TORCH: dict[type[nn.Module], _Rule] = {
    nn.ReLU: _Rule("relu", ours.CustomReLU),
    nn.GELU: _Rule("gelu", ours.CustomGELU),
    nn.SiLU: _Rule("silu", ours.CustomSiLU),
    nn.Sigmoid: _Rule("sigmoid", ours.CustomSigmoid),
    nn.Tanh: _Rule("tanh", ours.CustomTanh),
    nn.Softplus: _Rule("softplus", ours.CustomSoftplus, _softplus),
    nn.Softmax: _Rule("softmax", ours.CustomSoftmax, _softmax),
    nn.LayerNorm: _Rule("layer_norm", ours.CustomLayerNorm),
    nn.RMSNorm: _Rule("rms_norm", ours.CustomRMSNorm),
}
"""Rules by module type of torch. Subclasses stay, because they may compute something else."""

_TRANSFORMERS: dict[str, _Rule] = {
    "GELUActivation": _gelu("none"),
    "GELUTanh": _gelu("tanh"),
    "NewGELUActivation": _gelu("tanh"),
    "FastGELUActivation": _gelu("tanh"),
    "AccurateGELUActivation": _gelu("tanh"),
    "SiLUActivation": _Rule("silu", ours.CustomSiLU, lambda module: {"inplace": False}),
    **{
        f"{family}RMSNorm": _rms_norm("variance_epsilon", 0)
        for family in ("Llama", "Mistral", "Qwen2", "Qwen3")
    },
    **{f"{family}RMSNorm": _rms_norm("eps", 1) for family in ("Gemma", "Gemma2", "Gemma3")},
    **{
        f"{family}MLP": _Rule("swiglu", ours.CustomGatedMLP, _gated_mlp, drops=("act_fn",))
        for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3")
    },
}
"""Rules by class name of transformers, which is not imported here. A test compares them with Llama's own."""


def _transformers_name(module: nn.Module) -> str:
    """The name of a class of transformers; "" for other classes."""
    kind = type(module)
    return kind.__name__ if kind.__module__.split(".")[0] == "transformers" else ""


def replace_modules(
    model: nn.Module, report: Callable[[Replacement], None] = lambda replacement: None
) -> nn.Module:
    """Replaces modules of torch and transformers by twinop's, in place, and returns the model.

    A module stays the same object with the same parameters, buffers and hooks. Only its class changes.
    Replaced modules of torch are `nn.ReLU`, `GELU`, `SiLU`, `Sigmoid`, `Tanh`, `Softplus` (beta 1),
    `Softmax`, `LayerNorm` and `RMSNorm`. Replaced modules of transformers are the GELU and SiLU activations,
    the RMS norms of Llama, Mistral, Qwen and Gemma, and their gated MLPs, whose silu(gate) * up becomes one
    op. `inplace=True` is computed out of place. Functional calls (`F.relu`) are not modules and stay.

    Args:
        report: called with a `Replacement` for each module that is replaced, and for each module that stays
            although it is one of these or a subclass of one. `report=print` prints them.
    """
    for path, module in model.named_modules():  # a module before its submodules
        if replacement := _replace(path, module):
            report(replacement)
    return model


def _replace(path: str, module: nn.Module) -> Replacement | None:
    kind = type(module).__name__
    rule = _TORCH.get(type(module)) or _TRANSFORMERS.get(_transformers_name(module))
    if rule is None:
        base = next((base.__name__ for base in _TORCH if isinstance(module, base)), None)
        if base is None or type(module).__module__ == ours.__name__:
            return None
        return Replacement(path, kind, None, f"a subclass of {base} may compute something else")
    try:
        if "forward" in vars(module):
            raise _Stays(
                "it has a forward of its own, as hooks set one (accelerate's, for example), which would run "
                "instead of the op. Remove the hook first"
            )
        if rule.op not in functions:
            raise _Stays(f"the loaded libraries have no op {rule.op}")
        attributes = rule.attributes(module)
    except _Stays as reason:
        return Replacement(path, kind, None, str(reason))
    module.__class__ = rule.twin
    for name in rule.drops:
        delattr(module, name)
    for name, value in attributes.items():
        setattr(module, name, value)
    return Replacement(path, kind, rule.twin.__name__)
