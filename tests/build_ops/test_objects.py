"""Object files with functions of tvm-ffi's C signature become ops; what cannot be one is refused."""

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from abi_files import FLOAT, model
from build_files import twinop
from onnx import helper
from record_driver import ROOT, compiler
from typer.testing import CliRunner, Result

from twinop import torch_op
from twinop.building.builder import build
from twinop.building.project import Options, find_project
from twinop.building.toolchain import find_nvcc
from twinop.cli import app
from twinop.libraries.library import needed_libraries

tvm_ffi = pytest.importorskip("tvm_ffi", reason="./build.sh test installs apache-tvm-ffi")

PAGE = "docs/guide/record.md"
MIXED = """
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/dtype.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>
using namespace tvm::ffi;

// Writes what it gets.
void Mixed(TensorView x, Optional<TensorView> bias, int64_t n, double f, bool flag, String mode, Shape dims,
           TensorView y, TensorView z) {
  if (mode == "fails") TVM_FFI_THROW(ValueError) << "mode " << mode << " of " << x.dtype();
  if (mode == "deep") throw std::runtime_error("a plain exception");
  double got[] = {double(n), f, double(flag), double(mode.size()), double(dims.size()),
                  double(dims.size() ? dims[0] : 0), double(bias.has_value() ? bias.value().size(0) : -1),
                  double(x.ndim()), double(x.stride(0)), double(x.stride(1)), double(x.device().device_type),
                  double(TVMFFIEnvGetStream(2, 0) != nullptr),
                  double(z.dtype().code), double(z.dtype().bits)};
  for (int64_t i = 0; i < y.size(0); ++i) static_cast<double*>(y.data_ptr())[i] = got[i];
  static_cast<uint16_t*>(z.data_ptr())[0] = 0x3f80;  // 1 in bfloat16
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mixed, Mixed);

String Returns(TensorView, TensorView) { return String("not a tensor"); }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(returns, Returns);

void WantsTensor(Tensor, TensorView) {}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(wants_tensor, WantsTensor);

void DType(TensorView x, TensorView) {
  TVM_FFI_THROW(TypeError) << "a dtype of code " << int(x.dtype().code) << " and " << int(x.dtype().bits)
                           << " bits: " << x.dtype();
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dtype, DType);

void Put(TensorView cache, TensorView row, int64_t at) {
  for (int64_t i = 0; i < row.numel(); ++i)
    static_cast<float*>(cache.data_ptr())[at * row.numel() + i] = static_cast<float*>(row.data_ptr())[i];
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(put, Put);
"""
OP = """
#include "twinop/tvm_ffi.h"
namespace twinop {
TWINOP_TVM_FFI(plain);
TWINOP_CPU_OP(op, Record("op(Tensor x) -> Tensor"), CallTvmFfi<__tvm_ffi_plain>)
}  // namespace twinop
"""
HEADER = """
#include "twinop/tvm_ffi.h"
namespace twinop {
TWINOP_TVM_FFI(mixed);
TWINOP_CPU_OP(mixed,
              Record("mixed(Tensor x, Tensor? bias=None, int n=3, float f=0.5, bool flag=True, "
                     "str mode=\\"ab\\", int[] dims=[7, 8]) -> (Tensor y, Tensor z)")
                  .dtypes("float32 y=float64 z=bfloat16")
                  .shapes("y = [14]; z = [1]"),
              CallTvmFfi<__tvm_ffi_mixed>)
TWINOP_TVM_FFI(returns);
TWINOP_CPU_OP(returns, Record("returns(Tensor x) -> Tensor").dtypes("float32"), CallTvmFfi<__tvm_ffi_returns>)
TWINOP_TVM_FFI(wants_tensor);
TWINOP_CPU_OP(wants_tensor, Record("wants_tensor(Tensor x) -> Tensor"), CallTvmFfi<__tvm_ffi_wants_tensor>)
TWINOP_TVM_FFI(put);
TWINOP_CPU_OP(put, Record("put(Tensor(a!) cache, Tensor row, int at) -> ()").dtypes("float32"),
              CallTvmFfi<__tvm_ffi_put>)
TWINOP_CPU_OP(too_few, Record("too_few(Tensor x) -> Tensor"), CallTvmFfi<__tvm_ffi_put>)
TWINOP_TVM_FFI(dtype);
TWINOP_CPU_OP(dtype, Record("dtype(Tensor x) -> Tensor").dtypes("float8_e4m3fn"),
              CallTvmFfi<__tvm_ffi_dtype>)
TWINOP_TVM_FFI(plain);
TWINOP_CPU_OP(silent, Record("silent(Tensor x) -> Tensor"), CallTvmFfi<__tvm_ffi_plain>)
}  // namespace twinop
"""
PLAIN = "int __tvm_ffi_plain(void* self, const void* arguments, int count, void* result) { return -1; }\n"


