"""Kernels in Helion: a launcher calls one, or the function that Helion wrote to a file."""

import importlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from launchers import chosen, direct, evaluated, record, sized
from record_driver import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode

import twinop
from twinop.aot_kernels.plan import Refuse
from twinop.building.builder import build
from twinop.building.project import Options, find_project
from twinop.errors import BuildError
from twinop.libraries.declare import load_module
from twinop.triton.trace import trace

pytest.importorskip("triton", reason="kernels in Python need it")
SHAPES = [(1, 1), (1, 5000), (7, 1), (300, 1024)]


@pytest.fixture(scope="module")
def kernels() -> Any:
    from torch._inductor.runtime import triton_compat

    if not hasattr(triton_compat, "IntelGPUError"):  # torch 2.11 lacks what Helion imports
        triton_compat.IntelGPUError = type("IntelGPUError", (Exception,), {})
    pytest.importorskip("helion", reason="its kernels need it", exc_type=ImportError)
    return importlib.import_module("helion_kernels")


@pytest.fixture(scope="module")
def softmax(kernels: Any) -> Any:
    """The example: its file, imported."""
    return load_module(ROOT / "examples/triton/helion_softmax.py")


def written(kernel: Any, args: Sequence[Any], folder: Path, name: str, alone: bool) -> Any:
    """Returns the module that Helion writes ahead of time; `alone`: it does not import Helion."""
    from helion.runtime.kernel import OutputCodeOptions

    options = OutputCodeOptions(allow_helion_deps=not alone)
    code = kernel.bind(tuple(args)).to_code(kernel.configs[0], options=options)
    assert ("import default_launcher" in code) != alone
    (folder / f"{name}.py").write_text(code)
    return load_module(folder / f"{name}.py")


@pytest.mark.parametrize("alone", [False, True])
def test_a_file_that_helion_wrote(alone: bool, softmax: Any, tmp_path: Path) -> None:
    """Its function is called by a launcher: traced, on the CPU (the body), and for fake tensors."""
    args = [torch.randn(3, 48), torch.randn(3, 48)]
    function = written(
        softmax.add_softmax_kernel, args, tmp_path, f"helion_file_{alone}", alone
    ).add_softmax_kernel

    def launcher(x: Any, residual: Any) -> Any:
        return function(x, residual)

    entry = record("f", "x", "residual", input_shapes="residual = x")
    plans = trace(entry, launcher, sized(x=(3, None), residual=(3, None))[:2])
    assert evaluated(chosen(plans, [(5, 1000)] * 2), [(5, 1000)] * 2) == direct(function, [(5, 1000)] * 2)
    declare = twinop.triton_op(
        f"helion_file_{int(alone)}(Tensor x, Tensor residual) -> Tensor",
        body=softmax.add_softmax.body,
        domain="helion_unbuilt",
    )
    op = declare(launcher)
    assert torch.equal(op(*args), torch.softmax(args[0] + args[1], -1))
    with FakeTensorMode():
        on_gpu = [torch.empty(3, 48, device="cuda") for _ in args]
    assert op(*on_gpu).device.type == "cuda"


def test_before_it_is_built(kernels: Any) -> None:
    x = torch.linspace(-1, 1, 30).view(5, 6)
    for twice in (False, True):
        assert torch.equal(kernels.helion_scaled(x, twice=twice), x * (6.0 if twice else 3.0))
    compiled = torch.compile(
        lambda x: kernels.helion_scaled(x, factor=2.0) + 1, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(x), 2 * x + 1)
    with FakeTensorMode():
        on_gpu = torch.empty(5, 6, device="cuda")
    assert kernels.helion_scaled(on_gpu).shape == (5, 6)


