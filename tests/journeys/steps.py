"""The steps of a user: commands in a folder, by the command line alone. A journey is a list of them.

Each step asserts that it worked, and returns what it made or what was said.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tritonclient.grpc
import tritonclient.http
import warm_python
from service_fixtures import Served, serve

# Two steps of SGD. The twin has standard operators in place of the op, in fp64.
TRAIN = """
import inspect
import json

import numpy as np
import torch
from model import Net, twin

torch.manual_seed(0)
net, wide = Net(), twin()
wide.load_state_dict(net.state_dict())
args = net.example_inputs()
wide_args = [each.double() if each.is_floating_point() else each for each in args]


def outputs(model, args):
    found = model(*args)
    return list(found) if isinstance(found, tuple) else [found]


targets = [torch.randn_like(each) for each in outputs(net, args)]
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
losses, errors = [], []
for step in range(3):
    loss = sum((y - t).square().mean() for y, t in zip(outputs(net, args), targets))
    losses.append(loss.item())
    if step == 2:
        break
    wide.load_state_dict(net.state_dict())
    wide_loss = sum((y - t).square().mean() for y, t in zip(outputs(wide, wide_args), targets))
    for each, of in ((net, loss), (wide, wide_loss)):
        each.zero_grad()
        of.backward()
    for ours, exact in zip(net.parameters(), wide.parameters()):
        if exact.grad is not None:
            errors.append(((ours.grad - exact.grad).abs().max() / exact.grad.abs().max().clamp(1e-3)).item())
    optimizer.step()
wide.load_state_dict(net.state_dict())
torch.save(net.state_dict(), "weights.pt")
net.eval(), wide.eval()
with torch.no_grad():
    np.savez("inputs.npz", **dict(zip(inspect.signature(net.forward).parameters, args)))
    np.savez("torch.npz", *outputs(net, args))
    np.savez("exact.npz", *outputs(wide, wide_args))
print(json.dumps([losses, max(errors)]))
"""

# What an existing service does: it knows ONNX Runtime and the paths of libraries.
PLAIN = """
import sys

import numpy as np
import onnxruntime

model, inputs, answers, *libraries = sys.argv[1:]
options = onnxruntime.SessionOptions()
for library in libraries:
    options.register_custom_ops_library(library)
session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
types = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}
given = np.load(inputs)
feeds = {each.name: given[each.name].astype(types[each.type]) for each in session.get_inputs()}
np.savez(answers, *session.run(None, feeds))
assert "twinop" not in sys.modules
"""


@dataclass
class Service:
    """A running `twinop serve`, and its only model."""

    served: Served
    model: str

    @property
    def libraries(self) -> dict[str, str]:
        """The SHA-256 of each library that answers, by file name: from the metadata of the model."""
        said = self.served.ask("GET", f"/v2/models/{self.model}").json["parameters"]
        names, sums = (said.get(key, "").split(", ") for key in ("library", "library_sha256"))
        return {name: digest for name, digest in zip(names, sums, strict=True) if name}

    def ask(self, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Asks over HTTP and over gRPC, which give the same bits, and returns the outputs."""
        answers = []
        http, grpc = (tritonclient.http, self.served.http_port), (tritonclient.grpc, self.served.grpc_port)
        for protocol, port in (http, grpc):
            with protocol.InferenceServerClient(f"127.0.0.1:{port}") as client:
                inputs = []
                for name, array in feeds.items():
                    datatype = {"float32": "FP32", "float16": "FP16", "int64": "INT64"}[array.dtype.name]
                    inputs.append(protocol.InferInput(name, list(array.shape), datatype))
                    inputs[-1].set_data_from_numpy(array)
                outputs = client.get_model_metadata(self.model)
                outputs = outputs["outputs"] if isinstance(outputs, dict) else outputs.outputs
                names = [each["name"] if isinstance(each, dict) else each.name for each in outputs]
                result = client.infer(self.model, inputs)
                answers.append([result.as_numpy(name) for name in names])
        assert_same_bits(*answers)
        return answers[0]


