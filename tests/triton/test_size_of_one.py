"""A size that is 1 in a call: the chosen variant against the kernel that Triton makes for the constant 1."""

import re
from pathlib import Path

import pytest
from ahead_kernels import copy_rows_kernel, gelu_launch, launch_of, number, pointer
from specialisations import chosen_variant
from triton._C.libtriton import ir, passes

from twinop.aot_kernels.expression import size
from twinop.triton.compile import Compiled, Source, compile_kernels
from twinop.triton.recorder import TracedLaunch
from twinop.triton.variants import Address, specialise, variants


def without_places(ttir: str) -> str:
    return re.sub(r" ?loc\((?:[^()]|\([^()]*\))*\)", "", re.sub(r"(?m)^#loc.*\n", "", ttir))


def simplified(source: Source, folder: Path, ones: dict[str, int]) -> str:
    """Returns a kernel's intermediate code, in which the parameters `ones` are the constant 1, simplified.

    Args:
        ones: the bits of these parameters.
    """
    (compiled,) = compile_kernels([source], (80,), ptx=False)
    assert isinstance(compiled, Compiled)
    (text,) = compiled.ttir
    head, body = without_places(text).split(" attributes {noinline = false} {\n")
    for name, bits in ones.items():
        head, found = re.subn(rf", %{name}: i{bits}\b(?: \{{[^}}]*\}})?", "", head)
        assert found == 1
        body = f"%{name} = arith.constant 1 : i{bits}\n{body}"
    file = folder / "kernel.ttir"
    file.write_text(f"{head} attributes {{noinline = false}} {{\n{body}")
    context = ir.context()
    ir.load_dialects(context)
    module = ir.parse_mlir_module(str(file), context)
    manager = ir.pass_manager(context)
    for add in (passes.common.add_canonicalizer, passes.common.add_sccp, passes.common.add_cse):
        add(manager)
    passes.common.add_canonicalizer(manager)
    manager.run(module, "simplify")
    # Constants are named in the order of their lines; their values stand for them here.
    text = without_places(str(module))
    values = dict(re.findall(r"(%\S+) = arith.constant (.*)\n", text))
    text = re.sub(r" *%\S+ = arith.constant .*\n", "", text)
    return re.sub(r"%\w+", lambda name: values.get(name[0], name[0]), text)


COPY_ROWS = launch_of(
    copy_rows_kernel, pointer("x_ptr", "input"), pointer("y_ptr", "output"), number("rows", size(0, 0)),
    number("stride", size(0, 1)), number("columns", size(0, 2)), BLOCK=64,
)  # fmt: skip


@pytest.mark.parametrize(
    ("launch", "address", "bits"), [(gelu_launch(), 256, 32), (gelu_launch(), 260, 64), (COPY_ROWS, 256, 32)]
)
def test_an_int_that_is_1_computes_what_the_constant_computes(
    launch: TracedLaunch, address: int, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton makes a kernel of its own for 1. The chosen variant, with 1 put in, is the same program."""
    monkeypatch.setenv("TWINOP_CACHE", str(tmp_path / "cache"))
    ints = [argument.name for argument in launch.arguments[2:]]
    values = [*[Address(address, "float32")] * 2, *[1] * len(ints)]
    special = specialise(launch, values)
    assert all(special.signature[name] == "constexpr" for name in ints)
    variant = chosen_variant(variants(launch), values)
    assert all(variant.kernel.signature[name] == f"i{bits}" for name in ints)
    assert simplified(variant.kernel, tmp_path, dict.fromkeys(ints, bits)) == simplified(
        special, tmp_path, {}
    )
