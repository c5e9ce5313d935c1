"""The ways users go, each from an empty folder, with the default options.

A journey asserts what is in the files, and which library answered. In CI it builds for the CPU; the slow
tests build with all that the machine has, in a fresh environment with the wheel.
"""

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from genai_models import Genai, build
from onnx import numpy_helper
from steps import User, assert_close, assert_same_bits, checksum, content

ROOT = Path(__file__).resolve().parents[2]
LINEAR, NORM = "custom_domain::CustomLinear", "custom_domain::CustomLayerNorm"

# A linear layer before the op and a norm behind it: the optimizer of the export rewrites both.
NET = """
from pathlib import Path

import torch
from {op} import {op}


class Net(torch.nn.Module):
    def __init__(self, op={op}):
        super().__init__()
        self.linear = torch.nn.Linear(48, 48)
        self.op = op
        self.norm = torch.nn.LayerNorm(48)
        if Path("weights.pt").exists():
            self.load_state_dict(torch.load("weights.pt"))

    def forward(self, x):
        {forward}

    def example_inputs(self):
        return (torch.linspace(-2, 2, 8 * 48).sin().view(8, 48),)


def meaning(x{attributes}):
    return {meaning}


def twin():
    return Net(meaning).double()
"""
ONE = "return self.norm(self.op(self.linear(x){given}))"

MISH = """const T t = Tanh(Softplus(x));
    return grad_y * Fma(x * Sigmoid(x), (T(1) - t) * (T(1) + t), t);"""


def net(op: str, meaning: str, forward: str = ONE, given: str = "", attributes: str = "") -> str:
    return NET.format(op=op, meaning=meaning, forward=forward.format(given=given), attributes=attributes)


def answers(
    user: User, file: str, own: Path | None = None, accepted: float = 2e-5
) -> tuple[list[Path], list[np.ndarray]]:
    """A file runs in `twinop run`, and in plain ONNX Runtime with its libraries and without.

    Returns:
        The libraries, and what ONNX Runtime answers with them.
    """
    libraries = user.runs(file)
    assert own is None or own in libraries
    with_bodies, found = user.asks_plain_runtime(file), user.asks_plain_runtime(file, *libraries)
    for each in (with_bodies, found):
        assert_close(each, user.reads("exact.npz"), accepted)
    return libraries, found


def deploys(
    user: User, file: str, own: Path | None = None, accepted: float = 2e-5, in_hurry: bool = False
) -> None:
    """All that happens to a file: plain ONNX Runtime, `run`, `check`, `serve`, clients, `pack`.

    Args:
        in_hurry: where time is short, only the former two: another journey does the rest with such a library.
    """
    libraries, expected = answers(user, file, own, accepted)
    if in_hurry and not user.has_time:
        return
    assert user.checks(file) == {str(path): checksum(path) for path in libraries}
    names = {path.name: checksum(path) for path in libraries}
    models, *options = user.packs(file)
    for served in [[models, *options], *([[file]] if user.has_time else [])]:
        with user.serves(*served) as service:
            assert service.libraries == names
            assert_same_bits(service.ask(user.feeds(file)), expected)


def exports(user: User, own: str, library: Path, bits: str = "") -> str:
    """Exports the model, in 16 bits too if they are named. The user op stays between what is rewritten."""
    file = f"net{bits}.onnx"
    said = user.exports(file, *(["--dtype", bits] if bits else []))
    assert library.name in said and "torch = ONNX Runtime" in said
    found = content(user.folder / file)
    assert found.nodes == [LINEAR, own, NORM] and found.bodies == {LINEAR, own, NORM}
    return file


Way = Callable[[User], None]


def elementwise(user: User) -> None:
    user.makes("mish")
    user.edits(
        "mish.h", {"return x * x;": "return x * Tanh(Softplus(x));", "return grad_y * (T(2) * x);": MISH}
    )
    user.edits("mish.py", {"op.Mul(x, x)": "op.Mul(x, op.Tanh(op.Softplus(x)))"})
    user.edits("test_mish.py", {"x * x": "torch.nn.functional.mish(x)"})
    library = user.builds()
    user.tests()
    user.writes(model=net("mish", "torch.nn.functional.mish(x)"))
    user.trains()
    deploys(user, exports(user, "mish::CustomMish", library), library)
    if not user.has_time:
        return
    answers(user, exports(user, "mish::CustomMish", library, "float16"), library, 5e-3)
    # Somewhere else nothing finds the library, and nothing is taken in its place.
    elsewhere = user.folder.parent / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(user.folder / "net.onnx", elsewhere)
    user.folder = elsewhere
    said = user.twinop("check", "net.onnx", code=1)
    assert "no library has mish::CustomMish" in said and "name the library (--library" in said
    assert checksum(library) in user.checks("net.onnx", "--library", str(library)).values()


