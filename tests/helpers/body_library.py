"""Builds libraries whose ops have function bodies in place of CPU kernels."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from abi_files import build_c

from twinop.aot_kernels.generate import TEXTS
from twinop.model.attach import OPSETS
from twinop.model.bodies import find_body
from twinop.model.calls import make_call
from twinop.model.record_body import model_of, trace
from twinop.model.schema import onnx_value
from twinop.record.op_schema import default_of
from twinop.record.op_spec import OpSpec

# What a body's function compares; kernels/abi.h has these numbers.
DTYPES = {"float32": 1, "float16": 2, "bfloat16": 3, "float64": 4, "int64": 8}

HEADERS = ("string", "twinop/library.h", "twinop/record/registry.h")
SOURCE = """
namespace twinop {
struct Model { const char* dtypes; const unsigned char* model; std::size_t size; };

/* The model of a call is found by its inputs' dtypes, ' ' for an absent one. */
template <std::size_t kCount>
std::string_view Find(const Model (&models)[kCount], const Call& call) {
  std::string dtypes;
  for (std::size_t i = 0; i < call.input_count; ++i) {
    const Tensor& input = call.inputs[i];
    if (input.data != nullptr || input.sizes != nullptr) throw "data where there is none";
    dtypes += input.present ? static_cast<char>('a' + static_cast<int>(input.dtype)) : ' ';
  }
  for (const Model& each : models)
    if (dtypes == each.dtypes) return {reinterpret_cast<const char*>(each.model), each.size};
  throw "no body for these inputs";
}
"""


@dataclass(frozen=True)
class BodyOp:
    """An op: a model for each combination of dtypes and present inputs."""

    record: OpSpec
    models: Mapping[str, bytes]


def body_op(record: OpSpec, presences: Sequence[Sequence[str]] | None = None, **attributes: str) -> BodyOp:
    """Makes the models of a registered body for all dtypes and for some patterns of optional inputs."""
    body, models = find_body(record.key), {}
    assert body is not None
    values = {
        entry.name: onnx_value(entry, attributes[entry.name])
        if entry.name in attributes
        else default_of(entry)
        for entry in record.attributes
    }
    for present in presences or [[entry.name for entry in record.inputs]]:
        for dtypes in record.combinations:
            key = "".join(
                chr(ord("a") + DTYPES[dtypes[entry.name]]) if entry.name in present else " "
                for entry in record.inputs
            )
            call = make_call(record, dtypes, present, values)
            models[key] = model_of(trace(body, [call], OPSETS[0]), call)
    return BodyOp(record, models)


def body_library(folder: Path, ops: Sequence[BodyOp]) -> Path:
    """Builds lib<domain>.so in a folder."""
    first, lines = ops[0].record, [SOURCE]
    for op in ops:
        name, record, body = op.record.name, op.record, ""
        for i, model in enumerate(op.models.values()):
            lines.append(f"constexpr unsigned char {name}_{i}[] = {{{','.join(map(str, model))}}};")
        if op.models:
            entries = [f'{{"{key}", {name}_{i}, sizeof({name}_{i})}}' for i, key in enumerate(op.models)]
            lines.append(f"constexpr Model {name}_models[] = {{{', '.join(entries)}}};")
            lines.append(f"auto {name}_body(const Call& call) {{ return Find({name}_models, call); }}")
            body = f".body<{name}_body>()"
        texts = "".join(f".{name}({json.dumps(text)})" for name in TEXTS if (text := record.texts.get(name)))
        refuse = 'return Status::Error("this test has no kernel");'
        lines += [
            f"namespace {name}_op {{",
            f"template <bool> Status LaunchOnCuda(const twinop_call*) {{ {refuse} }}",
            "}",
            f"TWINOP_CUDA_OP({name}, Record({json.dumps(record.schema)}){texts}"
            + f"{'.elementwise()' * record.is_elementwise}{body}, )",
        ]
    lines.append(f"}}\nTWINOP_LIBRARY({json.dumps(first.domain)}, {first.domain_version})\n")
    source = folder / f"{first.domain}.cpp"
    source.write_text("\n".join(lines))
    versions = ("VERSION", "0.1.0"), ("CUDA_ARCHS", "none"), ("CUDA_VERSION", "")
    macros = [f'-DTWINOP_{name}="{value}"' for name, value in versions]
    return build_c(source, folder / f"lib{first.domain}.so", "-DTWINOP_WITH_CUDA", *macros, headers=HEADERS)
