"""Derivatives of every op match the fp64 reference and are reproducible, also compiled and batched."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError
from torch.library import opcheck

from twinop.errors import RecordError
from twinop.model.bodies import find_body
from twinop.record.dtypes import FLOATS_8
from twinop.record.op_spec import DOMAIN, OpSpec
from twinop.torch_op.rules import PRODUCTS

from ..messages import fail, first_difference, require_same_bits, runs_body
from ..samples import (
    Sample,
    attribute_variants,
    call,
    called,
    fits,
    given_samples,
    has_derivative,
    is_given,
    make_sample,
    presence_patterns,
    takes_given,
    torch_dtype,
)
from ..ulps import compute
from ..under_test import advice, op_of, records_under_test, reference_of

_WHOLE = 256  # elements: gradgradcheck of attention with 4,616 takes 20 s


def differentiable(record: OpSpec, dtypes: Mapping[str, str] | None = None) -> None:
    """Skips an op without a derivative, and dtypes in which no input has one."""
    if not has_derivative(record):
        pytest.skip(f"{record.qualified_name} has no derivative (`gradient` of its record)")
    if dtypes is not None and not differentiated(record, dtypes):
        pytest.skip("integers have no derivative")


def differentiated(record: OpSpec, dtypes: Mapping[str, str]) -> set[str]:
    """Returns the inputs and outputs of a derivative: an op needs some of both."""
    named = {name for gradient in record.gradients for name in gradient.names}
    is_float = {name for name, dtype in dtypes.items() if torch_dtype(dtype).is_floating_point}
    inputs = {entry.name for entry in record.inputs} & is_float & (named or is_float)
    return inputs if is_float & {*record.outputs} else set()


def smooth(record: OpSpec, sample: Sample) -> Sample:
    """Moves the sample to where the op is differentiable."""
    move = reference_of(record).smooth
    return sample.map(lambda t: move(t) if t.is_floating_point() else t)


def leaves(record: OpSpec, sample: Sample) -> Sample:
    """Copies the tensors; those that the record differentiates by want gradients."""
    sample = sample.map(lambda t: t.detach().clone())
    named = {name for gradient in record.gradients for name in gradient.names}
    for name, tensor in sample.tensors().items():
        tensor.requires_grad_(tensor.is_floating_point() and (not named or name in named))
    return sample


def wanted(sample: Sample) -> dict[str, torch.Tensor]:
    """The inputs that have gradients."""
    return {name: t for name, t in sample.tensors().items() if t.requires_grad}


def small(record: OpSpec, dtypes: dict[str, str], device: str = "cpu") -> Iterator[Sample]:
    """Yields every presence pattern and every attribute, in two and three dimensions."""
    if takes_given(record) or not fits(record, (3, 4)):
        yield from (each.to(device, record.host_inputs) for each in given_samples(record, dtypes, 4))
        return
    patterns = presence_patterns(record, dtypes)
    for seed, present in enumerate(patterns):
        yield make_sample(record, dtypes, (3, 4), seed, present=present, tame=True).to(device)
    for seed, attributes in enumerate(attribute_variants(record, 3)[1:]):
        present = patterns[seed % len(patterns)]
        yield make_sample(record, dtypes, (4, 4, 4), seed, attributes, present, tame=True).to(device)


def is_smooth(record: OpSpec, sample: Sample) -> bool:
    """Whether the op's meaning has a derivative at a call that the op's module gives: no tie of a maximum.

    Differences to both sides are compared, in float64. Derived calls are where `smooth` has moved them.
    """
    if record.domain == DOMAIN or not is_given(record) or find_body(record.key) is None:
        return True
    generator = torch.Generator().manual_seed(1)
    moving = wanted(leaves(record, sample))
    steps = {name: 1e-2 * torch.randn(t.shape, generator=generator).double() for name, t in moving.items()}

    def results(sign: int) -> torch.Tensor:
        moved = sample.map(lambda t: t.double() if t.is_floating_point() else t).inputs
        moved |= {name: moved[name] + sign * step for name, step in steps.items()}
        found = compute(record, list(moved.values()), sample.attributes, torch.float64)
        return torch.cat([y.double().flatten() for y in found if y.is_floating_point()])

    before, here, after = map(results, (-1, 0, 1))
    if not before.shape == here.shape == after.shape:
        return False
    return bool((after - 2 * here + before).norm() <= 0.25 * (after - before).norm())


def gradients(
    sample: Sample, results: tuple[torch.Tensor, ...], like: tuple[torch.Tensor, ...] = ()
) -> list[torch.Tensor]:
    """Returns the inputs' gradients for random ones of the outputs, rounded to the types of `like`."""
    generator = torch.Generator().manual_seed(12345)
    pairs = [(y, own) for y, own in zip(results, like or results, strict=True) if own.requires_grad]
    weights = [torch.randn(own.shape, generator=generator).to(own.dtype).to(y) for y, own in pairs]
    return list(torch.autograd.grad([y for y, _ in pairs], list(wanted(sample).values()), weights))