def compiled(file: Path, *options: str) -> Path:
    """Compiles a source file, with tvm-ffi's headers if it is C++."""
    include = [f"-I{tvm_ffi.libinfo.find_include_path()}", f"-I{tvm_ffi.libinfo.find_dlpack_include_path()}"]
    kind = ["-std=c++17", *include] if file.suffix == ".cpp" else ["-x", "c"]
    command = [compiler(), "-O0", "-fPIC", *kind, *options]
    target = file.with_suffix(".o")
    subprocess.run([*command, "-c", file, "-o", target], check=True)
    return target


@dataclass(frozen=True)
class Page:
    """What the page's example makes."""

    folder: Path
    object: Path
    library: Path


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = tmp_path_factory.mktemp("page")
    section = (ROOT / PAGE).read_text().partition("## Object files")[2].partition("\n## ")[0]
    source, header, commands = re.findall(r"(?ms)^```[^\n]+\n(.*?)^```$", section)
    (folder / "kernel.cpp").write_text(source)
    (folder / "rms_norm.h").write_text(header)
    for line in commands.splitlines():
        words = shlex.split(line.replace("$(tvm-ffi-config --cxxflags)", ""))
        if words[0] == "c++":
            assert "$(tvm-ffi-config --cxxflags)" in line
            compiled(folder / "kernel.cpp", *words[1:3])
        else:
            done = twinop(*words[1:], cwd=folder)
            assert done.returncode == 0 and "rms_norm" in done.stdout, done.stderr
    return Page(folder, folder / "kernel.o", folder / "build/librms_norm.so")


