"""The model that is optimised, in the forms that the steps of `optimizer.py` need."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

import twinop
from twinop import deploy
from twinop.errors import ExportError, option
from twinop.libraries.library import Library, find_library, read_library
from twinop.model.attach import attach_to_calls
from twinop.model.calls import find_calls, paths_in_use
from twinop.model.files import check_target
from twinop.model.folding import restore_defaults
from twinop.model.weights import narrow
from twinop.record.dtypes import dtype_name
from twinop.record.op_spec import DOMAIN, OpSpec
from twinop.system.quiet import quiet

from . import (
    branches,
    cached_attention,
    decoders,
    invariance,
    passes,
    precision,
    unfuse_ort,
)
from . import graph as g
from .load import FILES, Held, load, make_constant, separate_names
from .prepare import inline_functions, main_dtype
from .report import OptimizeReport
from .sliced import Runnable, runnable
from .symbolic_shapes import infer_types
from .user_ops import UserOps, find_user_ops
from .widen import convert_to_fp32

DEVICES = ("cuda", "cpu")
FLOAT8 = "float8"


@dataclass(frozen=True)
class Options:
    """What `optimize` is asked for."""

    dtype: str | None  # "float16", "bfloat16" or "float8", also of inputs and outputs; None: as in the file
    device: str  # "cuda" or "cpu"; the result runs on both
    padding: str | None  # "right" promises that masks hide nothing but the end of each sequence
    shared_caches: bool  # promises that past and present share memory, which has rows for the whole context
    invariant: bool  # a prompt's logits on CUDA do not depend on its batch; the report names nodes that may
    inputs_file: Any  # an .npz file of inputs for the comparison; by default they are generated
    without: Sequence[str]  # names of rewrites to leave out
    allow_uncompared: bool  # keep the file although an output is empty or NaN for all inputs; it is reported
    drop_slow: bool  # measure here, and revert slower rewrites: a file may have other bytes elsewhere
    library: deploy.Libraries  # of custom ops; others are found as `deploy.session` finds them
    allow_model_libraries: bool  # whether to load libraries, which can run any code, from the model's folder
    kept: Iterable[OpSpec]  # ops whose nodes stay although no library may have them
    held: Held  # weights by name that are in memory, and that the file only names
    rows: int = 2048  # for float8: those that matmuls get; what 8 bits make slower stays in 16. 0 takes all
    max_error: float = 0.25  # for float8, of an output: matmuls go back to 16 bits until it is kept

    def __post_init__(self) -> None:
        """Raises ExportError for values that no model can be optimised with."""
        dtype, padding = self.dtype, self.padding
        if dtype not in (None, "float32", *precision.DTYPES, FLOAT8):
            raise ExportError(
                f"{option('dtype', dtype)}: expected one of: float32, {', '.join(precision.DTYPES)}, {FLOAT8}"
            )
        if self.rows < 0 or not self.max_error > 0:
            raise ExportError(
                f"{option('rows', self.rows)}, {option('max_error', self.max_error)}: expected a number of "
                "rows, 0 or more, and an error above 0"
            )
        enough = f"it measures 16 bits; {option('rows')} says enough"
        reasons = {
            option("device", "cpu"): self.device == "cpu" and "CPUs have no matmuls in 8 bits",
            option("invariant", True): self.invariant and "sums in 8 bits have no fixed order",
            option("drop_slow", True): self.drop_slow and enough,
        }
        for given, reason in reasons.items():
            if dtype == FLOAT8 and reason:
                raise ExportError(f"{given}: not with {option('dtype', dtype)}: {reason}. Leave one out")
        names = [each.name for each in passes.PASSES]
        if unknown := [name for name in self.without if name not in names]:
            raise ExportError(
                f"{option('without', ', '.join(unknown))}: expected some of: {', '.join(names)}"
            )
        if padding not in (None, "right"):
            raise ExportError(
                f"{option('padding', padding)}: expected right, or no {option('padding')} for masks of any "
                "form"
            )


@dataclass(frozen=True)
class Form:
    """A form of the model, or of a part of it, that ONNX Runtime can load, and the dtypes of its inputs."""

    what: Runnable
    dtypes: Mapping[str, ir.DataType]


@dataclass
class Source:
    """A model, and what its forms are made with."""

    path: Path
    options: Options
    records: Mapping[str, OpSpec]
    report: OptimizeReport
    loaded: ir.Model  # as the file has it, with functions inlined, in the file's dtypes
    original: ir.Model  # the same in fp32
    base: ir.Model  # the same in fp32, prepared (`prepare.py`): what the rewrites get a copy of
    user_ops: UserOps  # the user's own ops, and the libraries of all runs
    interface: Mapping[str, ir.DataType]  # of inputs and outputs that do not get the report's dtype, by name
    is_changed: bool  # `loaded` is not what the file computes on CUDA (`decoders.py`)
    is_fp32: bool  # the file is in fp32, so it is its own fp32 form
    is_unconverted: bool  # the result has the dtypes of the file
    defaults: Mapping[str, ir.TensorProtocol] = field(default_factory=dict)  # `take_defaults`, meanwhile
    registered: Sequence[Library] = ()  # the libraries of the last run of a rewritten form

    @property
    def dtype(self) -> ir.DataType:
        """The dtype of most nodes of the result."""
        return precision.DTYPES.get(self.report.dtype, ir.DataType.FLOAT)

    def libraries_of(self, model: ir.Model) -> list[Path]:
        """Returns the libraries that a result needs, also those that lack CPU kernels."""
        return paths_in_use(model, [*self.registered, *map(read_library, self.user_ops.libraries)])

    @property
    def runs_as_file(self) -> bool:
        """Whether the CPU can run the file itself, as far as its dtypes allow."""
        return not self.is_changed and not self.options.held

    @property
    def converts(self) -> bool:
        """Whether the result, its inputs or outputs are not in fp32."""
        return {self.dtype, *self.interface.values()} != {ir.DataType.FLOAT}

    def form(self, model: ir.Model) -> "Form":
        """Returns a form of the model, or a part of one (`segments.extract`), as it runs: with function
        bodies, in place."""
        return form_of(self.finished(model))

    def finished(self, model: ir.Model) -> ir.Model:
        """Makes of a form of the model what ONNX Runtime loads, in place: function bodies are attached."""
        branches.move_back(model)
        NameFixPass()(model)  # a cloned graph does not know which names are taken
        calls = find_calls(model, self.records)
        attach_to_calls(model, calls, allow_missing=True)
        with quiet():
            infer_types(model)
        model.metadata_props["twinop.version"] = twinop.__version__
        model.metadata_props.update({record.metadata_key: record.schema_hash for record in calls})
        kinds = {str(value.name): value.dtype for value in model.graph.inputs}
        defaults = {name: tensor for name, tensor in self.defaults.items() if name in kinds}
        for name, tensor in defaults.items():
            if (kind := kinds[name]) is not None and kind is not tensor.dtype:
                defaults[name] = ir.tensor(narrow(tensor.numpy(), kind), dtype=kind, name=name)
        restore_defaults(model.graph, defaults)
        return self.user_ops.attach(model)

    def convert(self, model: ir.Model) -> tuple[list[ir.Node], list[str]]:
        """Converts a form in fp32 to the result's dtypes, in place; see `precision.convert`."""
        if not self.converts:
            return [], []
        keeps_fp32 = self.options.dtype is None  # no dtype was asked for
        return precision.convert(model, self.dtype, self.interface, self.user_ops, keeps_fp32)


