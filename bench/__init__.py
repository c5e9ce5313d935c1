"""Performance reports: tables, plots and recorded results (`lab/results/`).

`twinop bench --help` lists the commands; without one, it measures every op beside its peers and a plain copy.

A report measures everything that it compares in one process, in turn, because only such numbers are
comparable. `bench/peers/__init__.py` lists the ops and their peers.
"""

if __name__ != "twinop.bench":
    raise ImportError(
        f"import twinop.bench, not {__name__}: put the repository root on PYTHONPATH, not a folder inside it"
    )
