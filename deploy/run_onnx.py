"""The command `twinop run`, also `python deploy/run_onnx.py`: runs a model on random inputs."""

import importlib.util
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

if __name__ == "__main__":  # as a script: import from the root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

    from twinop.script import require

    require("onnx", "onnxruntime", "typer")

import numpy as np
import onnx
import typer
from onnx.external_data_helper import ExternalDataInfo, uses_external_data
from rich.table import Column, Table
from rich.text import Text

from twinop.cli.console import Timeout, out, print_note, program
from twinop.deploy.create_session import PROVIDERS, session
from twinop.deploy.custom_nodes import custom_nodes, is_custom
from twinop.deploy.errors import FeedError, RunError
from twinop.deploy.inference_session import NodeRun, Session
from twinop.deploy.node_parity import Comparison, compare, observed
from twinop.deploy.ort_process import SERVER, time_limit
from twinop.deploy.tensor_specs import named_sizes
from twinop.errors import TwinopWarning
from twinop.libraries.library import Library, in_use
from twinop.record.dimensions import sizes_of
from twinop.record.dtypes import to_tensor

_MANY = 40  # in larger models built-in nodes are counted instead of listed
_DYNAMIC_SIZE = 4
_OTHER_SIZES = [
    (batch, length, step) for batch, length in ((3, 7), (1, 13), (2, 64), (1, 224)) for step in (2, 0)
]
"""To try: of the batch, of the first length, and by how much the length of the next name is larger."""


def main(
    model: Annotated[Path, typer.Argument(help="The .onnx file.")],
    provider: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option(help="auto: CUDA where it works. cuda: CUDA or an error."),
    ] = "auto",
    library: Annotated[
        list[Path] | None,
        typer.Option(
            help="A custom-op library, once for each domain. Default: what twinop build put into build/, "
            "installed packages, twinop's own."
        ),
    ] = None,
    allow_model_libraries: Annotated[
        bool,
        typer.Option(
            "--allow-model-libraries",
            help="Also load libraries, which can run any code, from the model's folder.",
        ),
    ] = False,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="Sizes of an input, such as x=2,3. Default: dynamic sizes are 4, or others that fit."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of the random inputs.")] = 0,
    timeout: Timeout = 600,
) -> None:
    """Run an exported model on random inputs.

    Registers the custom-op libraries that the model needs, runs it, and lists
    its nodes with the execution provider that ran each (from ONNX Runtime's
    profile). Where torch is installed, compares each custom node bit for bit
    with the torch op on the same input. Exits with 1 if anything fails or
    differs.

    Examples:

        twinop run custom_relu.onnx

        twinop run custom_relu.onnx --shape x=8,1024
    """
    with time_limit(timeout):
        same = _run(model, provider, library or None, allow_model_libraries, shape or [], seed)
    if not same:
        raise typer.Exit(1)


def _run(path: Path, provider: str, *given: Any) -> bool:
    libraries, where, feeds, outputs, ran, refused = SERVER.run(_open_and_run, path, provider, *given)
    model = observed(onnx.load(path, "protobuf", load_external_data=False))
    used = in_use(libraries, {node.node_type for node in custom_nodes(model)})
    texts = [f"{each.path} (twinop {each.version}, GPU code: {each.cuda_archs})" for each in used]
    text = f"registered {', '.join(texts)}" if texts else "runs without a custom-op library"
    out.print(f"{path}: {text}")
    for unused in libraries:
        if unused not in used:
            print_note(f"--library {unused.path}: no node of the model uses it ({unused.domain})")
    out.print(f"runs on {where}")
    if refused:
        print_note(f"dynamic sizes of {_DYNAMIC_SIZE} do not fit ({refused}): the model ran with other sizes")
    out.print(_node_table(model, ran))
    for name, value in outputs.items():
        out.print(f"output {name}: {_described(value)}", markup=False, soft_wrap=True)
    if importlib.util.find_spec("torch") is None:
        out.print("torch is not installed: nothing to compare with")
        return True
    if any(array.dtype.kind == "O" for array in feeds.values()):
        out.print("not compared with torch, which has no strings")
        return True
    comparisons = _compare_with_torch(used, model, feeds, provider, path.parent)
    out.print(_parity_table(comparisons, ran))
    compared = {each.node for each in comparisons}
    inner = [node.label for node in custom_nodes(model) if node.proto.name not in compared]
    if where := ", ".join(inner):
        out.print(f"not compared, since not in the main graph: {where}")
    return all(each.equal is not False for each in comparisons)


