"""Plans do what the launchers do that they were traced from."""

import functools
import importlib
import math
import re
from typing import Any

import launchers
import pytest
import torch
from launchers import chosen, direct, evaluated, pointers, record, sized

from twinop.aot_kernels.plan import Fill, Pointer, Refuse
from twinop.errors import BuildError
from twinop.triton.trace import TracedOp, trace

SIZES = [1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 255, 256, 257, 1000, 1023, 1024, 1025, 2048, 2049, 4096, 4097]
HUGE = [8191, 8193, 32769, 65535, 65536]


@functools.cache
def traced(name: str) -> TracedOp:
    eps, scale = {"eps": ("float", "1e-5")}, {"scale": ("float", "0.125"), "causal": ("bool", "False")}
    activation = {"activation": ("str", '"none"')}
    records = {
        "gelu": (record("gelu", "x"), []),
        "softmax": (record("softmax", "x"), sized(x=(3, None))),
        "layer_norm": (
            record("layer_norm", "x", "weight", attributes=eps, outputs=("y", "mean")),
            sized(x=(2, 3, None), weight=(None,)),
        ),
        "column_sum": (record("column_sum", "x"), [*sized(x=(3, None)), *sized(x=(300, None))]),
        "matmul": (
            record("matmul", "a", "b", attributes=activation, choices="activation = none | relu"),
            sized(a=(3, None), b=(None, 24)),
        ),
        "attention": (
            record("attention", "q", "k", "v", attributes=scale),
            [dict.fromkeys("qkv", torch.empty(1, 2, 9, head)) for head in (32, 64)],
        ),
    }
    entry, samples = records[name]
    return trace(entry, getattr(launchers, name), samples)


def same(name: str, shapes: list[tuple[int, ...]], **attributes: Any) -> None:
    plan = chosen(traced(name), shapes, *attributes.values())
    assert evaluated(plan, shapes, *attributes.values()) == direct(
        getattr(launchers, name), shapes, **attributes
    )


@pytest.mark.parametrize("rank", range(1, 7))
def test_an_elementwise_launcher_has_a_plan_for_each_rank(rank: int) -> None:
    for size in (*SIZES, *HUGE):
        same("gelu", [(size, 3, 2, 5, 1, 7)[:rank]])
    assert traced("gelu").record.texts["shapes"] == ""


def test_a_block_that_is_a_power_of_two_has_a_plan_for_each() -> None:
    for size in (*SIZES, *HUGE):
        same("softmax", [(5, size)])
    plan = chosen(traced("softmax"), [(5, 2**16 + 1)])
    assert isinstance(plan.steps[0], Refuse)
    assert "launchers.py" in plan.steps[0].message
    assert "65536 elements" in plan.steps[0].message
    assert {plan.ranks for plan in traced("softmax").plans} == {(2,)}


def test_a_bounded_power_of_two_has_one_plan_beyond_its_bound() -> None:
    for size in (1, 16, 17, 256, 257, 512, 513, 8193, 2**31 + 5):
        same("layer_norm", [(2, 3, size), (size,)], eps=0.25)
        same("layer_norm", [(7, size), (size,)], eps=1.0)
    plans = [plan for plan in traced("layer_norm").plans if plan.ranks == (2, 1)]
    assert len(plans) == 10  # 1, 2, ... 512


def test_shapes_and_dtypes_of_outputs_follow_from_the_traces() -> None:
    def launcher(x):
        return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)

    op = trace(record("f", "x", outputs=("y", "mean"), dtypes="float32; float16"), launcher)
    assert op.record.texts["shapes"] == "mean = x[:-1]"
    assert op.record.dtypes == "float32; float16 mean=float32"
    assert traced("layer_norm").record.texts["shapes"] == "mean = x[:-1]"
    assert traced("matmul").record.texts["shapes"] == "y = [a[0], b[1]]"
    assert traced("column_sum").record.texts["shapes"] == "y = x[1:]"
    assert traced("attention").record.texts["shapes"] == ""


def test_shapes_that_depend_on_a_text_and_a_bool() -> None:
    def launcher(x, *, mode, twice):
        return x.new_empty(x.shape[0] if mode == "all" else 1, 1 + twice)

    attributes = {"mode": ("str", '"all"'), "twice": ("bool", "False")}
    texts = {"choices": "mode = all | one", "shapes": 'y = [x[0] if mode == "all" else 1, 1 + twice]'}
    op = trace(record("f", "x", attributes=attributes, **texts), launcher)
    assert op.record.texts["shapes"] == texts["shapes"]
    with pytest.raises(BuildError, match=r"output y of f has another shape than '\[x\[0\], 1 \+ twice\]'"):
        trace(
            record("f", "x", attributes=attributes, **texts | {"shapes": "y = [x[0], 1 + twice]"}), launcher
        )


