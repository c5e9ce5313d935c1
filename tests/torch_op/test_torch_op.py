"""twinop.torch_op: autograd, transforms, compile, autocast, modules, streams and devices."""

from typing import Any

import pytest
import torch
from samples import DEVICES, RECORDS
from torch import func, nn

from twinop import torch_op
from twinop.errors import RecordError
from twinop.libraries.library import find_library

ops = torch.ops.custom_domain


def away_from_zero(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Returns random values so far from 0 that a finite difference does not cross ReLU's kink."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (x + 0.1 * x.sign()).to(device, dtype).requires_grad_()


@pytest.mark.parametrize("device", DEVICES)
def test_func_transforms(device: str) -> None:
    x = away_from_zero(3, 4, device=device).detach()
    assert torch.equal(func.grad(lambda x: torch_op.relu(x).pow(2).sum())(x), 2 * x.relu())
    expected = func.jacrev(torch.relu)(x)
    assert torch.equal(func.jacrev(torch_op.relu)(x), expected)
    per_sample = func.vmap(func.grad(lambda row: torch_op.relu(row).pow(3).sum()))(x)
    assert torch.allclose(per_sample, 3 * x.relu() ** 2)
    second = func.grad(lambda x: func.grad(lambda x: torch_op.relu(x).pow(3).sum())(x).sum())(x)
    assert torch.allclose(second, 6 * x.relu())


@pytest.mark.parametrize("device", DEVICES)
def test_vmap(device: str) -> None:
    x = torch.randn(2, 3, 5, device=device)
    for relu in (ops.relu, torch_op.relu):
        for dim in range(3):
            assert torch.equal(func.vmap(relu, in_dims=dim, out_dims=dim)(x), x.relu())
    with pytest.raises(RuntimeError, match="the inputs must have one shape"):
        func.vmap(torch_op.swiglu)(x, x[..., :1])
    empty = func.vmap(ops.double_and_sum)(x[:0])
    assert [tuple(t.shape) for t in empty] == [(0, 3, 5), (0, 3)]


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("rows", [(), (3,), (2, 3)])
def test_vmap_over_weights_is_one_product(rows: tuple[int, ...], layout: str) -> None:
    x, weight, bias = torch.randn(5, *rows, 8), torch.randn(5, 6, 8), torch.randn(5, 6)
    residual = torch.randn(*rows, 6)
    given = weight if layout == "nk" else weight.mT

    def mine(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch_op.linear(x, weight, bias, residual, activation="silu", layout=layout)

    def theirs(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(nn.functional.linear(x, weight, bias) + residual)

    torch.testing.assert_close(func.vmap(mine)(x, given, bias), func.vmap(theirs)(x, weight, bias))
    gated = func.vmap(lambda w: torch_op.linear_swiglu(x[0], w, layout=layout))(given)
    packed = func.vmap(lambda w: nn.functional.linear(x[0], w))(weight)
    torch.testing.assert_close(gated, nn.functional.silu(packed[..., :3]) * packed[..., 3:])


def test_vmap_of_other_libraries_is_one_call_too() -> None:
    """Of an elementwise op, with gradients through it; two vmaps as well."""
    cube = torch_op.load(find_library("test_cube")).cube
    x = torch.randn(7, 5, 4, requires_grad=True)
    for mapped in (func.vmap(cube), func.vmap(func.vmap(cube, 1, 1))):
        with torch.profiler.profile() as seen:
            y = mapped(x)
        assert len([event for event in seen.events() if event.name == "test_cube::cube"]) <= 4  # one a layer
        (grad,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close((y, grad), (x**3, 3 * x * x))
    assert func.vmap(cube)(x[:0]).shape == (0, 5, 4)


def test_vmap_of_other_libraries_rows_is_one_call() -> None:
    """Whichever dimension is mapped, also where the rows lie apart."""
    running_sum = torch_op.load(find_library("test_host")).running_sum
    x = torch.randn(12, 9, 14, requires_grad=True)
    for given, dim in ((x, 0), (x, 1), (x[..., :10], 0), (x[:, :1], 0)):
        with torch.profiler.profile() as seen:
            y = func.vmap(running_sum, dim, dim)(given)
        assert 0 < len([event for event in seen.events() if event.name == "test_host::running_sum"]) <= 4
        (grad,) = torch.autograd.grad(y.sum(), given)
        torch.testing.assert_close(y, given.cumsum(-1))
        expected = torch.arange(given.shape[-1], 0, -1.0).expand(given.shape)
        assert torch.equal(grad, expected)
    torch.testing.assert_close(func.vmap(running_sum, 2, 2)(x), x.cumsum(1))


B, S, C = 3, 2, 8
ONE_CALL_FOR_A_BATCH: dict[str, dict[str, Any]] = {  # by op: inputs of each example (a list), and for all
    "rope": {"q": [B, S, C], "k": [B, S, C], "cos": (1, S, 2), "sin": (1, S, 2), "head_size": 4},
    "rope, own angles": {"q": [B, S, C], "k": (B, S, C), "cos": [B, S, 2], "sin": [B, S, 2], "head_size": 4},
    "attention_packed": {"qkv": [B, S, 3 * C], "bias": (1, 2, S, S), "heads": 2},
    "attention_packed, a bias each": {"qkv": (B, S, 3 * C), "bias": [1, 1, S, S], "heads": 2, "causal": True},
    "attention_cached_functional": {
        "qkv": [B, 1, 3 * C], "k_cache": [B, 2, 5, 4], "v_cache": (B, 2, 5, 4),
        "position": torch.full((B,), 3).int(),
    },
    "embed_layer_norm": {
        "table": (9, C), "ids": torch.arange(4 * B * S) % 9, "rows": (1, S, C), "weight": (C,),
    },
    "ada_layer_norm": {"x": [B, S, C], "scale": [B, C], "shift": (B, C)},
}  # fmt: skip


@pytest.mark.parametrize("case", ONE_CALL_FOR_A_BATCH)
@pytest.mark.parametrize("dim", [0, -1])
def test_vmap_of_batches_is_one_call(case: str, dim: int) -> None:
    call, name = ONE_CALL_FOR_A_BATCH[case], case.split(",")[0]
    sizes = {key: value for key, value in call.items() if isinstance(value, (list, tuple))}
    given = call | {key: torch.randn(*value) for key, value in sizes.items()}
    mapped = [key for key, value in call.items() if isinstance(value, list)]
    given |= {key: torch.randn(*call[key], 4).movedim(-1, dim) for key in mapped}
    if "ids" in call:
        mapped, given["ids"] = ["ids"], call["ids"].view(B, S, 4).movedim(-1, dim)

    def function(*values: torch.Tensor) -> Any:
        return getattr(torch_op, name)(**given | dict(zip(mapped, values, strict=True)))

    values = [given[key] for key in mapped]
    with torch.profiler.profile() as seen:
        found = func.vmap(function, dim)(*values)
    assert len([event for event in seen.events() if event.name == f"custom_domain::{name}"]) <= 3
    each = [function(*(value.select(dim, i) for value in values)) for i in range(4)]
    expected = list(zip(*each, strict=True)) if isinstance(found, tuple) else [each]
    for one, ones in zip(found if isinstance(found, tuple) else (found,), expected, strict=True):
        torch.testing.assert_close(one, torch.stack(list(ones)), rtol=0, atol=0)
    none = func.vmap(function, dim)(*(value.narrow(dim, 0, 0) for value in values))
    assert (none[0] if isinstance(none, tuple) else none).shape == (0, *expected[0][0].shape)


def test_vmap_where_only_the_gradient_is_batched() -> None:
    x = away_from_zero(5).detach()
    y, pullback = func.vjp(torch_op.relu, x)[:2]
    grads = torch.randn(7, 5, dtype=torch.float64)
    assert torch.equal(func.vmap(pullback)(grads)[0], grads * (y > 0))


def test_func_grad_of_the_dispatcher_op_names_the_function() -> None:
    with pytest.raises(RecordError, match=r"torch.ops.custom_domain.relu: call twinop.torch_op.relu"):
        func.grad(lambda x: ops.relu(x).sum())(torch.randn(3))
    x = torch.randn(2, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(func.vmap(ops.relu)(x).sum(), x)  # vmap alone needs no such detour
    assert torch.equal(grad, (x > 0).float())


INDUCTOR_ON_CPU = pytest.mark.skipif(
    " " in torch.__file__, reason="torch.compile's C++ build breaks where torch's own path has a space"
)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_compile_of_transforms() -> None:
    """They break the graph at ops. vmap alone does not."""
    x = away_from_zero(3, 4).detach()
    gradient = func.grad(lambda x: torch_op.relu(x).pow(2).sum())
    torch.testing.assert_close(torch.compile(gradient, backend="aot_eager")(x), 2 * x.relu())
    mapped = torch.compile(func.vmap(torch_op.relu), backend="aot_eager", fullgraph=True)
    assert torch.equal(mapped(x), x.relu())


# Inductor takes half a minute on a CPU. `twinop test` compiles every op, without inductor.
@INDUCTOR_ON_CPU
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), DEVICES[1]])
def test_compile_without_graph_break(device: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return (torch_op.relu(x) * 2 + ops.relu(-x) + torch_op.CustomReLU()(x)).sum()

    compiled = torch.compile(model, fullgraph=True)
    for shape in ((7, 3), (9, 3)):
        x = torch.randn(shape, device=device, requires_grad=True)
        torch.testing.assert_close(compiled(x), model(x))
        (grad,) = torch.autograd.grad(compiled(x), x)
        torch.testing.assert_close(grad, torch.autograd.grad(model(x), x)[0])


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_rules(device: str) -> None:
    with torch.autocast(device, dtype=torch.bfloat16):
        # keep: the op runs in the dtype it is given, as torch.relu does.
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            assert torch_op.relu(torch.randn(3, device=device, dtype=dtype)).dtype == dtype
        # widest: a combination that has a kernel stays, any other is promoted to the widest dtype.
        x = torch.randn(3, 4, device=device).bfloat16()
        wide, narrow = torch.randn(4, device=device), torch.randn(4, device=device).bfloat16()
        for a, b in ((x, wide), (wide, x)):  # as in torch
            assert torch.equal(torch_op.add(a, b), a + b) and torch_op.add(a, b).dtype == torch.float32
        assert ops.pad_affine(x, wide, wide).dtype == torch.bfloat16
        assert ops.pad_affine(x, wide, narrow).dtype == torch.float32
        assert torch.equal(ops.pad_affine(x, wide, narrow), ops.pad_affine(x.float(), wide, narrow.float()))
    with pytest.raises(RuntimeError, match="no kernel takes these dtypes"):
        ops.pad_affine(x, wide, narrow)


def test_function_documents_itself() -> None:
    import inspect

    assert str(inspect.signature(torch_op.relu)) == "(x)"
    assert RECORDS["relu"].schema in (torch_op.relu.__doc__ or "")
    with pytest.raises(AttributeError, match="has no op 'gleu'; loaded ops: .*relu"):
        torch_op.gleu  # noqa: B018


@pytest.mark.cuda
def test_compile_with_cuda_graphs() -> None:
    compiled = torch.compile(lambda x: torch_op.relu(x) * 3, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        x = torch.randn(64, 3, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        assert torch.equal(compiled(x).clone(), x.relu() * 3)


@pytest.mark.cuda
def test_second_device(two_gpus: None) -> None:
    """An op runs on device 1 while device 0 is current."""
    x = torch.randn(100_003, device="cuda:1", requires_grad=True)
    assert torch.cuda.current_device() == 0
    y = torch_op.relu(x)
    y.sum().backward()
    assert y.device == x.device and torch.equal(y, x.relu())
    assert x.grad is not None and torch.equal(x.grad, (x > 0).float())
    assert torch.cuda.current_device() == 0
    with pytest.raises(RuntimeError, match="weight is on cuda:0, the first on cuda:1"):
        ops.pad_affine(x.view(1, -1), torch.randn(100_003, device="cuda:0"))
