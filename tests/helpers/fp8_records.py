"""The records of the ops in 8 bits, for libraries that lack them."""

import samples

from twinop.record.op_spec import DOMAIN
from twinop.record.schema_text import record_of

_Q = "q=float8_e4m3fn scale=float32"
_W = "x=float8_e4m3fn x_scale=float32 weight=float8_e4m3fn weight_scale=float32"
_NORM = "(Tensor q, Tensor scale, Tensor y)"
_SUM = "(Tensor q, Tensor scale, Tensor y, Tensor sum)"
_ADDED = "Tensor x, Tensor residual, Tensor weight, Tensor? bias=None"
RECORDS = dict(samples.RECORDS)
for _schema in (
    "quantize_rows(Tensor x) -> (Tensor q, Tensor scale)",
    f"layer_norm_fp8(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-5) -> {_NORM}",
    f"add_layer_norm_fp8({_ADDED}, float eps=1e-5) -> {_SUM}",
    f"rms_norm_fp8(Tensor x, Tensor? weight=None, float eps=1e-6, int offset=0) -> {_NORM}",
    f"add_rms_norm_fp8({_ADDED}, float eps=1e-6, int offset=0) -> {_SUM}",
    f'gelu_fp8(Tensor x, str approximate="none") -> {_NORM}',
    f"swiglu_packed_fp8(Tensor x) -> {_NORM}",
):
    _made = record_of(
        _schema,
        DOMAIN,
        dtypes=f"float16 {_Q}; bfloat16 {_Q}",
        memory="; ".join(f"{name} = optional" for name in ("y", "sum") if f"Tensor {name}" in _schema),
    )
    RECORDS.setdefault(_made.name, _made)
RECORDS.setdefault(
    "linear_fp8",
    record_of(
        "linear_fp8(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor bias, "
        'Tensor? residual=None, str activation="none") -> Tensor',
        DOMAIN,
        dtypes=f"float16 {_W}; bfloat16 {_W}",
    ),
)
