"""The speed of ops beside torch's, ONNX Runtime's and a plain copy: tables, plots, files of measurements.

Everything that is compared is measured in one process, in turn, because only such numbers are comparable.
`bench/entries.py` lists the ops. `lab/` has the maintainers' other measurements.
"""

if __name__ != "twinop.bench":
    raise ImportError(
        f"import twinop.bench, not {__name__}: put the repository root on PYTHONPATH, not a folder inside it"
    )
