"""What is known to be slower than ONNX Runtime's own nodes: rules, with what was measured, and no clock.

Measured on two cores of an AMD EPYC, fp32, ONNX Runtime 1.31.1, one thread and two, [1 or 8, 1 to 128, 64 to
4096], each file beside its source in turns. The ratio is the time of the new file by that of the source:

    silu alone                  1.02 to 1.32   ONNX Runtime makes it one node, QuickGelu
    its product with a tensor   0.87 to 0.97   swiglu; halves of one tensor 0.56 to 0.96
    layer_norm, rms_norm        0.53 to 1.05   from 128 columns on; 1.03 to 1.36 with 64, up to 18 us
    add_layer_norm, _rms_norm   0.61 to 0.99   1.06 to 1.16 with 64 columns and 128 rows or more
    embed_layer_norm            0.52 to 1.08
    ada_layer_norm              0.41 to 0.97
    RotaryEmbedding             0.42 to 1.01
    MultiHeadAttention          0.19 to 1.03

Rewrites that are no faster on a device at all name the other one (`Rewrite.device`).
"""

_FUSES = "ONNX Runtime fuses it"
_RULES = {
    ("cpu", "gelu"): f"{_FUSES} with the bias before it",
    ("cpu", "silu"): _FUSES,
}


def why(device: str, op: str) -> str:
    """Returns why a node of an op would be slower on a device than what the file has, or ""."""
    return _RULES.get((device, op), "")