def said(folder: Path, *arguments: str) -> Result:
    """Runs `twinop build` in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return CliRunner().invoke(app, ["build", "--cpu", *arguments])


def symbols(file: Path, *options: str) -> str:
    return subprocess.run(["nm", *options, file], check=True, capture_output=True, text=True).stdout


def test_the_bits_are_those_of_tvm_ffi(page: Page) -> None:
    plain = page.folder / "libplain.so"
    libraries = Path(tvm_ffi.libinfo.find_libtvm_ffi()).parent
    subprocess.run(
        [compiler(), "-shared", page.object, "-o", plain, f"-L{libraries}", "-ltvm_ffi"], check=True
    )
    function = tvm_ffi.load_module(str(plain))["rms_norm"]
    ops = torch_op.load(page.library)
    for shape in ((5, 33), (2, 3, 64), (7,)):
        x, weight = torch.randn(shape), torch.randn(shape[-1])
        expected = torch.empty_like(x)
        function(x, weight, 1e-5, expected)
        assert torch.equal(ops.rms_norm(x, weight, eps=1e-5), expected)
    assert ops.rms_norm(torch.ones(0, 4), torch.ones(4)).shape == (0, 4)
    strided = torch.randn(33, 5).t()
    assert torch.equal(
        ops.rms_norm(strided, torch.ones(33)), ops.rms_norm(strided.contiguous(), torch.ones(33))
    )


def test_it_serves_torch_and_onnx_runtime(page: Page) -> None:
    op = torch_op.load(page.library).rms_norm
    x, weight = torch.randn(5, 33), torch.randn(33)
    torch.library.opcheck(torch.ops.rms_norm.rms_norm.default, (x, weight, 1e-6))
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(page.library))
    node = helper.make_node("CustomRmsNorm", ["x", "w"], ["y"], domain="rms_norm", eps=0.25)
    graph = model([node], {"x": FLOAT, "w": FLOAT}, {"y": FLOAT}, rms_norm=1)
    session = ort.InferenceSession(graph.SerializeToString(), options, ["CPUExecutionProvider"])
    found = session.run(None, {"x": x.numpy(), "w": weight.numpy()})[0]
    np.testing.assert_array_equal(found, op(x, weight, eps=0.25).numpy())
    wide = x.double()
    exact = wide * (wide.square().mean(-1, keepdim=True) + 0.25).rsqrt() * weight.double()
    np.testing.assert_allclose(found, exact.numpy(), 1e-6)
    # The text of the function's error is the message of both.
    message = "ValueError: rows of 70000 elements"
    with pytest.raises(RuntimeError, match=message):
        op(torch.ones(1, 70000), torch.ones(70000))
    with pytest.raises(Exception, match=message):
        session.run(None, {"x": np.ones((1, 70000), np.float32), "w": np.ones(70000, np.float32)})


def test_the_library_needs_no_tvm_ffi(page: Page) -> None:
    assert not any("tvm" in name or "python" in name for name in needed_libraries(page.library))
    assert "TVMFFI" in symbols(page.object) and "TVMFFI" not in symbols(page.library, "-D")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> torch_op.Ops:
    """The ops of a header beside two objects."""
    folder = tmp_path_factory.mktemp("mixed")
    for name, text in {"mixed.cpp": MIXED, "plain.c": PLAIN, "mixed_ops.h": HEADER}.items():
        (folder / name).write_text(text)
    objects = [compiled(folder / "mixed.cpp"), compiled(folder / "plain.c")]
    built = build(find_project([folder / "mixed_ops.h", *objects]), folder / "lib.so", Options(cpu=True))
    assert built.library.domain == "mixed_ops"
    return torch_op.load(built.library.path)


def test_each_kind_of_argument(mixed: torch_op.Ops) -> None:
    x = torch.ones(4, 6)
    y, z = mixed.mixed(x)
    assert y.tolist() == [3, 0.5, 1, 2, 2, 7, -1, 2, 6, 1, 1, 0, 4, 16] and z.item() == 1
    given = {"n": -(2**40), "f": 0.1, "flag": False, "mode": "", "dims": []}
    y, _ = mixed.mixed(x, torch.ones(9), **given)
    f = torch.tensor(0.1, dtype=torch.float32).item()  # ONNX has no wider one
    assert y.tolist() == [-(2**40), f, 0, 0, 0, 0, 9, 2, 6, 1, 1, 0, 4, 16]
    assert mixed.returns(x).shape == x.shape


def test_a_function_may_write_into_an_input(mixed: torch_op.Ops) -> None:
    cache, row = torch.zeros(3, 4), torch.arange(4.0)
    mixed.put(cache, row, at=1)
    assert torch.equal(cache, torch.stack([torch.zeros(4), row, torch.zeros(4)]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda ops, x: ops.mixed(x, mode="fails"), "mixed_ops::mixed.*ValueError: mode fails of float32"),
        (lambda ops, x: ops.mixed(x, mode="deep"), "InternalError: a plain exception"),
        (lambda ops, x: ops.wants_tensor(x), r"TypeError: Mismatched type on argument #0.*`DLTensor\*`"),
        (lambda ops, x: ops.too_few(x), "TypeError: Mismatched number of arguments.* Expected 3 but got 2"),
        (lambda ops, x: ops.dtype(x.to(torch.float8_e4m3fn)), "a dtype of code 10 and 8 bits: float8"),
        (lambda ops, x: ops.silent(x), "the function failed, and raised no error"),
    ],
)
def test_an_error_is_one_message(mixed: torch_op.Ops, call: object, message: str) -> None:
    assert callable(call)
    for _ in range(2):  # none is left over from the first
        with pytest.raises(RuntimeError, match=message):
            call(mixed, torch.ones(2, 2))
    assert mixed.mixed(torch.ones(2, 2))[0][0] == 3


def test_an_object_alone(tmp_path: Path) -> None:
    (tmp_path / "plain.o").write_bytes(b"")
    result = said(tmp_path, "plain.o")
    assert result.exit_code == 1 and "plain.o: registers no op. Expected a header" in result.stderr
    assert not list(tmp_path.rglob("lib*.so"))


WANTS = PLAIN.replace("return -1", "return TVMFFIFunctionCall(result) + TVMBackendGetFuncFromEnv(result)")
NO_PIC = "int number[9];\n" + PLAIN.replace("return -1", "return (int)(long)&number[count]")


def test_what_the_linker_refuses(tmp_path: Path) -> None:
    for name, text in {"wants": WANTS, "no_pic": NO_PIC}.items():
        (tmp_path / f"{name}.c").write_text(text)
        compiled(tmp_path / f"{name}.c", "-fno-pic", "-mcmodel=medium", "-w")
    (tmp_path / "op.h").write_text(OP)
    result = said(tmp_path, "op.h", "wants.o", "--name", "op")
    assert result.exit_code == 1
    assert "nothing defines TVMBackendGetFuncFromEnv, TVMFFIFunctionCall. An object file" in result.stderr
    result = said(tmp_path, "op.h", "no_pic.o", "--name", "op")
    assert result.exit_code == 1 and "no_pic.o: compiled without -fPIC" in result.stderr


ON_CUDA = """
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
using tvm::ffi::TensorView;