def rowwise(user: User) -> None:
    user.makes("unit", "rowwise")
    library = user.builds()
    user.tests()
    meaning = "x / (x.square().sum(-1, keepdim=True) + eps).sqrt()"
    user.writes(model=net("unit", meaning, given=", eps=0.25", attributes=", eps"))
    user.trains()
    file = exports(user, "unit::CustomUnit", library)
    assert content(user.folder / file).attributes["unit::CustomUnit"] == {"eps": 0.25}
    deploys(user, file, library, in_hurry=True)
    if user.has_time:
        answers(user, exports(user, "unit::CustomUnit", library, "float16"), library, 5e-3)


def kernel(user: User) -> None:
    user.makes("scaled", "kernel")
    library = user.builds()
    user.tests()
    user.writes(model=net("scaled", "scale * x", given=", scale=0.02", attributes=", scale"))
    user.trains()
    deploys(user, exports(user, "scaled::CustomScaled", library), library, in_hurry=True)
    if user.has_time:
        said = user.exports("half.onnx", "--dtype", "float16", code=1)
        assert "scaled::scaled" in said and "float32" in said and not (user.folder / "half.onnx").exists()


def triton(user: User) -> None:
    pytest.importorskip("triton", reason="kernels in Python need it")
    user.folder = user.folder / "square"
    user.folder.mkdir()
    user.writes(square=(ROOT / "examples/triton/square.py").read_text())
    library = user.builds()
    user.tests()
    user.writes(model=net("square", "x.square()"))
    user.trains()
    deploys(user, exports(user, "square::CustomSquare", library), library, in_hurry=True)


def stock_file(user: User) -> None:
    """A file from elsewhere, and the same with its inner matmuls in 8 bits."""
    random = np.random.default_rng(0)
    nodes, arrays = "", dict[str, np.ndarray]()
    exact = random.standard_normal((5, 64)).astype(np.float32).astype(np.float64)
    np.savez(user.folder / "inputs.npz", x0=exact.astype(np.float32))
    for i in range(4):
        layer = {"w": random.standard_normal((64, 64)) / 8, "b": random.standard_normal(64)}
        layer |= {"scale": 1 + random.random(64), "shift": random.standard_normal(64)}
        layer = {name: each.astype(np.float32) for name, each in layer.items()}
        arrays |= {f"{name}{i}": each for name, each in layer.items()}
        nodes += f"""m{i} = MatMul (x{i}, w{i}) a{i} = Add (m{i}, b{i}) s{i} = Add (a{i}, x{i})
            x{i + 1} = LayerNormalization (s{i}, scale{i}, shift{i}) """
        total = exact + exact @ layer["w"] + layer["b"]
        centred = total - total.mean(-1, keepdims=True)
        exact = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5)
        exact = exact * layer["scale"] + layer["shift"]
    np.savez(user.folder / "exact.npz", exact)
    stock = f"stock (float[N, 64] x0) => (float[N, 64] x4) {{ {nodes} }}"
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {stock}')
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    onnx.save(proto, user.folder / "stock.onnx")
    files = ["net.onnx"], ["half.onnx", "--dtype", "float16"]
    for file, *options in files[: 1 + user.has_time]:
        said = user.twinop("optimize", "stock.onnx", "-o", file, "--device", "cuda", *options)
        assert "libcustom_ops.so" in said and "same outputs" in said
        found = content(user.folder / file)
        assert found.nodes == 4 * [LINEAR, "custom_domain::CustomAddLayerNorm"]
        assert found.bodies == set(found.nodes)
    deploys(user, "net.onnx", in_hurry=True)
    if user.has_time:
        answers(user, "half.onnx", accepted=5e-3)
    options = ["--dtype", "float8", "--rows", "0", "--device", "cuda", "--inputs", "inputs.npz"]
    said = user.twinop("optimize", "stock.onnx", "-o", "float8.onnx", *options)
    assert "close, not the same" in said and "in 8 bits: 2 matmuls" in said
    counts = Counter(content(user.folder / "float8.onnx").nodes)
    assert counts[f"{LINEAR}Fp8"] == counts[LINEAR] == counts["custom_domain::CustomAddLayerNormFp8"] == 2
    answers(user, "float8.onnx", accepted=0.1)


OF_THE_MASK = {"Cast", "Where", "Unsqueeze", "Expand"}
BERT = """
from pathlib import Path

import torch
from transformers import BertConfig, BertModel


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sizes = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128)
        no_dropout = dict(hidden_dropout_prob=0, attention_probs_dropout_prob=0)
        config = BertConfig(vocab_size=50, max_position_embeddings=32, **sizes, **no_dropout)
        self.bert = BertModel(config, add_pooling_layer=False)
        if Path("weights.pt").exists():
            self.load_state_dict(torch.load("weights.pt"))

    def forward(self, input_ids, attention_mask):
        return self.bert(input_ids, attention_mask=attention_mask).last_hidden_state

    def example_inputs(self):
        mask = torch.ones(2, 12, dtype=torch.int64)
        mask[1, 7:] = 0
        return torch.arange(24).view(2, 12) % 50, mask


def twin():
    return Net().double()
"""