def test_temporary_tensors_are_sized_and_filled() -> None:
    for rows, n in [(1, 5), (255, 1024), (256, 1024), (63, 1025), (65, 5000)]:
        same("column_sum", [(rows, n)])
        group = 64 if n > 1024 else 256
        plan = chosen(traced("column_sum"), [(rows, n)])
        assert [size.evaluate([(rows, n)]) for size in plan.temporaries] == [8 * group, 4 * group * n]
        fills = [step for step in plan.steps if isinstance(step, Fill)]
        assert [(pointers(step), step.bytes.evaluate([(rows, n)]), step.value) for step in fills] == [
            ([("temporary", 0)], 8 * group, 0),
            ([("temporary", 1)], 4 * group * n, 0),
        ]
        first, second = plan.steps[2:]
        assert pointers(first) == [("input", 0), ("temporary", 0), ("temporary", 1)]
        assert pointers(second) == [("temporary", 1), ("output", 0)]
        assert second.arguments[0].offset.evaluate([(rows, n)]) == 4 * n  # partial[1:]
        assert [a.dtype for a in first.arguments if isinstance(a, Pointer)] == ["float32", "int32", "float32"]


def test_heuristics_texts_and_grids_of_configurations() -> None:
    for rows, inner, columns in [(1, 1, 1), (128, 32, 64), (129, 33, 65), (5, 4096, 1000)]:
        for activation in ("none", "relu"):
            same("matmul", [(rows, inner), (inner, columns)], activation=activation)
    plan = chosen(traced("matmul"), [(4, 5), (6, 7)], "relu")
    taken = "BLOCK_M=128, BLOCK_N=64, num_warps=8, num_ctas=1, num_stages=3"
    assert traced("matmul").notes == (f"matmul_kernel: of 3 configurations, untuned: {taken}",)
    assert isinstance(plan.steps[0], Refuse)
    assert "AssertionError: a.shape[1] columns and b.shape[0] rows" in plan.steps[0].message


def test_a_launcher_may_ask_for_the_compute_capability() -> None:
    def launcher(x):
        y = torch.empty_like(x)
        is_new = torch.cuda.get_device_capability(x.device) >= (9, 0)
        launchers.pointwise_kernel[(1,)](x, y, x.numel(), BLOCK=64 if is_new else 16)
        return y

    op = trace(record("f", "x"), launcher, archs=(80, 90, 999))
    for arch, block in [(80, 16), (89, 16), (90, 64), (103, 64), (120, 64)]:
        (step,) = chosen(op, [(5,)], arch=arch).steps
        assert step.constants["BLOCK"] == block


def test_float_attributes_bools_and_sizes_as_constants() -> None:
    for head in (32, 64):
        for causal in (False, True):
            same("attention", [(2, 3, 65, head)] * 3, scale=0.5, causal=causal)
    assert not traced("attention").notes
    plan = chosen(traced("attention"), [(2, 3, 65, 33)] * 3, 0.5, True)
    assert "the head size is q.shape[3]; expected 32 or 64" in plan.steps[0].message


def test_a_branch_that_no_sample_takes_is_noted() -> None:
    heads = [dict.fromkeys("qkv", torch.empty(1, 2, 9, 64))]
    op = trace(traced("attention").record, launchers.attention, heads)
    (note,) = op.notes
    assert re.fullmatch(r"launchers.py:\d+: Eq\(q.shape\[3\], 32\): refused where this holds, .*", note)
    shapes = [(2, 3, 65, 33)] * 3
    assert "expected 32 or 64" in chosen(op, shapes, 0.5, True).steps[0].message
    with pytest.raises(AssertionError):
        chosen(op, [(2, 3, 65, 32)] * 3, 0.5, True)


def test_functions_of_math_take_symbolic_numbers() -> None:
    def launcher(x, *, eps):
        y = torch.empty_like(x)
        n = math.ceil(x.shape[0] / 3) + math.floor(x.shape[0] * 0.5)
        factor = math.sqrt(eps) * math.exp(eps) + math.log(x.shape[0]) ** 2
        launchers.row_kernel[(n,)](x, y, n, -x.shape[0] % 7, factor, BLOCK=16)
        return y

    op = trace(record("f", "x", attributes={"eps": ("float", None)}), launcher)
    for size in (1, 2, 9, 100):
        plan = chosen(op, [(size,)], 0.25)
        (found,), (expected,) = evaluated(plan, [(size,)], 0.25), direct(launcher, [(size,)], eps=0.25)
        assert found[1] == expected[1]
        assert found[2] == pytest.approx(expected[2], rel=1e-15)


