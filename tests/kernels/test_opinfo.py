"""Our ops give the same results, gradients and refusals as torch's functions on torch's sample inputs.

The samples and the error inputs come from torch.testing's OpInfo.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("expecttest", reason="torch.testing._internal needs it")

from samples import DEVICES, RECORDS, torch_dtype

from twinop import torch_op

OPS = {
    "add": "add",
    "exp": "exp",
    "log": "log",
    "mul": "mul",
    "nn.functional.gelu": "gelu",
    "nn.functional.layer_norm": "layer_norm",
    "nn.functional.relu": "relu",
    "nn.functional.rms_norm": "rms_norm",
    "nn.functional.silu": "silu",
    "nn.functional.softplus": "softplus",
    "pow": "pow",
    "sigmoid": "sigmoid",
    "softmax": "softmax",
    "square": "square",
    "tanh": "tanh",
}


@cache
def infos() -> dict[str, Any]:
    """torch's samples of these ops. Their import takes seconds, so it waits until a test runs."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {key(info): info for info in op_db if OPS.get(info.name) in RECORDS}


ALPHA = "alpha: ours adds a and b as they are"
DTYPE = "dtype: ours computes in the input's"
COMPLEX = "complex numbers: ours are for real ones"
BETA = "beta or threshold: ours has neither"
NEGATIVE = "eps below 0: ours refuses it"
SHAPE_OF_NO_AXIS = "normalized_shape is not the input's last dimensions: ours takes an axis instead"


def key(info: Any) -> str:
    return f"{info.name} {info.variant_test_name}".strip()


def reason(info: Any, sample: Any) -> str:
    """Returns why our op cannot take this sample, or ""."""
    if info.variant_test_name == "complex":
        return COMPLEX
    if "dtype" in sample.kwargs:
        return DTYPE
    if sample.kwargs.get("alpha", 1) != 1:
        return ALPHA
    if info.name == "nn.functional.softplus" and sample.kwargs:
        return BETA
    if info.name.endswith("_norm"):
        dims = tuple(sample.args[0])
        if not dims or dims != tuple(sample.input.shape[-len(dims) :]):
            return SHAPE_OF_NO_AXIS
        if sample.kwargs.get("eps", 0) < 0:
            return NEGATIVE
    return ""


def ours(info: Any, sample: Any) -> Any:
    """Calls our function with the sample."""
    op = getattr(torch_op, OPS[info.name])
    args, kwargs = list(sample.args), dict(sample.kwargs)
    if info.name.endswith("_norm"):
        kwargs["axis"] = -len(args.pop(0))
        names = ["weight", "bias", "eps"] if info.name == "nn.functional.layer_norm" else ["weight", "eps"]
        kwargs |= dict(zip(names, args, strict=False))
        args = []
        if info.name == "nn.functional.rms_norm" and kwargs.get("eps") is None:
            kwargs["eps"] = torch.finfo(sample.input.dtype).eps  # torch's default
    kwargs.pop("alpha", None)
    return op(sample.input, *args, **kwargs)


def applicable(info: Any, device: str, dtype: torch.dtype, **options: Any) -> Iterator[Any]:
    for sample in info.sample_inputs(device, dtype, **options):
        if not reason(info, sample):
            yield sample
            yield sample.noncontiguous()


def cells() -> list[Any]:
    return [
        pytest.param(name, dtype, id=f"{name}-{dtype}")
        for name, op in OPS.items()
        if op in RECORDS
        for dtype in dict.fromkeys(c[RECORDS[op].inputs[0].name] for c in RECORDS[op].combinations)
    ]


def described(sample: Any) -> Callable[[str], str]:
    return lambda message: f"{sample}\n{message}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "dtype"), cells())
def test_samples(name: str, dtype: str, device: str) -> None:
    info = infos()[name]
    for sample in applicable(info, device, torch_dtype(dtype)):
        found, expected = ours(info, sample), info.op(sample.input, *sample.args, **sample.kwargs)
        torch.testing.assert_close(found, expected, equal_nan=True, msg=described(sample))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [p.values[0] for p in cells() if p.values[1] == "float32"])
def test_gradients_of_samples(name: str, device: str) -> None:
    info = infos()[name]
    for sample in applicable(info, device, torch.float64, requires_grad=True):
        leaves = [t for t in (sample.input, *sample.args) if isinstance(t, torch.Tensor) and t.requires_grad]
        for weight in ("ones", "random"):

            def gradients(y: torch.Tensor, weight: str = weight, leaves: Any = leaves) -> Any:
                generator = torch.Generator().manual_seed(0)
                grad = (
                    torch.randn(y.shape, generator=generator).to(y)
                    if weight == "random"
                    else torch.ones_like(y)
                )
                return torch.autograd.grad(y, leaves, grad, allow_unused=True)

            found = gradients(ours(info, sample))
            expected = gradients(info.op(sample.input, *sample.args, **sample.kwargs))
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, equal_nan=True, msg=described(sample))


def error_samples(info: Any) -> list[Any]:
    return [] if info.error_inputs_func is None else list(info.error_inputs("cpu"))


def test_error_inputs() -> None:
    """Our ops refuse what torch refuses. The message names the op."""
    refused = 0
    for info in infos().values():
        for error in error_samples(info) if key(info) in OPS else []:
            sample = error.sample_input
            if reason(info, sample):
                continue
            with pytest.raises(Exception, match=OPS[info.name]):
                ours(info, sample)
            refused += 1
    assert refused >= 3