__global__ void Scale(const float* x, float by, float* y, int64_t count) {
  const int64_t i = blockIdx.x * 256l + threadIdx.x;
  if (i < count) y[i] = by * x[i];
}

void Launch(TensorView x, double by, TensorView y) {
  if (x.device().device_type != kDLCUDA) TVM_FFI_THROW(ValueError) << "x is not on a GPU";
  auto* stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, x.device().device_id));
  Scale<<<(x.numel() + 255) / 256, 256, 0, stream>>>(
      static_cast<const float*>(x.data_ptr()), by, static_cast<float*>(y.data_ptr()), x.numel());
  if (cudaGetLastError() != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "the launch failed";
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scale, Launch);
"""
SCALE = """
#include "twinop/tvm_ffi.h"
namespace twinop {
TWINOP_TVM_FFI(scale);
TWINOP_OP(scale, Record("scale(Tensor x, float by) -> Tensor"), CallTvmFfi<__tvm_ffi_scale>)
}  // namespace twinop
"""


@pytest.mark.cuda
def test_a_cuda_object(tmp_path: Path) -> None:
    """On the caller's stream, in torch and in ONNX Runtime: the bits of the CPU."""
    (tmp_path / "scale.cu").write_text(ON_CUDA)
    nvcc = find_nvcc()
    assert nvcc is not None
    major, minor = torch.cuda.get_device_capability()
    include = [f"-I{path}" for path in tvm_ffi.libinfo.include_paths()]
    command = [nvcc.path, "-std=c++17", f"-arch=sm_{major}{minor}", "-Xcompiler=-fPIC", *include]
    subprocess.run([*command, "-c", "scale.cu", "-o", "scale.o"], cwd=tmp_path, check=True)
    (header := tmp_path / "scaled.h").write_text(SCALE)
    built = build(find_project([header, tmp_path / "scale.o"], "scaled"), tmp_path / "libscaled.so")
    assert not any("cudart" in name or "tvm" in name for name in needed_libraries(built.library.path))
    op = torch_op.load(built.library.path).scale
    with pytest.raises(RuntimeError, match="ValueError: x is not on a GPU"):
        op(torch.ones(3), by=2.0)
    x = torch.randn(1000, device="cuda")
    assert torch.equal(op(x, by=0.3), x * torch.tensor(0.3, device="cuda"))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = x + 1
        y = op(late, by=0.3)
    stream.synchronize()
    assert torch.equal(y, late * torch.tensor(0.3, device="cuda"))
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(built.library.path))
    node = helper.make_node("CustomScale", ["x"], ["y"], domain="scaled", by=0.3)
    graph = model([node], {"x": FLOAT}, {"y": FLOAT}, scaled=1).SerializeToString()
    session = ort.InferenceSession(graph, options, ["CUDAExecutionProvider"])
    found = session.run(None, {"x": x.cpu().numpy()})[0]
    np.testing.assert_array_equal(found, op(x, by=0.3).cpu().numpy())
