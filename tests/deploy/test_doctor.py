"""What twinop doctor says of broken set-ups, which are data here."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from models import model, node, value

from twinop.building.toolchain import Compiler, Gpu, Nvcc
from twinop.deploy.custom_nodes import Model, load_model
from twinop.deploy.doctor.command import check
from twinop.deploy.doctor.facts import Environment, Runtime, Torch
from twinop.libraries.find import Package
from twinop.libraries.library import Library
from twinop.record.schema_text import record_of

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
MISH = record_of("mish(Tensor x, float beta=1.0) -> Tensor", "mish", dtypes="float32; float16")
LIBRARY = Library(
    Path("build/libmish.so"), "0.3.0", "90", "13.0", {"mish": MISH}, exports_ort=True, domain="mish"
)
RUNTIME = Runtime("1.31.1", providers={CUDA: "", CPU: ""})
KNOWN = ("75", "80", "86", "89", "90", "100", "120")
NVCC = Nvcc("/usr/local/cuda/bin/nvcc", "13.0.88", KNOWN)


OTHER = replace(LIBRARY, path=Path("build/libother.so"), domain="other", records={})


def one_node(op_type: str = "CustomMish", dtype: str = "float32", **attributes: Any) -> Model:
    """A model of one node of the domain mish."""
    only = node(op_type, domain="mish", **attributes)
    proto = model([only], [value("x", dtype)], [value("y", dtype)], domains=["mish"])
    return load_model(proto.SerializeToString())


def in_function() -> Model:
    opsets = [onnx.helper.make_opsetid(domain, 1) for domain in ("mish", "my")]
    body = [onnx.helper.make_node("CustomMish", ["x"], ["y"], domain="mish")]
    function = onnx.helper.make_function("my", "Outer", ["x"], ["y"], body, opsets)
    proto = model([node("Outer", domain="my")], [value("x")], [value("y")], domains=["mish", "my"])
    proto.functions.append(function)
    return load_model(proto.SerializeToString())


def with_body() -> Model:
    proto = one_node().proto
    opsets = [onnx.helper.make_opsetid("", 20)]
    body = [onnx.helper.make_node("Relu", ["x"], ["y"])]
    proto.functions.append(onnx.helper.make_function("mish", "CustomMish", ["x"], ["y"], body, opsets))
    proto.metadata_props.add(key="twinop.package.mish", value="mish==0.1.0")  # which had its library
    return load_model(proto.SerializeToString())


HEALTHY = Environment(
    driver_cuda=13010,
    gpus=(Gpu("NVIDIA H200", 90),),
    compiler=Compiler(("c++",), "GCC", "13.2"),
    nvcc=NVCC,
    torch=Torch("2.11.0+cu130", "13.0"),
    runtime=RUNTIME,
    packages=(Package("mish", "mish", "0.1.0", "mish"),),
    libraries=(LIBRARY,),
    model=one_node(),
)
RTX = (Gpu("NVIDIA GeForce RTX 5090", 120),)
NO_GPU: dict[str, Any] = {
    "gpus": (),
    "driver_cuda": None,
    "runtime": replace(RUNTIME, unavailable_reasons=("no NVIDIA driver. Install one",)),
}

# set-up: (what differs from HEALTHY, level, words of the cause, words of the cure)
BROKEN: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "the driver does not answer": (
        {"gpus": (), "smi_problem": "NVIDIA-SMI has failed because\nit couldn't communicate"},
        "error",
        "nvidia-smi fails: NVIDIA-SMI has failed because it couldn't communicate",
        "in a container, start it with --gpus all",
    ),
    "no compiler": (
        {"compiler": None, "compiler_problem": "no C++ compiler found (c++). Install one (apt install g++)"},
        "warning",
        "no C++ compiler found (c++)",
        "Install one (apt install g++)",
    ),
    "no nvcc": ({"nvcc": None}, "warning", "no nvcc found", "install the CUDA toolkit"),
    "CUDACXX is wrong": (
        {"nvcc": None, "nvcc_problem": "CUDACXX=/x: no such program. Set it to the path of nvcc"},
        "error",
        "CUDACXX=/x: no such program",
        "Set it to the path of nvcc",
    ),
    "nvcc is too old for the GPU": (
        {"gpus": RTX, "nvcc": Nvcc("nvcc", "12.4.131", ("80", "86", "90"))},
        "error",
        "does not compile for NVIDIA GeForce RTX 5090: unsupported gpu architecture 'compute_120'",
        "install a newer CUDA and set CUDACXX to its nvcc; or twinop build --archs 90",
    ),
    "the GPU is too old": (
        {"gpus": (Gpu("Tesla T4", 75),)},
        "error",
        "Tesla T4 has compute capability 75: twinop's CUDA kernels need 80 (8.0) or later",
        "twinop build --cpu, or another GPU",
    ),
    "nvcc is newer than the driver": (
        {"driver_cuda": 12040},
        "error",
        "too old: it serves CUDA 12.4, and nvcc is built with CUDA 13.0.88",
        "update the driver, or set CUDACXX to the nvcc of CUDA 12",
    ),
    "torch is too old": (
        {"torch": Torch("2.9.1+cu128", "12.8")},
        "error",
        "torch 2.9.1+cu128 is too old",
        "pip install -U 'torch>=2.10'",
    ),
    "torch without CUDA beside a GPU": (
        {"torch": Torch("2.13.0+cpu", "")},
        "warning",
        "torch 2.13.0+cpu is a build for the CPU",
        "pip uninstall -y torch && pip install torch",
    ),
    "the driver is too old for torch": (
        {"driver_cuda": 12080},
        "error",
        "and torch is built with CUDA 13.0",
        "install a torch built for CUDA 12",
    ),
    "no ONNX Runtime for a model": (
        {"runtime": None},
        "error",
        "not installed: models cannot be run",
        "pip install onnxruntime-gpu",
    ),
    "no ONNX Runtime, no model": (
        {**NO_GPU, "runtime": None, "model": None},
        "warning",
        "not installed: models cannot be run",
        "pip install onnxruntime",
    ),
    "ONNX Runtime is damaged": (
        {"runtime": Runtime(problem="ImportError: libonnxruntime.so: cannot open")},
        "error",
        "cannot be imported: ImportError: libonnxruntime.so",
        "&& pip install onnxruntime-gpu",
    ),
    "ONNX Runtime is too old": (
        {"runtime": replace(RUNTIME, version="1.17.3")},
        "error",
        "onnxruntime 1.17.3 is too old: custom ops need 1.18",
        "pip install -U 'onnxruntime-gpu>=1.18'",
    ),
    "a session could not use the GPU": (
        {
            "runtime": replace(
                RUNTIME,
                unavailable_reasons=("it lacks libcudnn.so.9. pip install it",),
                providers={CUDA: "x"},
            )
        },
        "warning",
        "it lacks libcudnn.so.9",
        "pip install it",
    ),
    "the CUDA provider crashes": (
        {"runtime": replace(RUNTIME, providers={CUDA: "the process ended with signal 11", CPU: ""})},
        "error",
        "does not run a node: the process ended with signal 11",
        "these work: CPUExecutionProvider",
    ),
    "TensorRT is not installed": (
        {"runtime": replace(RUNTIME, providers={"TensorrtExecutionProvider": "libnvinfer.so.10", CPU: ""})},
        "warning",
        "does not run a node: libnvinfer.so.10",
        "install what it needs",
    ),
    "two packages with one domain": (
        {"packages": (Package("mish", "mish", "1", "mish"), Package("mish", "swish", "2", "swish"))},
        "error",
        "mish 1 and swish 2 both have ops of the domain mish",
        "pip uninstall swish",
    ),
    "a library of another ABI, named": (
        {
            "named": Path("libold.so"),
            "broken": ("libold.so: was built by twinop 0.1.0, before. Build the library again with this",),
        },
        "error",
        "libold.so: was built by twinop 0.1.0",
        "Build the library again",
    ),
    "a damaged library in a folder": (
        {
            "broken": ("build/libx.so: the file is damaged or cut short. Copy or build it again",),
            "model": None,
        },
        "warning",
        "build/libx.so: the file is damaged",
        "Copy or build it again",
    ),
    "the driver is too old for a library": (
        {"driver_cuda": 12080},
        "error",
        "and libmish.so is built with CUDA 13.0",
        "build the library again with CUDA 12",
    ),
    "a named library that no node uses": (
        {"named": OTHER.path, "libraries": (OTHER, LIBRARY)},
        "warning",
        "build/libother.so: no node of the model uses it",
        "leave it out",
    ),
    "the model is damaged": (
        {"model": None, "model_problem": "x.onnx: not a complete ONNX model (x). Copy or export it again"},
        "error",
        "x.onnx: not a complete ONNX model",
        "Copy or export it again",
    ),
    "a model without its library": (
        {"libraries": (), "broken": ("no library has mish::CustomMish. Build it (twinop build)",)},
        "error",
        "no library has mish::CustomMish",
        "Build it (twinop build)",
    ),
    "a library in the model's folder": (
        {"broken": ("libx.so lies in the model's own folder. Name it (--library libx.so), or remove it",)},
        "error",
        "libx.so lies in the model's own folder",
        "Name it (twinop doctor MODEL libx.so)",
    ),
    "a library for torch only": (
        {"libraries": (replace(LIBRARY, exports_ort=False),), "model": None},
        "warning",
        "does not export RegisterCustomOps",
        "twinop build",
    ),
    "no library, but a function body": (
        {"libraries": (), "model": with_body()},
        "warning",
        "no library has mish::CustomMish: its function body runs, which is slower",
        "pip install mish==0.1.0, build it",
    ),
    "an op in a function": (
        {"model": in_function()},
        "warning",
        "node 0 (CustomMish) in function my::Outer: ONNX Runtime infers few types in functions",
        "twinop.export.attach_bodies",
    ),
    "an op that the library lacks": (
        {"model": one_node("CustomMisch")},
        "error",
        "the library has no such op; did you mean CustomMish?",
        "export the model again",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_set_up(case: str) -> None:
    changes, level, cause, cure = BROKEN[case]
    found = check(replace(HEALTHY, **changes))
    assert any(each.level == level and cause in each.cause and cure in each.cure for each in found), found


@pytest.mark.parametrize("changes", [{}, NO_GPU, {"torch": None}, {"model": None}, {"nvcc": None, **NO_GPU}])
def test_healthy_set_up(changes: dict[str, Any]) -> None:
    assert [each for each in check(replace(HEALTHY, **changes)) if each.level != "OK"] == []


def test_every_problem_has_a_cure_on_one_line() -> None:
    for changes, *_ in BROKEN.values():
        for each in check(replace(HEALTHY, **changes)):
            assert each.level == "OK" or (each.cause and each.cure), each
            assert "\n" not in each.cause + each.cure
