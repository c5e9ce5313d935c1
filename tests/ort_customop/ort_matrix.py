"""Runs prepared cases on the onnxruntime of this environment: `python ort_matrix.py <folder>`.

The folder holds cases.json, models and arrays, made by test_ort_versions.py. Needs onnxruntime and numpy
only, and answers one JSON line a case: its name, and what was wrong (or null).
"""

import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort


def same_bits(actual, expected):
    same_kind = actual.dtype == expected.dtype and actual.shape == expected.shape
    return same_kind and actual.tobytes() == expected.tobytes()


def same_values(actual, expected):
    """For values that ORT's own Cast has carried: a NaN may lose its payload."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    nan = np.isnan(expected)
    if (np.isnan(actual) != nan).any():
        return False
    return same_bits(np.where(nan, 0, actual), np.where(nan, 0, expected))


def run(case, folder, arrays):
    options = ort.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # there are many sessions
    options.log_severity_level = 4
    for name, value in case.get("options", {}).items():
        setattr(options, name, value)
    options.execution_mode = getattr(ort.ExecutionMode, case.get("execution_mode", "ORT_SEQUENTIAL"))
    options.register_custom_ops_library(case["library"])
    session = ort.InferenceSession(str(folder / case["model"]), options, providers=["CPUExecutionProvider"])
    same = same_values if case.get("cast") else same_bits
    for feeds, expected in case["runs"]:
        inputs = {name: arrays[key] for name, key in feeds.items()}
        names = [output.name for output in session.get_outputs()]
        results = dict(zip(names, session.run(None, inputs), strict=True))
        for name, key in expected.items():
            if not same(results[name], arrays[key]):
                return f"{name}{results[name].shape} of {inputs}: {results[name]} instead of {arrays[key]}"
        if "in_place" in case:  # what two probes report: [read at, wrote at, tag, mark]
            before, after = results["before"], results["after"]
            if (before[1] == after[0]) != case["in_place"]:
                return f"in place: {before[1] == after[0]} instead of {case['in_place']}: {before}, {after}"
    return grown(session, inputs) if case.get("repeat") else None


def grown(session, inputs):
    """Runs that lose memory: 200 calls, each of which takes 800 KB of scratch."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

    for count in (20, 200):
        before = resident()
        for _ in range(count):
            session.run(None, inputs)
    growth = resident() - before
    return None if growth < 40 else f"200 runs grew the process by {growth:.0f} MB"


def run_case(case, folder, arrays):
    """Null, or what was wrong."""
    try:
        wrong = run(case, folder, arrays)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if "error" in case:
            return None if re.search(case["error"], text, re.DOTALL) else f"another error: {text}"
        return text
    return f"no error, expected {case['error']}" if "error" in case else wrong


def main(folder):
    made, memory = json.loads((folder / "cases.json").read_text()), (folder / "arrays").read_bytes()
    arrays = dict[str, np.ndarray]()
    for key, (dtype, shape, place) in made["arrays"].items():
        arrays[key] = np.frombuffer(memory, dtype, math.prod(shape), place).reshape(shape)
    print(json.dumps({"onnxruntime": ort.__version__}), flush=True)
    for case in made["cases"]:
        print(json.dumps({"case": case["name"]}), flush=True)  # which one it was if the process dies
        print(json.dumps({"case": case["name"], "wrong": run_case(case, folder, arrays)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
