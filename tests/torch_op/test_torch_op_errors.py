"""Every error that a user of twinop.torch_op can cause is one clear message."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import warm_python
from samples import DEVICES  # and registers the ops that only the tests use

from twinop import torch_op
from twinop.errors import LibraryError, RecordError
from twinop.libraries.library import find_library

ops = torch.ops.custom_domain
ROOT = Path(__file__).resolve().parents[2]
NESTED = r"a nested tensor.*torch\.nested\.to_padded_tensor\(\)"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: torch.ones(3, dtype=torch.int64, device=d), r"x: int64\[3\].*no kernel takes these"),
        (lambda d: torch.eye(3, device=d).to_sparse(), r"a sparse tensor.*\.to_dense\(\)"),
        (lambda d: torch.eye(3, device=d).to_sparse_csr(), r"a sparse compressed tensor.*\.to_dense\(\)"),
        (lambda d: torch.nested.nested_tensor([torch.ones(3, device=d)] * 2), NESTED),
        (lambda d: torch.nested.nested_tensor([torch.ones(3, device=d)] * 2, layout=torch.jagged), NESTED),
        (lambda d: torch.ones((1,) * 33, device=d), r"33 dimensions, at most 32 are supported"),
    ],
    ids=["int", "sparse", "csr", "nested", "jagged", "rank"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_wrong_tensors(make: Callable[[str], torch.Tensor], message: str, device: str) -> None:
    for relu in (ops.relu, torch_op.relu):
        with pytest.raises((RuntimeError, RecordError), match=message):
            relu(make(device))


def cut(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Returns a view whose storage gets another size, as FSDP makes it."""
    tensor.untyped_storage().resize_(size)
    return tensor


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_that_lost_their_memory(device: str) -> None:
    """In any layout, wherever the storage ends; an empty tensor needs none."""
    lost = {
        "released": cut(torch.ones(8, 16, device=device), 0),
        "cut": cut(torch.ones(8, 16, device=device), 500),
        "a view behind the end": cut(torch.ones(32, 16, device=device)[8:16], 8 * 16 * 4),
        "strided": cut(torch.ones(16, 8, device=device).t(), 0),
        "expanded": cut(torch.ones(1, 16, device=device).expand(8, 16), 0),
    }
    x = torch.ones(8, 16, device=device)
    for tensor in lost.values():
        for call in (torch_op.gelu, torch_op.rms_norm, lambda t: torch_op.add(x, t)):
            with pytest.raises(RuntimeError, match="has lost its memory: its storage has .* bytes.*FSDP"):
                call(tensor)
    assert torch_op.gelu(cut(torch.ones(0, 16, device=device), 0)).shape == (0, 16)
    enough = cut(torch.ones(32, 16, device=device)[8:16], 16 * 16 * 4)
    assert torch.equal(torch_op.relu(enough), enough)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_with_a_lazy_sign_or_a_gradient(device: str) -> None:
    x = torch.randn(8, 16, device=device)
    for each in (torch._neg_view(x), torch.complex(x, -x).conj().imag, x.clone().requires_grad_()):
        assert torch.equal(torch_op.relu(each), torch.relu(each))
        assert torch.equal(torch_op.relu(each.t()), torch.relu(each.t()))


CALLS: dict[str, tuple[Callable[[str], object], str]] = {
    "dim": (
        lambda d: torch_op.softmax(torch.ones(2, 3, device=d), 2),
        r"softmax\(x: float32\[2, 3\]\): attribute dim is 2, expected a dimension of x: -2 to 1",
    ),
    "mixed": (
        lambda d: torch_op.layer_norm(torch.ones(3, device=d), torch.ones(3, device=d).half()),
        r"\(x: float32\[3\], weight: float16\[3\], bias: absent\): no kernel takes these dtypes; .*"
        r"float16 weight=float32 bias=float32; .*\(all inputs the same but where one is named\)",
    ),
    "None": (lambda d: torch_op.swiglu(torch.ones(3, device=d), None), "custom_domain::swiglu: gate is None"),
}


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
@pytest.mark.parametrize("name", CALLS)
def test_wrong_calls(name: str, device: str) -> None:
    """The kernels and the fakes (torch.compile, torch.export, meta tensors) say the same."""
    call, message = CALLS[name]
    with pytest.raises((RuntimeError, RecordError), match=message):
        call(device)


def test_the_fakes_errors_come_out_of_torch_compile() -> None:
    for function, message in (
        (lambda x: torch_op.softmax(x, 2), "expected a dimension of x: -2 to 1"),
        (lambda x: torch_op.rms_norm(x, x), r"weight has shape \[2, 3\], expected x\[axis:\] = \[3\]"),
    ):
        with pytest.raises(Exception, match=message):
            torch.compile(function, fullgraph=True, backend="eager")(torch.ones(2, 3))


def test_wrong_lists() -> None:
    x = torch.randn(3)
    with pytest.raises(RuntimeError, match="attribute pads has 9 entries, at most 8"):
        ops.pad_affine(x, pads=list(range(9)))
    with pytest.raises(RuntimeError, match=r"pad_affine\(x: float32\[3\].*too short"):
        ops.pad_affine(x, pads=[1])


def test_what_only_the_launcher_sees() -> None:
    with pytest.raises(RuntimeError, match=r"bias: float32\[4\]\).*as long as the last one of x"):
        ops.pad_affine(torch.randn(2, 3), None, torch.randn(4))
    for op in (ops.pad_affine, ops.double_and_sum):
        with pytest.raises(RuntimeError, match="dimension"):
            op(torch.tensor(1.0))


@pytest.mark.cuda
def test_a_weight_left_on_the_cpu() -> None:
    with pytest.raises(RuntimeError, match="must be on one device; weight is on cpu, the first on cuda:0"):
        torch_op.layer_norm(torch.randn(2, 3, device="cuda"), torch.randn(3))


def test_an_op_name_in_two_libraries(tmp_path: Path) -> None:
    copy = tmp_path / "libsecond.so"
    data = find_library("test_ops").read_bytes()
    copy.write_bytes(data)
    first = torch_op.load(find_library("test_ops"))
    assert torch_op.load(find_library("test_ops")) is first  # the same file again: nothing happens
    assert torch_op.load(copy).functions == first.functions  # the same ops, from a copy
    other = tmp_path / "libother.so"
    other.write_bytes(data.replace(b"double_and_sum(Tensor x)", b"double_and_sum(Tensor?x)"))
    with pytest.raises(
        LibraryError,
        match=r"libother.so: op custom_domain::double_and_sum\(Tensor\?x\) .* is registered already, from "
        r".*libtest_ops.so, as custom_domain::double_and_sum\(Tensor x\).* or rename the op",
    ):
        torch_op.load(other)


def test_an_op_name_defined_elsewhere() -> None:
    code = (
        "import torch\n"
        "library = torch.library.Library('custom_domain', 'FRAGMENT')\n"
        "library.define('relu(Tensor x) -> Tensor')\n"
        "from twinop.errors import LibraryError\n"
        "try:\n    from twinop import torch_op\n"
        "except LibraryError as error:\n    print(error)\n"
    )
    result = warm_python.run(["-c", code], cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert re.search(r"relu\(Tensor x.* is registered already, by code outside twinop", result.stdout)


def test_a_smaller_library_beside_gives_the_ops_that_are_there() -> None:
    relu_alone = torch_op.load(find_library("custom_relu"))
    assert relu_alone.relu is torch_op.relu
    with pytest.raises(AttributeError, match=r"libcustom_relu.so has no op 'gelu'; it has: relu, relu_b"):
        relu_alone.gelu  # noqa: B018