def transformers_model(user: User) -> None:
    user.writes(model=BERT)
    user.trains()
    assert "libcustom_ops.so" in user.exports()
    found = content(user.folder / "net.onnx")
    assert Counter(each for each in found.nodes if "::" in each) == {
        "custom_domain::CustomEmbedLayerNorm": 1,
        LINEAR: 4,  # q, k and v are one
        "com.microsoft::MultiHeadAttention": 1,
        "custom_domain::CustomAddLayerNorm": 2,
    }
    assert set(found.nodes) <= {*found.bodies, "com.microsoft::MultiHeadAttention", *OF_THE_MASK, "Split"}
    deploys(user, "net.onnx", accepted=1e-4, in_hurry=True)
    if user.has_time:
        user.exports("half.onnx", "--dtype", "float16")
        answers(user, "half.onnx", accepted=1e-2)


def genai_folder(user: User) -> None:
    """What onnxruntime-genai's builder writes is optimised, and genai generates the same with it."""
    build("Llama", folder=user.folder)
    said = user.twinop("pack", "--genai", "genai", "-o", "gpu")
    assert "libcustom_ops.so" in said and "same outputs" in said
    found = content(user.folder / "gpu/model.onnx")
    wanted = {LINEAR: 7, f"{LINEAR}Swiglu": 2, "com.microsoft::GroupQueryAttention": 2}
    wanted |= {"custom_domain::CustomRmsNorm": 1, "custom_domain::CustomAddRmsNorm": 4}
    assert Counter(each for each in found.nodes if "::" in each) == wanted
    assert {path.name for path in (user.folder / "gpu").iterdir()} == {
        "genai_config.json", "libcustom_ops.so", "model.onnx", "tokenizer.json", "tokenizer_config.json",
        "twinop-pack.json",
        "twinop-report.json",
    }  # fmt: skip
    folders = ["gpu"]
    if user.has_time:
        build("Llama", "fp16", "cuda", folder=user.folder / "half")
        assert "norms in matmuls" in user.twinop("pack", "--genai", "half/genai", "-o", "half/gpu")
        found = content(user.folder / "half/gpu/model.onnx")
        own = Counter(each.partition("::Custom")[2] for each in found.nodes if "::" in each)
        wanted = {"AttentionCached": 2, "LastPosition": 1, "Linear": 7, "LinearSwiglu": 2, "AddRmsNorm": 1}
        assert own == wanted  # the last norm, before a product of the table of tokens, stays
        user.twinop("optimize", "genai", "-o", "cpu", "--device", "cpu")
        folders.append("cpu")
    genai = Genai()
    try:
        tokens, expected = genai(user.folder / "genai")
        library = user.folder / "gpu/libcustom_ops.so"
        aside = library.rename(user.folder / "aside.so")
        with pytest.raises(RuntimeError, match="libcustom_ops.so"):
            genai(user.folder / "gpu")
        aside.rename(library)
        for folder in folders:
            generated, logits = genai(user.folder / folder)
            assert generated == tokens
            assert_close([logits], [expected], 1e-5)
    finally:
        genai.process.kill()


each_way = pytest.mark.parametrize(
    "way",
    [
        *(elementwise, triton, stock_file, genai_folder),
        *(pytest.param(way, marks=pytest.mark.slow) for way in (rowwise, kernel, transformers_model)),
    ],
    ids=lambda way: way.__name__,
)


@each_way
def test_way(way: Way, tmp_path: Path) -> None:
    way(User(tmp_path))


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh environment, with the wheel of what ./build.sh has built."""
    if not (ROOT / "build/libcustom_ops.so").exists():
        pytest.skip("./build.sh has not run")
    folder = tmp_path_factory.mktemp("environment")
    wheels = ["wheel", "--no-index", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run([sys.executable, "-m", "pip", "-q", *map(str, wheels)], check=True)
    [wheel] = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    index = ROOT / ".venv/twinop/index"  # torch's, that .venv was made with
    options = ["--extra-index-url", url] if index.exists() and (url := index.read_text().strip()) else []
    for pins in ("base", "cpu"):
        options += ["-c", str(ROOT / f"requirements/{pins}.txt")]
    packages = [f"twinop[build,serve,test,triton] @ {wheel.as_uri()}", "torch", "onnxruntime", "transformers"]
    subprocess.run([folder / "venv/bin/pip", "-q", "install", *options, *packages], check=True)
    return folder / "venv/bin"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@each_way
def test_way_with_the_wheel(way: Way, environment: Path, tmp_path: Path) -> None:
    """In a fresh environment, with all that this machine has: where nvcc is on the PATH, it builds, too."""
    way(User(tmp_path, environment, has_time=True))