def test_gradients_against_fp64(record: OpSpec, dtypes: dict[str, str], device: str) -> None:
    """Gradients are within the tolerance, in units of the largest gradient of each input."""
    differentiable(record, dtypes)
    reference = reference_of(record)
    if find_body(record.key) is None and reference.compute is None:
        pytest.skip(f"{record.qualified_name} has no function body: nothing says what it should compute")
    allowed = reference.gradient_ulps
    many = [make_sample(record, dtypes, shape, 7, tame=True) for shape in ((130, 18), (5, 1026))]
    for sample in [*small(record, dtypes), *many]:
        sample = smooth(record, sample)
        if not is_smooth(record, sample):
            continue
        here = leaves(record, sample.to(device, record.host_inputs))
        wide = leaves(record, sample.map(lambda t: t.double() if t.is_floating_point() else t))
        stored = torch_dtype(dtypes[record.inputs[0].name])
        truth = compute(record, list(wide.inputs.values()), sample.attributes, stored)
        results = call(record, here)
        found, exact = gradients(here, results), gradients(wide, truth, results)
        for (name, tensor), a, b in zip(wanted(here).items(), found, exact, strict=True):
            assert a.dtype == tensor.dtype and a.shape == b.shape
            unit = torch.finfo(a.dtype).eps * float(b.abs().max()) if b.numel() else 1.0
            errors = (a.cpu().double() - b).abs() / max(unit, torch.finfo(a.dtype).tiny)
            wrong = ~(errors <= allowed)  # NaN is wrong
            if wrong.any():
                fail(
                    f"{called(record, here)}: the gradient of {name} differs from that of the function body "
                    f"by {float(errors.max()):.4g} ulp of the largest, allowed {allowed}\n"
                    + first_difference(
                        f"gradient of {name}",
                        wrong,
                        a.cpu(),
                        b,
                        sample,
                        ("op's gradient", "body's, in float64"),
                    )
                    + f"\n{advice(record, 'gradient_ulps, or smooth where a derivative has kinks')}"
                )


@pytest.mark.filterwarnings("ignore:.*double precision")  # of ops that have no fp64
def test_gradcheck(record: OpSpec, device: str) -> None:
    """First and second derivatives are those of finite differences."""
    differentiable(record)
    found = [(c, {c[entry.name] for entry in record.inputs}) for c in record.combinations]
    doubles = [c for c, kinds in found if kinds == {"float64"}]
    singles = [c for c, kinds in found if "float32" in kinds and not kinds & {"float16", "bfloat16"}]
    if not doubles and not singles:
        pytest.skip("neither in float64 nor in float32")
    dtypes = (doubles or singles)[0]
    has_whole = False
    for sample in small(record, dtypes):
        sample = smooth(record, sample)
        if not is_smooth(record, sample):
            continue
        sample = leaves(record, sample.to(device, record.host_inputs))

        def function(*tensors: torch.Tensor, sample: Sample = sample) -> Any:
            inputs = sample.inputs | dict(zip(wanted(sample), tensors, strict=True))
            return call(record, Sample(inputs, sample.attributes))

        tensors = tuple(wanted(sample).values())
        # Every derivative by every element with the first small sample; the others along random directions.
        is_whole = not has_whole and 0 < sum(tensor.numel() for tensor in tensors) <= _WHOLE
        has_whole |= is_whole
        options: dict[str, Any] = {"atol": 1e-7, "rtol": 1e-5, "fast_mode": not is_whole}
        if not doubles:
            options = {"eps": 1e-2, "atol": 1e-2, "rtol": 1e-2}
        checked(record, sample, "gradient", lambda: gradcheck(function, tensors, **options))  # noqa: B023
        if has_second_derivative(record):
            said = "second derivative"
            checked(record, sample, said, lambda: gradgradcheck(function, tensors, **options))  # noqa: B023
        else:
            with pytest.raises(RecordError, match="it can be differentiated once, not twice"):
                gradgradcheck(function, tensors)


def checked(record: OpSpec, sample: Sample, said: str, check: Callable[[], bool]) -> None:
    try:
        check()
    except GradcheckError as error:
        fail(
            f"{called(record, sample)}: the {said} is not that of finite differences of the op itself. "
            f"Correct the `gradient` of its record, or the backward op that it names.\n{error}\n"
            + advice(record, "smooth, where a derivative has kinks")
        )


def has_second_derivative(record: OpSpec) -> bool:
    """Returns whether the backward ops in the op's formulas have formulas."""
    by_name = {each.name: each for each in records_under_test().values() if each.domain == record.domain}
    named = [n for each in record.gradients for n in re.findall(r"\w+_backward", each.text)]
    return all(has_derivative(by_name[name]) for name in named if name in by_name)


def body_tolerance(record: OpSpec, result: torch.Tensor) -> float:
    """0 for kernels; where torch's operators run instead, their results depend on threads and addresses."""
    in_torch = any(not re.match(r"\w+_backward\(", gradient.text) for gradient in record.gradients)
    return 16 * torch.finfo(result.dtype).eps if in_torch or runs_body(record, result) else 0.0