def form_of(model: ir.Model) -> Form:
    """Returns a model that has its function bodies, or a part of it, as it runs."""
    dtypes = {str(value.name): value.dtype for value in model.graph.inputs if value.dtype is not None}
    return Form(runnable(model), dtypes)


def read_source(path: Path, target: Path, options: Options) -> Source:
    """Reads a model and makes its form in fp32; the weights stay in their files. ExportError: it cannot be
    read, `target` is one of its files, or an option does not fit it."""
    model = load(path, options.held)
    data: set[Path] = model.meta[FILES]
    check_target(target, {path, *data})
    user_ops = find_user_ops(model, path, options.library, options.kept, options.allow_model_libraries)
    records = dict(read_library(find_library("custom_ops")).records)
    report = OptimizeReport(path, target, device=options.device)
    report.nodes_before = len([*model.graph.all_nodes()])
    report.bytes_before = sum(each.stat().st_size for each in {path, *data})
    if constants := make_constant(model):
        report.notes.append(f"IR version 3: its {constants} initializers are constants, as in ONNX Runtime")
    report.notes += inline_functions(model, records, user_ops)
    separate_names(model)
    branches.move_out(model)
    model.graph.meta[cached_attention.SHARED_CACHES] = options.shared_caches
    model.graph.meta[invariance.INVARIANT] = options.invariant
    main = main_dtype(model)
    _require_no_8_bits(path, model, options.dtype == FLOAT8)
    asked, keeps_interface = options.dtype, options.dtype is None
    if asked == FLOAT8:
        keeps_interface = main in precision.DTYPES.values()
        asked = dtype_name(main) if main in precision.DTYPES.values() else "float16"
    unfuse_ort.split_activations(model)
    unfuse_ort.split_simplified_norms(model)
    is_changed = decoders.make_runnable(model) > 0
    report.dtype = asked or dtype_name(main)
    _check_dtypes(dtype_name(main), options, report.dtype)
    values, converted = (*model.graph.inputs, *model.graph.outputs), {*precision.DTYPES.values()}
    converted.add(ir.DataType.FLOAT)
    interface = {str(each.name): each.dtype for each in values if each.dtype in converted}
    decoders.set_sizes(model)
    loaded = model.clone()
    narrow_types = convert_to_fp32(model, main, asked is not None)
    user_ops.convert_to_fp32(model, report.dtype, report.dtype != dtype_name(main))
    found = {dtype_name(main), *map(dtype_name, (*narrow_types, *interface.values()))}
    return Source(
        path,
        options,
        records,
        report,
        loaded,
        original=model,
        base=model.clone(),
        user_ops=user_ops,
        interface=interface if keeps_interface else {},
        is_changed=is_changed,
        is_fp32=not narrow_types,
        is_unconverted=not options.invariant and (asked is None or found == {asked}),
    )


