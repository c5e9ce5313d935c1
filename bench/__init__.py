"""Performance reports: tables, plots and recorded results (`bench/results/`).

    twinop bench                  # every op beside its peers and a plain copy; see --help
    twinop bench compare OLD NEW  # list what became slower
    twinop bench draw REPORT      # draw the plots of a recorded report, such as one op's page
    twinop bench linear           # products with what is fused with them, beside torch's and ONNX Runtime's
    twinop bench models           # whole models: torch, ONNX Runtime and its optimizer, and twinop's
    twinop bench architectures    # stock exports of many architectures, before and after twinop optimize
    twinop bench node-overhead    # the cost of a custom node and of a built-in one
    twinop bench first-call LIB   # the first call of an op in a fresh process
    twinop bench packed-weight    # what packing a constant weight once per session gains
    twinop bench footprint        # the size of the libraries and the time of the build
    twinop bench serve            # the inference service beside plain servers
    twinop bench soak             # the inference service under load while versions change

A report measures everything that it compares in one process, in turn, because only such numbers are
comparable. `bench/peers/__init__.py` lists the ops and their peers.
"""

if __name__ != "twinop.bench":
    raise ImportError(
        f"import twinop.bench, not {__name__}: put the repository root on PYTHONPATH, not a folder inside it"
    )
