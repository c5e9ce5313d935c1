"""Tests append_kv in torch and in ONNX Runtime, and the attention that generates with it."""

from copy import deepcopy
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from attention import Attention, Step, turned
from kv_cache import append_kv, library_path, samples

from twinop import deploy, export

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
on_each_device = pytest.mark.parametrize("device", ["cpu", CUDA])
STEPS, ROWS, WIDTH, HEADS = 100, 104, 16, 2


@on_each_device
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values(dtype: str, device: str) -> None:
    for call in samples("append_kv", dtype, 32):
        given = {name: tensor.to(device) for name, tensor in call.items()}
        k, v, k_cache, v_cache = (call[name] for name in ("k", "v", "k_cache", "v_cache"))
        rows = call["position"][:, None] + torch.arange(k.shape[1])
        angles = (call[name][rows] for name in ("cos", "sin"))
        batch = torch.arange(k.shape[0])[:, None]
        wanted_k = k_cache.index_put((batch, rows), turned(k.float(), *angles).to(k.dtype))
        addresses = [given[name].data_ptr() for name in ("k_cache", "v_cache")]
        assert append_kv(**given) is None
        assert addresses == [given[name].data_ptr() for name in ("k_cache", "v_cache")]
        torch.testing.assert_close(given["k_cache"].cpu(), wanted_k)
        assert torch.equal(given["v_cache"].cpu(), v_cache.index_put((batch, rows), v))


def test_a_row_outside_the_cache() -> None:
    """It is not written; the others are."""
    call = samples("append_kv", "float32", 16)[1]
    before = {name: call[name].clone() for name in ("k_cache", "v_cache")}
    for wrong in (8, -1, 2**40, -(2**63)):
        given = call | {name: each.clone() for name, each in before.items()}
        append_kv(**given | {"position": torch.tensor([0, wrong])})
        for name, each in before.items():
            assert torch.equal(given[name][1], each[1]) and not torch.equal(given[name][0], each[0])


@pytest.fixture(scope="module")
def trained() -> Attention:
    """Trains an attention to repeat the token before the last, without a cache."""
    torch.manual_seed(0)
    attention = Attention(WIDTH, HEADS, ROWS)
    optimizer = torch.optim.Adam(attention.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        x = draw(4, 12)
        loss = (attention(x)[:, 1:] - x[:, :-1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    return attention.eval()


def draw(batch: int, tokens: int) -> torch.Tensor:
    return torch.randn(batch, tokens, WIDTH)


def empty_caches() -> list[torch.Tensor]:
    return [torch.zeros(2, ROWS, HEADS, WIDTH // HEADS) for _ in "kv"]


def example_of_a_step() -> tuple[torch.Tensor, ...]:
    return draw(2, 1), *map(torch.randn_like, empty_caches()), torch.tensor([3, 5])


def test_steps_are_the_forward_pass(trained: Attention) -> None:
    x, caches = draw(2, 10), empty_caches()
    with torch.no_grad():
        first = trained.step(x[:, :4], *caches, torch.zeros(2, dtype=torch.long))
        others = [trained.step(x[:, i : i + 1], *caches, torch.full((2,), i)) for i in range(4, 10)]
        torch.testing.assert_close(torch.cat([first, *others], 1), trained(x))


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@on_each_device
def test_100_steps_in_onnx_runtime(exporter: str, device: str, trained: Attention, tmp_path: Path) -> None:
    """With one memory for a cache and its output, without, and in torch: the same bits in all results."""
    if device == "cuda" and "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this ONNX Runtime has no CUDA")
    path, x, caches = tmp_path / "step.onnx", draw(2, STEPS), empty_caches()
    example = example_of_a_step()
    report = export.export(
        Step(trained), example, path, exporter=exporter, library=library_path(), optimize=False
    )
    assert report.nodes["kv_cache.CustomAppendKv"] == 1 and report.parity.error < 1e-5
    assert report.without_library.error < 1e-5

    options = ort.SessionOptions()
    options.register_custom_ops_library(library_path())
    on_cuda = [("CUDAExecutionProvider", {"use_tf32": "0"})]
    providers = on_cuda if device == "cuda" else ["CPUExecutionProvider"]
    session = ort.InferenceSession(path, options, providers=providers)
    x_name, k_name, v_name, position_name = (each.name for each in session.get_inputs())
    y_name, k_out, v_out = (each.name for each in session.get_outputs())

    def value(array: np.ndarray) -> ort.OrtValue:
        return ort.OrtValue.ortvalue_from_numpy(array, device, 0)

    shared = [value(each.numpy()) for each in caches]
    other = [each.numpy() for each in caches]
    attention, caches = deepcopy(trained).to(device), [each.to(device) for each in caches]
    for i in range(STEPS):
        token, position = x[:, i : i + 1].contiguous(), torch.full((2,), i)
        with torch.no_grad():
            y = attention.step(token.to(device), *caches, position.to(device)).cpu()
        binding = session.io_binding()
        for name, tensor in ((x_name, token), (position_name, position)):
            binding.bind_cpu_input(name, tensor.numpy())
        for name, out, cache in ((k_name, k_out, shared[0]), (v_name, v_out, shared[1])):
            binding.bind_ortvalue_input(name, cache)
            binding.bind_ortvalue_output(out, cache)
        binding.bind_output(y_name, device)
        session.run_with_iobinding(binding)
        in_shared = binding.copy_outputs_to_cpu()[-1]
        feeds = {x_name: token.numpy(), k_name: other[0], v_name: other[1], position_name: position.numpy()}
        found, *other = session.run([y_name, k_out, v_out], feeds)
        np.testing.assert_array_equal(in_shared, found)
        np.testing.assert_array_equal(found, y.numpy())
    for cache, with_one_memory, without in zip(caches, shared, other, strict=True):
        np.testing.assert_array_equal(with_one_memory.numpy(), without)
        np.testing.assert_array_equal(without, cache.cpu().numpy())
    assert all(each[:, :STEPS].any(-1).all() and not each[:, STEPS:].any() for each in other)


def test_a_session_writes_into_the_cache(trained: Attention, tmp_path: Path) -> None:
    path = tmp_path / "step.onnx"
    export.export(Step(trained), example_of_a_step(), path, library=library_path(), optimize=False)
    session = deploy.session(path, ["CPUExecutionProvider"], library_path())
    x, k_cache, v_cache, position = example_of_a_step()
    expected = k_cache.clone(), v_cache.clone()
    feeds = dict(zip(session.inputs, (x, k_cache, v_cache, position), strict=True))
    outputs = dict(zip(session.outputs, (torch.empty_like(x), k_cache, v_cache), strict=True))
    found = session.run(feeds, outputs)
    assert all(found[name] is outputs[name] for name in outputs)
    with torch.no_grad():
        trained.step(x, *expected, position)
    assert torch.equal(k_cache, expected[0]) and torch.equal(v_cache, expected[1])
