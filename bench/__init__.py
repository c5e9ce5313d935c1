"""The speed of ops beside their peers and a plain copy: tables, plots, files of measurements.

Everything that is compared is measured in one process, in turn, because only such numbers are comparable.
`bench/peers/__init__.py` lists the ops and their peers. `lab/` has the maintainers' other measurements.
"""

if __name__ != "twinop.bench":
    raise ImportError(
        f"import twinop.bench, not {__name__}: put the repository root on PYTHONPATH, not a folder inside it"
    )