@dataclass
class User:
    """Somebody with a shell.

    Attributes:
        folder: the current folder.
        binaries: where `twinop` and `python` are installed.
        has_time: takes the default options everywhere. CI's time is short: there C++ is built for the CPU, as
            nvcc takes a minute for a row-wise op, and not optimized, which takes a third of the compiler's
            time; Triton's kernels are built for one kind of GPU; `twinop test` runs a part of its tests, and
            processes need not import torch.
    """

    folder: Path
    binaries: Path = Path(sys.executable).parent
    has_time: bool = False

    def __post_init__(self) -> None:
        self.env = {"PATH": f"{self.binaries}:{os.environ['PATH']}", "HOME": str(self.folder / "home")}
        self.env |= {"LANG": "C.UTF-8", "COLUMNS": "500", "OMP_WAIT_POLICY": "PASSIVE"}
        self.env["CUDA_VISIBLE_DEVICES"] = ""  # answers are compared bit for bit: all are the CPU's
        self.env |= {name: os.environ[name] for name in ("TWINOP_LIBRARY_DIR",) if name in os.environ}
        self.folder = self.folder / "an empty folder ä"
        self.folder.mkdir()

    def types(self, *command: str | Path, code: int = 0) -> str:
        """Runs a command, and returns what it printed."""
        return self._prints(
            subprocess.run(
                command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=280,
                stdin=subprocess.DEVNULL,
            ),
            code,
        )  # fmt: skip

    def _prints(self, done: subprocess.CompletedProcess[str], code: int) -> str:
        said = done.stdout + done.stderr
        assert done.returncode == code, f"{' '.join(map(str, done.args))}: {done.returncode}\n{said[-6000:]}"
        assert "Traceback" not in said, said
        return said

    def twinop(self, *arguments: str | Path, code: int = 0) -> str:
        if self.has_time:
            return self.types(self.binaries / "twinop", *arguments, code=code)
        command = [self.binaries / "twinop", *arguments]
        return self._prints(warm_python.run(command, cwd=self.folder, env=self.env), code)

    def python(self, *arguments: str | Path) -> str:
        if self.has_time or arguments[0] == "plain.py":
            return self.types(self.binaries / "python", *arguments)
        return self._prints(warm_python.run(arguments, cwd=self.folder, env=self.env), 0)

    def writes(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / f"{name}.py").write_text(text)

    def makes(self, name: str, kind: str = "elementwise") -> None:
        """`twinop new`, and goes into the folder."""
        self.twinop("new", name, "--kind", kind)
        self.folder = self.folder / name

    def edits(self, file: str, changes: Mapping[str, str]) -> None:
        text = (self.folder / file).read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (self.folder / file).write_text(text)

    def builds(self) -> Path:
        """`twinop build`; returns the library."""
        library = self.folder / "build" / f"lib{self.folder.name}.so"
        is_cpp = (self.folder / f"{self.folder.name}.h").exists()
        options = [] if self.has_time else ["--cpu", "--debug"] if is_cpp else ["--archs", "90"]
        assert f"build/{library.name}: " in self.twinop("build", *options)
        return library

    def tests(self) -> None:
        """`twinop test`; in a hurry with the project's own tests, and some of one dtype."""
        is_python = not (self.folder / f"{self.folder.name}.h").exists()  # torch traces it for each dtype
        some = "onnxruntime" if is_python else "same_bits or means or against"
        few = f"float32 and ({some}) or test_{self.folder.name}"
        said = self.twinop("test", *([] if self.has_time else ["-k", few]))
        assert re.search(r"\d+ passed", said) and "failed" not in said, said

    def trains(self) -> None:
        """Two steps: the loss falls, and each gradient is that of standard operators in fp64."""
        self.writes(train=TRAIN)
        losses, error = json.loads(self.python("train.py").splitlines()[-1])
        assert losses[0] > losses[1] > losses[2] and error < 1e-3, (losses, error)

    def exports(self, file: str = "net.onnx", *options: str, code: int = 0) -> str:
        return self.twinop("export", "model.py:Net", "-o", file, "--device", "cuda", *options, code=code)

    def runs(self, file: str) -> list[Path]:
        """`twinop run`: each custom node has torch's bits, if it has a kernel. Returns their libraries."""
        said = self.twinop("run", file)
        verdicts = re.findall(r"│ CPU +│ (yes|- \(.*\)) +│$", said, re.MULTILINE)
        assert verdicts and "function body" not in said, said
        others = [each for each in verdicts if each != "yes"]
        assert all("no CPU kernel" in each or "needs a GPU" in each for each in others), said
        return [Path(each) for each in re.findall(r"(/[^,]*?\.so) \(twinop", said)]

    def asks_plain_runtime(self, file: str, *libraries: Path) -> list[np.ndarray]:
        """ONNX Runtime without twinop, in a process of its own."""
        self.writes(plain=PLAIN)
        self.python("plain.py", file, "inputs.npz", "plain.npz", *libraries)
        return self.reads("plain.npz")

    def reads(self, file: str) -> list[np.ndarray]:
        return list(np.load(self.folder / file).values())

    def feeds(self, file: str) -> dict[str, np.ndarray]:
        """The inputs, in the types of a model."""
        given = np.load(self.folder / "inputs.npz")
        inputs = onnx.load(self.folder / file).graph.input
        kinds = {each.name: each.type.tensor_type.elem_type for each in inputs}
        dtypes = {name: onnx.helper.tensor_dtype_to_np_dtype(kind) for name, kind in kinds.items()}
        return {name: given[name].astype(dtype) for name, dtype in dtypes.items()}

    @contextmanager
    def serves(self, models: str, *options: str) -> Iterator[Service]:
        """`twinop serve`, until the block ends; then it stops with code 0."""
        path = Path(models)
        name = (
            path.stem if path.suffix == ".onnx" else next((self.folder / path).glob("*/*/*.onnx")).parts[-3]
        )
        with serve(
            path, *options, env=self.env, cwd=self.folder,
            python=self.binaries / "python", program=[str(self.binaries / "twinop")],
        ) as served:  # fmt: skip
            yield Service(served, name)
            assert served.stop() == 0

    def checks(self, models: str, *options: str) -> dict[str, str]:
        """`twinop check`; returns the SHA-256 of each library, by path."""
        said = self.twinop("check", models, *options)
        assert "can be served" in said and "function bodies: not compared" not in said, said
        found = re.search(r" from (.*?); SHA-256 (.*?); difference", said)
        return dict(zip(*(each.split(", ") for each in found.groups()), strict=True)) if found else {}

    def packs(self, file: str) -> list[str]:
        """`twinop pack` for the CPU, as a library with CUDA code makes it choose a GPU.

        Returns:
            The arguments of the `twinop serve` that it recommends.
        """
        folder = f"packed-{Path(file).stem}"
        said = self.twinop("pack", file, "-o", folder, "--cpu")
        packed = self.folder / folder
        assert (packed / "twinop-pack.json").is_file()
        [command] = re.findall(r"^twinop serve (.*)$", said, re.MULTILINE)
        return command.split()


@dataclass
class Content:
    """What an ONNX file has. Ops are written as `domain::CustomName`, standard ones as `Name`."""

    nodes: list[str]
    attributes: dict[str, dict[str, Any]]  # by op, of its first node
    bodies: set[str]


def content(file: Path) -> Content:
    model = onnx.load(file)
    onnx.checker.check_model(model)

    def named(domain: str, name: str) -> str:
        return f"{domain}::{name}" if domain else name

    attributes: dict[str, dict[str, Any]] = {}
    for node in model.graph.node:
        values = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        attributes.setdefault(named(node.domain, node.op_type), values)
    nodes = [named(node.domain, node.op_type) for node in model.graph.node]
    return Content(nodes, attributes, {named(each.domain, each.name) for each in model.functions})


def checksum(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def assert_same_bits(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def assert_close(found: list[np.ndarray], expected: list[np.ndarray], accepted: float) -> None:
    """The largest error is at most this part of the largest element."""
    for a, b in zip(found, expected, strict=True):
        error = np.abs(a.astype(np.float64) - b).max() / max(1, np.abs(b).max())
        assert a.shape == b.shape and error <= accepted, error
