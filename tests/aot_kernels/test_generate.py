"""The C++ source of ops with kernels compiled ahead: what tools read of its library, names, texts, limits."""

import random
from dataclasses import replace
from pathlib import Path

import onnxruntime
import pytest
from aot_ops import GENERAL, KERNEL, ONE, InProcess, LibraryOf, contents_of, cubins, op_of, record
from device_calls import At, Request, run

from twinop.aot_kernels.expression import attribute, size, text_is
from twinop.aot_kernels.generate import generate
from twinop.aot_kernels.plan import POINTER, Body, DeviceOp, Launch, Plan, Pointer, Refuse, Scalar, Variant
from twinop.errors import BuildError
from twinop.libraries.library import needed_libraries, read_library
from twinop.record.op_spec import Attribute
from twinop.record.schema_text import record_of

LAUNCH = Launch((ONE, ONE, ONE), (), (GENERAL,))
X = Request([At((5,))])


def test_what_tools_read(library_of: LibraryOf) -> None:
    full = record_of(
        "k(Tensor x0, Tensor? x1, int n, float eps=1e-5) -> Tensor",
        "aot",
        dtypes="float32; float16",
        gradient="x0 = grad",
        shapes="y = x0[:-1]",
        limits="n >= 0",
    )
    contents = replace(contents_of(DeviceOp(full, (Plan(0, (1, None), (LAUNCH,)),))), source='a"b=abc')
    path = library_of(contents)
    library = read_library(path)
    expected = replace(full, devices=("cuda",))
    assert library.records == {"k": expected} and library.domain == "aot"
    assert library.cuda_archs == "80,90" and library.source == 'a"b=abc' and library.exports_ort
    needed = {name.partition(".")[0] for name in needed_libraries(path)}
    assert needed <= {"libstdc++", "libm", "libgcc_s", "libc", "libdl", "libpthread", "ld-linux-x86-64"}
    onnxruntime.SessionOptions().register_custom_ops_library(str(path))
    with_body = replace(contents, ops=(replace(contents.ops[0], bodies=(Body(b"model", 0),)),))
    assert read_library(library_of(with_body)).records["k"].devices == ("cpu", "cuda")


def test_equal_files_are_embedded_once_and_old_ones_are_removed(tmp_path: Path) -> None:
    image = random.Random(0).randbytes(100)
    kernels = [replace(KERNEL, name=f"k{i}|", images=cubins({"90": image})) for i in range(10)]
    file = tmp_path / "k.generated.cpp"
    generate(contents_of(op_of(LAUNCH)), file)
    assert len(list(tmp_path.glob("*.files/*"))) == 2
    first = file.read_text()
    generate(contents_of(op_of(LAUNCH), *kernels), file)
    assert [each.read_bytes() for each in tmp_path.glob("*.files/*")] == [image]
    generate(contents_of(op_of(LAUNCH), replace(KERNEL, images=cubins({"90": b"a", "80": b"b"}))), file)
    assert file.read_text() != first  # a source that embeds other files is another text


def test_names_and_texts_of_all_kinds(library_of: LibraryOf, in_process: InProcess) -> None:
    """Names may be words of C++, and texts may have any character."""
    attributes = (Attribute("default", "int"), Attribute("x0_0", "int"), Attribute("NULL", "str"))
    sizes = (size(0, 0), attribute(0), attribute(1))
    numbers = tuple(Scalar(each, "i64", "argument 1") for each in sizes)
    arguments: tuple[Pointer | Scalar, ...] = Pointer("input", 0, name="int"), *numbers
    variant = Variant((), ((0, POINTER), (1, "i64"), (2, "i64"), (3, "i64")), 0)
    text = 'k.py:9: \\ "quoted"\n\té\x01?'
    plans: tuple[Plan[Launch], ...] = (
        Plan(0, (1,), (Launch((ONE, ONE, ONE), arguments, (variant,)),), (text_is(2, text),)),
        Plan(0, (1,), (Refuse(text),)),
    )
    kernel = replace(KERNEL, name="int|8,8,8,8", label=text)
    library = library_of(DeviceOp(record(1, attributes), plans), kernel)
    requests = [Request([At((5,))], attributes=[6, 7, given]) for given in (text, text + "?")]
    launched, refused = in_process(run, library, requests)
    values = [1 << 20, 5, 6, 7]
    assert launched.launches[0]["parameters"] == [value.to_bytes(8, "little").hex() for value in values]
    assert refused.error == text


def test_the_most_arguments(library_of: LibraryOf, in_process: InProcess, tmp_path: Path) -> None:
    def launch(count: int) -> Launch:
        parameters = tuple((index, "i32") for index in range(count))
        return Launch((ONE, ONE, ONE), (Scalar(ONE, "i32"),) * count, (Variant((), parameters, 0),))

    kernel = replace(KERNEL, name="k|" + ",".join(["4"] * 128), scratch_pointers=2)
    (outcome,) = in_process(run, library_of(op_of(launch(128)), kernel), [X])
    assert outcome.launches[0]["parameters"] == ["01000000"] * 128
    with pytest.raises(BuildError, match="k: 129 arguments in a launch of a kernel, at most 128 are support"):
        generate(contents_of(op_of(launch(129))), tmp_path / "k.cpp")