def _require_no_8_bits(path: Path, model: ir.Model, asked: bool) -> None:
    """Raises ExportError if matmuls are in 8 bits by twinop or, if that is asked for, by others."""
    nodes = [*model.graph.all_nodes()]
    ours = [node.op_type for node in nodes if node.domain == DOMAIN]
    ours = [each for each in ours if each.endswith(("Fp8", "W8", "W8Swiglu"))]
    kinds = [value.dtype for graph in model.graphs() for value in graph.initializers.values()]
    kinds += [ir.DataType(g.attribute(node, "output_dtype", 0)) for node in nodes]
    others = [kind.name for kind in kinds if kind is not None and kind.name.startswith("FLOAT8")]
    if found := ours or (others if asked else []):
        raise ExportError(
            f"{path}: is in 8 bits already, it has {found[0]}. Give the file in 16 or 32 bits that it was "
            "made of" + ("" if ours else f", or leave out {option('dtype', FLOAT8)}")
        )


def _check_dtypes(own: str, options: Options, dtype: str) -> None:
    if options.invariant and (options.device != "cuda" or dtype not in precision.DTYPES):
        raise ExportError(
            f"{option('invariant', True)}: needs cuda and float16 or bfloat16, not {options.device} and "
            f"{dtype}"
        )
    if options.invariant and options.drop_slow:
        raise ExportError(
            f"{option('drop_slow', True)}: {option('invariant', True)} keeps slow rewrites. Leave one out"
        )
    if own == "float64" != dtype:
        raise ExportError(
            f"{option('dtype', options.dtype)}: the model is in float64, which stays. Leave out "
            f"{option('dtype')}, or export the model in float32"
        )