def _open_and_run(
    path: Path, provider: str, library: list[Path] | None, allow: bool, shapes: list[str], seed: int
) -> Iterator[Any]:
    """Yields libraries, device, inputs, outputs, the nodes' runs, and why sizes are others."""
    opened = session(path, PROVIDERS[provider], library, profile=True, allow_model_libraries=allow)
    yield opened.libraries
    yield f"{opened.device} ({opened.reason})"
    feeds, refused = _random_feeds(opened, _parse_shapes(shapes, opened), seed), ""
    try:
        outputs = opened.run(feeds)
    except (RunError, FeedError) as error:
        found = None if shapes else _fitting(opened, seed)
        if found is None:
            raise
        feeds, outputs, refused = *found, str(error)
    yield feeds
    yield outputs
    yield opened.executed_on(custom_only=False)
    yield refused


def _fitting(opened: Session, seed: int) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Returns inputs of other sizes that the model takes, and its outputs; None if none were found."""
    axes = dict[str, int]()
    for spec in opened.inputs.values():
        for axis, dim in enumerate(spec.shape or ()):
            axes.setdefault(dim, axis) if isinstance(dim, str) else None
    for batch, length, step in _OTHER_SIZES:
        feeds = _random_feeds(opened, {}, seed, sizes_of(axes, batch, length, step, {}))
        with suppress(RunError, FeedError):
            return feeds, opened.run(feeds)
    return None


def _described(value: Any) -> str:
    """Returns the type of an output: of a tensor, or of the first part of a sequence or a map."""
    if isinstance(value, np.ndarray):
        return f"{'str' if value.dtype.kind == 'O' else value.dtype}{list(value.shape)}"
    if isinstance(value, list | dict) and value:
        [first, *_] = value.values() if isinstance(value, dict) else value
        return f"{type(value).__name__} of {len(value)} ({_described(first)}, ...)"
    return "none" if value is None else type(value).__name__


def _compare_with_torch(
    libraries: list[Library], model: onnx.ModelProto, feeds: dict[str, Any], provider: str, folder: Path
) -> list[Comparison]:
    from twinop import torch_op

    for library in libraries:
        torch_op.load(library.path)
    if not any(map(is_custom, model.graph.node)):
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TwinopWarning)  # the first session's were shown
        watched = session(
            model, PROVIDERS[provider], [each.path for each in libraries] or False, folder=folder
        )
    tensors = {name: to_tensor(array).to(watched.device) for name, array in feeds.items()}
    records = {record.node_type: record for each in libraries for record in each.by_onnx_name.values()}
    wanted = {name for node in filter(is_custom, model.graph.node) for name in (*node.input, *node.output)}
    outputs = watched.run(tensors, [name for name in watched.outputs if name in wanted])
    device = watched.device
    del watched  # and its packed weights
    return compare(model, _Values(outputs, model, folder, device), records)


class _Values(dict[str, Any]):
    """The outputs of a run, and initializers, which are read when they are asked for and are not kept."""

    def __init__(self, outputs: Mapping[str, Any], model: onnx.ModelProto, folder: Path, device: str) -> None:
        super().__init__(outputs)
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._folder, self._device = folder, device

    def __missing__(self, name: str) -> Any:
        tensor = self._constants[name]
        if uses_external_data(tensor):  # onnx refuses files with links, which ONNX Runtime takes
            place = ExternalDataInfo(tensor)
            with (self._folder / place.location).open("rb") as file:
                file.seek(place.offset or 0)
                data = file.read(place.length or -1)
            tensor = onnx.TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=data)
        array = onnx.numpy_helper.to_array(tensor)
        return to_tensor(np.array(array)).to(self._device)  # a copy: torch wants memory that it may write


def _parse_shapes(texts: list[str], opened: Session) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for text in texts:
        name, _, sizes = text.partition("=")
        try:
            shapes[name] = tuple(int(size) for size in sizes.split(",") if size)
        except ValueError:
            raise FeedError(f"--shape {text}: expected NAME=SIZE,SIZE such as x=2,3") from None
        if name not in opened.inputs:
            raise FeedError(
                f"--shape {text}: the model has no input {name!r}; it has: {', '.join(opened.inputs)}"
            )
        if any(size < 0 for size in shapes[name]):
            raise FeedError(f"--shape {text}: a size is negative")
    return shapes


def _random_feeds(
    opened: Session, shapes: dict[str, tuple[int, ...]], seed: int, known: Mapping[str, int] | None = None
) -> dict[str, np.ndarray]:
    """Draws the inputs. Dynamic dimensions of one name get one size, which may be known."""
    random = np.random.default_rng(seed)
    sizes = {**named_sizes(opened.inputs, shapes), **(known or {})}
    feeds = {}
    for spec in opened.inputs.values():
        if spec.name not in shapes and spec not in opened.required:
            continue
        if spec.numpy_dtype is None:
            raise FeedError(f"input {spec.name} is {spec.type}: there are random inputs for tensors only")
        shape = shapes.get(spec.name, spec.sized(sizes, _DYNAMIC_SIZE))
        if shape is None:
            raise FeedError(
                f"input {spec.name} has no declared rank: give its sizes with --shape {spec.name}=2,3"
            )
        feeds[spec.name] = spec.random(shape, random)
    return feeds


def _node_table(proto: onnx.ModelProto, ran: list[NodeRun]) -> Table:
    opsets = ", ".join(f"{opset.domain or 'ai.onnx'} {opset.version}" for opset in proto.opset_import)
    table = _table(f"Nodes ({opsets})", "node", "op", "domain", "ran on")
    ran_on = _providers(ran)
    nodes = list(proto.graph.node)
    if len(nodes) > _MANY:
        counts = Counter((node.domain, node.op_type) for node in nodes if not is_custom(node))
        for (domain, op), count in sorted(counts.items()):
            table.add_row(f"({count} nodes)", op, domain or "ai.onnx", "")
        nodes = [node for node in nodes if is_custom(node)]
    for index, node in enumerate(nodes):
        name = node.name or f"{node.op_type}_{index}"
        table.add_row(
            name, node.op_type, node.domain or "ai.onnx", ran_on.pop(name, "- (fused, folded or inlined)")
        )
    domains = {node.proto.op_type: node.proto.domain for node in custom_nodes(proto)}
    for run in ran:  # the rest is in subgraphs and functions
        if run.node in ran_on and run.op_type in domains:
            table.add_row(run.node, run.op_type, domains[run.op_type], ran_on[run.node])
    return table


def _parity_table(comparisons: list[Comparison], ran: list[NodeRun]) -> Table:
    ran_on = _providers(ran)
    table = _table("Custom nodes against torch", "node", "output", "tensor", "ran on", "same bits as torch")
    for each in comparisons:
        differs = Text.assemble(("NO", "red"), f", {each.detail}")
        verdict = {True: Text("yes", "green"), False: differs, None: Text(f"- ({each.detail})")}
        row = (each.node, each.output, each.tensor, ran_on.get(each.node, "-"), verdict[each.equal])
        table.add_row(*row)
    return table


def _table(title: str, *names: str) -> Table:
    return Table(*(Column(name, overflow="fold") for name in names), title=title, title_justify="left")


def _providers(ran: list[NodeRun]) -> dict[str, str]:
    """Returns the provider by node, in short: "CUDA" for "CUDAExecutionProvider"."""
    return {run.node: run.provider.removesuffix("ExecutionProvider") for run in ran}


if __name__ == "__main__":
    from twinop.deploy import run_onnx  # another process finds its functions under that name

    program(run_onnx.main)()
