"""Performance reports: tables, plots and recorded results (`bench/results/`).

    python -m twinop.bench                  # every op beside its peers and a plain copy; --help says more
    python -m twinop.bench merge A B        # parts of such a report, put together
    python -m twinop.bench compare OLD NEW  # what became slower
    python -m twinop.bench encoder          # a transformer in ONNX Runtime, with twinop's nodes and without
    python -m twinop.bench matmul           # the teaching kernel beside cuBLAS
    python -m twinop.bench relu             # the variants of ReLU's kernel
    python -m twinop.bench node-overhead    # what a custom node costs beside a built-in one

Each report measures everything that it compares in one process, in turn: only such numbers can be compared.
Which op has which peers stands in one table, `bench/peers/__init__.py`.
"""

if __name__ != "twinop.bench":
    raise ImportError(
        f"import twinop.bench, not {__name__}: put the repository root on PYTHONPATH, no folder inside it"
    )
