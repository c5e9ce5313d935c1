"""Performance reports: tables, plots and recorded results (`bench/results/`).

    python -m twinop.bench relu             # ReLU's bandwidth beside torch's, ONNX Runtime's and a copy's
    python -m twinop.bench node-overhead    # what a custom node costs beside a built-in one

Each report measures everything that it compares in one process, in turn: only such numbers can be compared.
"""

if __name__ != "twinop.bench":
    raise ImportError(
        f"import twinop.bench, not {__name__}: put the repository root on PYTHONPATH, no folder inside it"
    )