def test_an_optional_input_is_traced_with_and_without() -> None:
    def launcher(x, bias):
        y = torch.empty_like(x)
        launchers.pointwise_kernel[(1,)](x if bias is None else bias, y, x.numel(), BLOCK=16)
        return y

    op = trace(record("f", "x", "bias?", input_shapes="bias = x"), launcher)
    plans: list[Any] = [plan for plan in op.plans if plan.ranks[0] == 2]
    bases = {plan.ranks: pointers(plan.steps[0])[0] for plan in plans}
    assert bases == {(2, 2): ("input", 1), (2, None): ("input", 0)}


def test_views_have_offsets_and_strides() -> None:
    def launcher(x):
        y = x.new_empty((x.shape[1] // 2, x.shape[0]))
        half = x[:, x.shape[1] // 2 :].t()[None, ..., 0].squeeze(0)
        launchers.row_kernel[(1,)](half, y, half.stride(0), half.shape[0], 1, BLOCK=16)
        return y

    op = trace(record("f", "x"), launcher, [{"x": torch.empty(5, 8)}])
    (step,) = chosen(op, [(7, 10)]).steps
    assert step.arguments[0].offset.evaluate([(7, 10)]) == 4 * 5
    assert evaluated(chosen(op, [(7, 10)]), [(7, 10)])[0][2] == {"stride": 1, "n": 5, "eps": 1}
    assert op.record.texts["shapes"] == "y = [x[1] // 2, x[0]]"


def test_a_row_by_an_attribute() -> None:
    def launcher(x, *, row):
        launchers.row_kernel[(1,)](x[row], y := torch.empty_like(x), x[row].stride(0), 1, 1, BLOCK=16)
        return y

    samples = [{"x": torch.empty(5, 8), "row": row} for row in (3, -2)]
    op = trace(record("f", "x", attributes={"row": ("int", "0")}), launcher, samples)
    for row in (0, 4, -1, -6, -7, 6):
        (step,) = chosen(op, [(6, 10)], row).steps
        assert isinstance(step, Refuse) == (row in (6, -7))
        if not isinstance(step, Refuse):
            assert step.arguments[0].offset.evaluate([(6, 10)], [row]) == 40 * (row % 6)


@pytest.mark.parametrize(
    ("view", "rows"), [(lambda x: x.squeeze(0), (1, 2, 7)), (lambda x: x.expand(7, -1), (1, 7))]
)
def test_views_that_depend_on_a_size_of_1(view: Any, rows: tuple[int, ...]) -> None:
    def launcher(x):
        y, part = torch.empty_like(x), view(x)
        launchers.row_kernel[(part.shape[0],)](part, y, part.stride(0), part.dim(), 1, BLOCK=16)
        return y

    op = trace(record("f", "x"), launcher, [{"x": torch.empty(n, 8)} for n in (1, rows[-1])])
    for shape in ((n, 6) for n in rows):
        assert evaluated(chosen(op, [shape]), [shape]) == direct(launcher, [shape])


def test_kernels_of_liger_are_traced_as_they_are() -> None:
    module = importlib.import_module("liger_kernel.ops.rms_norm")
    settings = importlib.import_module("liger_kernel.ops.utils").calculate_settings

    def launcher(x, weight):
        y, rstd = torch.empty_like(x), torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        block, num_warps = settings(x.shape[1])
        module._rms_norm_forward_kernel[(x.shape[0],)](
            y, y.stride(0), x, x.stride(0), weight, weight.stride(0), rstd, rstd.stride(0), x.shape[1], 1e-6,
            0.0, casting_mode=0, elementwise_affine=True, BLOCK_SIZE=block, num_warps=num_warps,
        )  # fmt: skip
        return y

    op = trace(record("rms_norm", "x", "weight"), launcher, sized(x=(3, None), weight=(None,)))
    for size in (*SIZES, 65536):
        shapes = [(5, size), (size,)]
        assert evaluated(chosen(op, shapes), shapes) == direct(launcher, shapes)
    message = chosen(op, [(5, 65537), (65537,)]).steps[0].message
    assert "n = x.shape[1] exceeds the recommended Triton blocksize" in message
