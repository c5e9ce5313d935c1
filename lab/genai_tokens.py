"""Whether a decoder has the best tokens of another one in onnxruntime-genai, on the CPU.

    python lab/genai_tokens.py ORIGINAL NEW

Both get the tokens of the original. It exits with 1 where the best one differs although the original's two
best logits lie apart by more than the two models' difference.
"""

import json
import sys
import time
from collections.abc import Sequence

import numpy as np
import onnxruntime_genai as og  # type: ignore[import-not-found]

PROMPT, NEW = [1, 17, 400, 23, 499, 8, 77, 5], 32


def logits(folder: str, given: Sequence[int] = ()) -> tuple[list[np.ndarray], list[int], float]:
    """Returns the logits of each step, the tokens that were fed, and the seconds of a step."""
    config = og.Config(folder)
    config.clear_providers()
    parameters = og.GeneratorParams(model := og.Model(config))
    parameters.set_search_options(max_length=len(PROMPT) + NEW + 1, do_sample=False)
    generator = og.Generator(model, parameters)
    generator.append_tokens(np.array([PROMPT], np.int32))
    rows, tokens = list[np.ndarray](), list[int]()
    start = time.perf_counter()
    for step in range(NEW):
        rows.append(np.array(generator.get_logits(), np.float32).reshape(-1))
        tokens.append(given[step] if given else int(rows[-1].argmax()))
        generator.append_tokens(np.array([tokens[-1:]], np.int32))
    return rows, tokens, (time.perf_counter() - start) / NEW


def main() -> None:
    old, tokens, before = logits(sys.argv[1])
    new, _, after = logits(sys.argv[2], tokens)
    errors = [float(np.abs(a - b).max()) for a, b in zip(old, new, strict=True)]
    gaps = [float(np.diff(np.sort(row)[-2:])[0]) for row in old]
    differ = [step for step, (a, b) in enumerate(zip(old, new, strict=True)) if a.argmax() != b.argmax()]
    found = {"error": max(errors), "differing": {step: gaps[step] for step in differ}}
    print(json.dumps(found | {"s": {"original": before, "new": after}}))
    sys.exit(any(gaps[step] > 2 * errors[step] for step in differ))


if __name__ == "__main__":
    main()
