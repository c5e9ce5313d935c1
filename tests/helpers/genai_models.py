"""Small decoders as onnxruntime-genai's own builder writes them; genai and ONNX Runtime run them."""

import base64
import json
import os
import runpy
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnxruntime as ort
import torch
from wheels import unpacked

GENAI = "onnxruntime-genai==0.18.0"
_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
_SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 504, "max_position_embeddings": 256, "rope_parameters": _ROPE,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 64}
_LOCAL = {"rope_local_base_freq": 1000.0, "sliding_attention": {**_ROPE, "rope_theta": 1000.0}}
_LAYERS = ["sliding_attention", "full_attention"]
_LONG = {"type": "longrope", "rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Phi": {"num_key_value_heads": 2, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
    "Qwen3": {"head_dim": 64, "tie_word_embeddings": False},
    "Gemma2": _GEMMA,
    "Qwen2": {},
    "Phi3": {"original_max_position_embeddings": 256},
    "Gemma": {"head_dim": 64},
    "Mistral": {"head_dim": 64, "num_key_value_heads": 2},
    "SmolLM3": {"use_sliding_window": True, "sliding_window": 64, "layer_types": _LAYERS},
    "Gemma3": {  # the builder reads its rotary bases where transformers of its time had them
        **_GEMMA,
        "layer_types": _LAYERS,
        "rope_parameters": {**_ROPE, **_LOCAL, "full_attention": _ROPE},
    },
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "Phi3 long": {"original_max_position_embeddings": 32, "rope_parameters": {**_ROPE, **_LONG}},
}
"""What differs from a Llama, by the name in transformers and a form of it."""
PROMPT, STEPS = [5, 9, 11, 33, 7], 64
_PROGRAM = """
import base64, json, sys
import numpy as np, onnxruntime_genai as og

def opened(folder):
    config = og.Config(folder)
    config.clear_providers()
    return og.Model(config)

def generator(model, prompts, length):
    parameters, width = og.GeneratorParams(model), max(map(len, prompts))
    sizes = {"max_length": length, "min_length": length, "batch_size": len(prompts)}
    parameters.set_search_options(do_sample=False, **sizes)
    made = og.Generator(model, parameters)
    made.append_tokens(np.array([[2] * (width - len(each)) + each for each in prompts], np.int32))
    return made, width

def found_of(tokens, logits):
    return {"tokens": tokens, "logits": base64.b64encode(logits.tobytes()).decode()}

def answer(folder, prompt, length, tokens):
    model = opened(folder)
    free, width = generator(model, [prompt], length)
    while not free.is_done():
        free.generate_next_token()
    chosen = [int(each) for each in free.get_sequence(0)]
    given = tokens or chosen
    (forced, _), logits = generator(model, [prompt], length), []
    for token in [*given[width:-1], None]:
        logits.append(np.array(forced.get_logits(), np.float32)[0, -1])
        if token is not None:
            forced.append_tokens(np.array([[token]], np.int32))
    return found_of(chosen, np.stack(logits))

def answers(folder, prompts, length):
    (free, width), logits = generator(opened(folder), prompts, length), []
    while not free.is_done():
        logits.append(np.array(free.get_logits(), np.float32)[:, -1])
        free.generate_next_token()
    chosen = [[int(each) for each in free.get_sequence(i)[width:]] for i in range(len(prompts))]
    return found_of(chosen, np.stack(logits, 1))

for line in sys.stdin:
    try:
        given = json.loads(line)
        found = answers(*given) if len(given) == 3 else answer(*given)
    except Exception as error:
        found = {"error": str(error)}
    print(json.dumps(found), flush=True)
"""


class Genai:
    """onnxruntime-genai, in a process of its own because it loads another ONNX Runtime."""

    def __init__(self) -> None:
        env = os.environ | {"PYTHONPATH": str(unpacked(GENAI))}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([sys.executable, "-c", _PROGRAM], env=env, text=True, **pipes)

    def __call__(
        self, folder: Path, tokens: list[int] | None = None, length: int = len(PROMPT) + STEPS
    ) -> tuple[list[int], np.ndarray]:
        """Generates greedily on the CPU, which is not the provider that the folder may name.

        Returns:
            The prompt and what follows it, and the logits [STEPS, vocabulary] of the steps of these tokens,
            or of the given ones.

        Raises:
            RuntimeError: what genai raises.
        """
        chosen, logits = self._ask([str(folder), PROMPT, length, tokens])
        return chosen, logits.reshape(STEPS, -1)

    def several(self, folder: Path, prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Generates greedily from several prompts at once: those that are shorter are padded on the left.

        Returns:
            The new tokens [prompts, STEPS], and the logits [prompts, STEPS, vocabulary] that chose them.
        """
        chosen, logits = self._ask([str(folder), prompts, max(map(len, prompts)) + STEPS])
        return np.array(chosen), logits.reshape(len(prompts), STEPS, -1)

    def _ask(self, given: list[Any]) -> tuple[list[int], np.ndarray]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(given), file=self.process.stdin, flush=True)
        found = json.loads(self.process.stdout.readline())
        if "error" in found:
            raise RuntimeError(found["error"])
        logits = np.frombuffer(base64.b64decode(found["logits"]), np.float32)
        return found["tokens"], logits.astype(np.float64)


def build(family: str, precision: str = "fp32", provider: str = "cpu", *, folder: Path, **extra: Any) -> Path:
    """Returns a folder that the builder wrote: model.onnx and genai_config.json, of random weights."""
    import transformers  # not where tests are only collected

    package = unpacked(GENAI) / "onnxruntime_genai"
    stub = types.ModuleType("onnxruntime_genai")  # the builder needs the name, not the library
    kind = getattr(transformers, f"{family.split()[0]}ForCausalLM")
    torch.manual_seed(0)
    model = kind(kind.config_class(**_SIZES | FAMILIES[family])).eval()
    for name, parameter in model.named_parameters():
        is_scale = parameter.ndim == 1 and "bias" not in name and "Gemma" not in family  # there 1 is added
        std = 0.08 if parameter.ndim == 2 else 0.1
        torch.nn.init.normal_(parameter, mean=float(is_scale), std=std)
    model.save_pretrained(folder / "torch")
    _tokenizer().save_pretrained(folder / "torch")
    command = ["builder", "-i", f"{folder}/torch", "-o", f"{folder}/genai", "-c", f"{folder}/cache"]
    command += ["-p", precision, "-e", provider]
    command += ["--extra_options", *(f"{key}={value}" for key, value in extra.items())] if extra else []
    before = set(sys.modules)
    with patch.object(sys, "path", [str(package / "models"), *sys.path]), patch.object(sys, "argv", command):
        sys.modules["onnxruntime_genai"] = stub
        try:
            runpy.run_path(str(package / "models/builder.py"), run_name="__main__")
        finally:  # what it has imported of torch and transformers stays
            for name in set(sys.modules) - before:
                if str(package) in str(getattr(sys.modules[name], "__file__", "")) or name == stub.__name__:
                    del sys.modules[name]
    return folder / "genai"


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(504)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t1", eos_token="t2")


class Decoder:
    """Runs a decoder on CUDA with the buffers that genai gives it: past and present are one memory."""

    def __init__(self, folder: Path, length: int, library: Path | None = None) -> None:
        options = ort.SessionOptions()
        if library is not None:
            options.register_custom_ops_library(str(library))
        providers = ["CUDAExecutionProvider"]
        self.session, self.done = ort.InferenceSession(folder / "model.onnx", options, providers=providers), 0
        self.caches = dict[str, ort.OrtValue]()
        for value in self.session.get_inputs():
            if value.name.startswith("past"):
                size = 64 if value.shape[2] == "past_sliding_length" else length
                zeros = np.zeros((1, value.shape[1], size, 64), np.float16)
                self.caches[value.name] = ort.OrtValue.ortvalue_from_numpy(zeros, "cuda", 0)

    def __call__(self, tokens: list[int]) -> np.ndarray:
        """Returns the logits after the last of some new tokens."""
        self.done += len(tokens)
        binding = self.session.io_binding()
        binding.bind_cpu_input("input_ids", np.array([tokens]))
        binding.bind_cpu_input("attention_mask", np.ones((1, self.done), np.int64))
        for name, cache in self.caches.items():
            binding.bind_ortvalue_input(name, cache)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), cache)
        binding.bind_output("logits", "cpu")
        self.session.run_with_iobinding(binding)
        logits = binding.get_outputs()[-1].numpy()
        return np.asarray(logits[0, -1], np.float64)