def test_gradients_are_the_same_on_every_run(record: OpSpec, device: str) -> None:
    """Gradients have the same bits for every number of threads and every address."""
    differentiable(record)
    able = [dtypes for dtypes in record.combinations if differentiated(record, dtypes)]
    for dtypes in (*able[:1], *able[-1:]):
        for shape in ((1000, 34), (3, 4098 if record.rows or record.is_elementwise else 514)):
            sample = make_sample(record, dtypes, shape, 11, tame=True).to(device, record.host_inputs)
            sample = leaves(record, smooth(record, sample))
            first = gradients(sample, call(record, sample))
            for threads in (1, 3):
                before = torch.get_num_threads()
                torch.set_num_threads(threads)
                again = gradients(sample, call(record, sample))
                torch.set_num_threads(before)
                for a, b in zip(again, first, strict=True):
                    bound = body_tolerance(record, b)
                    said = f"{called(record, sample)}, {threads} threads"
                    torch.testing.assert_close(a, b, rtol=bound, atol=bound * float(b.abs().max()), msg=said)


def test_vmap(record: OpSpec, device: str) -> None:
    """A batched call gives the results of separate calls, for any batch dimension.

    They have the same bits, but for products whose weights differ too: cuBLAS adds in another order there.
    """
    if record.sizes:
        pytest.skip("the sizes of its outputs come from the data")
    dtypes = record.combinations[0]
    for present in presence_patterns(record, dtypes):
        many = (make_sample(record, dtypes, (3, 4), seed, present=present, tame=True) for seed in (1, 2))
        one = [smooth(record, each).to(device, record.host_inputs) for each in many]
        given = list(one[0].tensors())
        expected = [call(record, sample) for sample in one]
        for dim in (0, -1):

            def function(*tensors: torch.Tensor, given: Any = given, one: Any = one) -> Any:
                inputs: Any = dict.fromkeys(one[0].inputs) | dict(zip(given, tensors, strict=True))
                return call(record, Sample(inputs, one[0].attributes))

            batch = [torch.stack([sample.inputs[name] for sample in one], dim) for name in given]
            found = torch.vmap(function, in_dims=dim)(*batch)
            for i, each in enumerate(expected):
                same = tuple(result[i] for result in found)
                if record.key in PRODUCTS and device == "cuda":
                    torch.testing.assert_close(same, tuple(each), rtol=1e-5, atol=1e-5)
                    continue
                names = ("in a batch", "alone")
                require_same_bits(record, one[i], same, each, "torch.vmap changes the result", names)


# ---------------------------------------------------------------------------- torch's own checks


def test_compile_without_graph_break(record: OpSpec, device: str) -> None:
    """Forward and backward compile with fixed and dynamic sizes."""
    dtypes = record.combinations[0]
    torch.compiler.reset()

    def function(*given: Any, **attributes: Any) -> Any:
        results = op_of(record).function(*given, **attributes)
        return sum(y.double().sin().sum() for y in (results if isinstance(results, tuple) else (results,)))

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for width in (6, 8):  # the second one makes it dynamic
        sample = make_sample(record, dtypes, (5, width), width, tame=True).to(device, record.host_inputs)
        sample = leaves(record, smooth(record, sample)) if has_derivative(record) else sample
        given, attributes = list(sample.inputs.values()), sample.attributes
        found, expected = compiled(*given, **attributes), function(*given, **attributes)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        if leaf := list(wanted(sample).values()):
            for a, b in zip(
                torch.autograd.grad(found, leaf), torch.autograd.grad(expected, leaf), strict=True
            ):
                torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.backward_too
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_opcheck(record: OpSpec, device: str) -> None:
    """Every op, including backward ops, passes torch's opcheck."""
    op = getattr(getattr(torch.ops, record.namespace), record.functional_name).default

    def prepared(tensor: torch.Tensor, strided: bool) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.itemsize > 1 and not is_given(record):
            tensor = tensor.abs() + 0.5  # positive: log and pow have derivatives everywhere
        if strided:
            tensor = torch.stack([tensor, tensor]).movedim(0, -1)[..., 0]
        return tensor.requires_grad_(has_derivative(record) and tensor.is_floating_point())

    checks = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    for dtypes, strided in ((record.combinations[0], False), (record.combinations[-1], True)):
        sample = make_sample(record, dtypes, (4, 6), tame=True).to(device, record.host_inputs)
        tensors = sample.map(lambda tensor: prepared(tensor, strided)).inputs.values()  # noqa: B023
        # torch's test of the schema cannot compare inputs of 8-bit floats
        first = int(any(dtypes[entry.name] in FLOATS_8 for entry in record.inputs))
        chosen = checks[first : 2 if strided else None]
        opcheck(op, tuple(tensors), sample.attributes, test_utils=chosen)
