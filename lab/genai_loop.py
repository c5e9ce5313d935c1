"""Generates with onnxruntime-genai, two folders in turn: `decoder_tokens.py` runs it in a process of its own.

It needs neither torch nor ONNX Runtime's Python. It prints the microseconds of a step of each folder, and for
which of them onnxruntime-genai uses CUDA graphs: the masks that it makes for these have rows for the longest
text, and GroupQueryAttention refuses a prompt of several sequences with them.
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


def opened(folder: str, batch: int, prompt: int) -> tuple["og.Model", bool]:
    """Returns a model and whether it uses CUDA graphs: not if it cannot take such a prompt with them."""
    model = og.Model(folder)
    try:
        microseconds(model, batch, prompt, 1)
        return model, True
    except RuntimeError as error:
        if "batch_size must be 1" not in str(error):
            raise
    del model  # the next one takes as much memory
    config = og.Config(folder)
    config.set_provider_option("cuda", "enable_cuda_graph", "0")
    return og.Model(config), False


def main() -> None:
    batch, prompt, new = map(int, sys.argv[1:4])
    both = {folder: opened(folder, batch, prompt) for folder in sys.argv[4:]}
    models = {folder: model for folder, (model, _) in both.items()}
    found: dict[str, list[float]] = {folder: [] for folder in models}
    for repeat in range(REPEATS + 1):
        for folder, model in models.items():
            us = microseconds(model, batch, prompt, new)
            found[folder] += [us] if repeat else []
    print(json.dumps({"us": found, "graphs": {folder: uses for folder, (_, uses) in both.items()}}))


if __name__ == "__main__":
    main()