def test_attributes_and_constants(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU of the build is not asked."""
    kernels.scaled_kernel.reset()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    plans = trace(kernels.helion_scaled.record, kernels.helion_scaled.launcher)
    own = [evaluated(chosen(plans, [(5, 6)], 3.0, twice), [(5, 6)], 3.0, twice) for twice in (False, True)]
    assert [launch[2]["factor"] for [launch] in own] == [3.0, 3.0]
    sources = [chosen(plans, [(5, 6)], 3.0, twice).steps[0].kernel.src for twice in (False, True)]
    assert sources[0] != sources[1]


def test_sizes_that_a_kernel_specializes(kernels: Any) -> None:
    """There is a plan for each size of a sample."""
    launcher, samples = lambda x: kernels.for_known_sizes(x), [{"x": torch.empty(16)}, {"x": torch.empty(40)}]
    plans = trace(record("f", "x"), launcher, samples)

    def first(n: int) -> Any:  # as in the library
        return next(p for p in plans.plans if len(p.ranks) == 1 and all(g.evaluate([(n,)]) for g in p.guards))

    assert [evaluated(first(n), [(n,)])[0][1] for n in (16, 40)] == [(1, 1, 1), (3, 1, 1)]
    [refusal] = first(41).steps
    assert isinstance(refusal, Refuse) and "Helion wrote for_known_sizes for the sizes" in refusal.message


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("without_config", "helion_kernels.py: copied: expected .*config=.*a build does not tune"),
        ("for_one_shape", "helion_kernels.py: copied: expected .*static_shapes=False.*all shapes"),
        ("for_all_processors", "asks for multi_processor_count of the GPU, and a library serves several"),
    ],
)
def test_what_is_refused(kernel: str, message: str, kernels: Any) -> None:
    with pytest.raises(BuildError, match=message):
        trace(record("f", "x"), lambda x: getattr(kernels, kernel)(x), [{"x": torch.empty(5)}])


def test_the_page_of_the_guide(kernels: Any, tmp_path: Path) -> None:
    page = (ROOT / "docs/guide/triton.md").read_text()
    (tmp_path / "add_exp.py").write_text(page.partition("```python\n# add_exp.py\n")[2].partition("```")[0])
    op = load_module(tmp_path / "add_exp.py").add_exp
    plan = chosen(trace(record("f", "x", "y", input_shapes="y = x"), op.launcher), [(300, 5)] * 2)
    assert evaluated(plan, [(300, 5)] * 2)[0][1] == (2, 1, 1)


def test_an_untested_helion(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.0.1")
    with pytest.raises(BuildError, match=r"Helion 9.0.1 was not tested .*: pip install 'helion==1.5"):
        kernels.helion_scaled(torch.ones(3))


@pytest.mark.cuda
def test_the_library_has_the_bits_of_helions_own_launch(kernels: Any, softmax: Any, tmp_path: Path) -> None:
    """Before it is built, in torch.compile, and in the library; Helion writes the same code on this GPU."""
    kernel = softmax.add_softmax_kernel
    shutil.copy(softmax.__file__, tmp_path / "helion_built.py")
    project = find_project([tmp_path / "helion_built.py"])
    library = build(project, tmp_path / "libhelion_built.so", Options()).library
    twinop.torch_op.load(library.path)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for shape in SHAPES:
            args = [torch.randn(shape, device="cuda").to(dtype) for _ in range(2)]
            own = kernel(*args)
            assert torch.equal(softmax.add_softmax(*args), own)
            assert torch.equal(torch.ops.helion_built.add_softmax(*args), own)
    compiled = torch.compile(lambda x: kernels.helion_scaled(x, factor=2.0) + 1, fullgraph=True)
    x = torch.randn(5, 6, device="cuda")
    assert torch.equal(compiled(x), 2 * x + 1)
    for dtype in (torch.float32, torch.bfloat16):
        args = [torch.randn(7, 1000).to(dtype) for _ in range(2)]
        here, there = (kernel.bind(tuple(t.to(on) for t in args)).to_triton_code() for on in ("cpu", "cuda"))
        assert here == there
