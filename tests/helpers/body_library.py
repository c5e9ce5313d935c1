"""Builds libraries, from C, whose ops have function bodies in place of CPU kernels."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from abi_files import build_c
from abi_structures import TEXTS

from twinop.model.attach import OPSETS
from twinop.model.bodies import find_body
from twinop.model.body_model import model_of
from twinop.model.calls import make_call
from twinop.model.record_body import trace
from twinop.model.schema import onnx_value
from twinop.record.op_schema import default_of
from twinop.record.op_spec import OpSpec

# What a body's function compares; kernels/abi.h has these numbers.
DTYPES = {"float32": 1, "float16": 2, "bfloat16": 3, "float64": 4, "int64": 8}

SOURCE = """
#include <string.h>
#include "twinop/abi.h"

typedef struct { const char* dtypes; const void* model; size_t size; } Model;

static int32_t Fail(twinop_error* error, const char* text) {
  error->set(error, text, strlen(text));
  return 1;
}
static int32_t OnCuda(const twinop_call* call, twinop_error* error) {
  (void)call;
  return Fail(error, "this test has no kernel");
}
/* The model of a call is found by its inputs' dtypes, ' ' for an absent one. */
static int32_t Find(const Model* models, const twinop_call* call, const void** model, size_t* size,
                    twinop_error* error) {
  char dtypes[16] = {0};
  for (size_t i = 0; i < call->input_count; ++i) {
    if (call->inputs[i].data != NULL || call->inputs[i].sizes != NULL)
      return Fail(error, "data where there is none");
    dtypes[i] = (char)(call->inputs[i].present ? 'a' + call->inputs[i].dtype : ' ');
  }
  for (; models->dtypes != NULL; ++models) {
    if (strcmp(models->dtypes, dtypes) != 0) continue;
    *model = models->model;
    *size = models->size;
    return 0;
  }
  return Fail(error, "no body for these inputs");
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
    first = ops[0].record
    lines, sections = [SOURCE], [json.dumps(_library_fields(first))]
    for op in ops:
        name, record = op.record.name, op.record
        for i, model in enumerate(op.models.values()):
            lines.append(f"static const unsigned char {name}_{i}[] = {{{','.join(map(str, model))}}};")
        entries = [f'{{"{key}", {name}_{i}, sizeof({name}_{i})}},' for i, key in enumerate(op.models)]
        lines.append(f"static const Model {name}_models[] = {{{' '.join(entries)} {{NULL, NULL, 0}}}};")
        lines.append(
            f"static int32_t {name}_body(const twinop_call* call, const void** model, size_t* size,"
            f" twinop_error* error) {{ return Find({name}_models, call, model, size, error); }}"
        )
        texts = ", ".join(json.dumps(getattr(record, text)) for text in TEXTS)
        functions = f'NULL, OnCuda, NULL, NULL, NULL, {name}_body, 0, "", 0'
        lines.append(f"static const twinop_op {name}_op = {{sizeof(twinop_op), {texts}, {functions}}};")
        fields = {
            key: value for key, value in asdict(record).items() if not key.startswith(("domain", "torch"))
        }
        attributes = [
            {key.removesuffix("_text"): value for key, value in entry.items() if value is not None}
            for entry in fields["attributes"]
        ]
        sections.append(json.dumps(fields | {"attributes": attributes, "devices": ["cuda"]}))
    table = ", ".join(f"&{op.record.name}_op" for op in ops)
    lines.append(f"static const twinop_op* const ops[] = {{{table}}};")
    lines.append(
        f'static const twinop_table table = {{1, sizeof(twinop_table), "0.1.0", {json.dumps(first.domain)},'
        f' {first.domain_version}, "none", {len(ops)}, ops}};'
    )
    lines.append("const twinop_table* twinop_library(uint32_t wanted) { (void)wanted; return &table; }")
    for i, text in enumerate(sections):
        place = f'__attribute__((section(".twinop"), used)) static const char text_{i}[]'
        lines.append(f"{place} = {json.dumps(text)};")
    source = folder / f"{first.domain}.c"
    source.write_text("\n".join(lines))
    return build_c(source, folder / f"lib{first.domain}.so", "-Wno-overlength-strings")


def _library_fields(record: OpSpec) -> dict[str, object]:
    return {
        "twinop": "0.1.0",
        "abi": 1,
        "domain": record.domain,
        "domain_version": record.domain_version,
        "cuda_archs": "none",
        "cuda_version": "",
    }
