"""Generates with onnxruntime-genai, two folders in turn: `decoder_tokens.py` runs it in a process of its own.

It needs neither torch nor ONNX Runtime's Python. It prints the microseconds of a step of each folder.
"""

import json
import sys
import time

import numpy as np
import onnxruntime_genai as og  # type: ignore[import-not-found]

REPEATS, WARM = 5, 3


def microseconds(model: "og.Model", batch: int, prompt: int, new: int) -> float:
    """Returns the time of a step, its search included, after a prompt and the steps that capture a graph."""
    parameters = og.GeneratorParams(model)
    length = prompt + WARM + new
    parameters.set_search_options(max_length=length, min_length=length, do_sample=False, batch_size=batch)
    generator = og.Generator(model, parameters)
    tokens = np.random.default_rng(0).integers(3, 500, (batch, prompt))
    generator.append_tokens(tokens.astype(np.int32))
    for _ in range(WARM):
        generator.generate_next_token()
    start = time.perf_counter()
    for _ in range(new):
        generator.generate_next_token()
    generator.get_next_tokens()  # waits for the last one
    return (time.perf_counter() - start) / new * 1e6


def main() -> None:
    batch, prompt, new = map(int, sys.argv[1:4])
    models = {folder: og.Model(folder) for folder in sys.argv[4:]}
    found: dict[str, list[float]] = {folder: [] for folder in models}
    for repeat in range(REPEATS + 1):
        for folder, model in models.items():
            us = microseconds(model, batch, prompt, new)
            found[folder] += [us] if repeat else []
    print(json.dumps(found))


if __name__ == "__main__":
    main()
