"""Small decoders as onnxruntime-genai's own builder writes them, and steps of them in ONNX Runtime."""

import runpy
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnxruntime as ort
import torch
import transformers
from wheels import unpacked

GENAI = "onnxruntime-genai==0.18.0"
_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
_SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 504, "max_position_embeddings": 256, "rope_parameters": _ROPE,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Phi": {"num_key_value_heads": 2, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
    "Qwen3": {"head_dim": 64, "tie_word_embeddings": False},
    "Gemma2": _GEMMA,
    "Qwen2": {},
    "Phi3": {"original_max_position_embeddings": 256},
    "Gemma": {"head_dim": 64},
    "Mistral": {"head_dim": 64},
    "SmolLM3": {},
}
"""What differs from a Llama, by the name in transformers."""


def build(family: str, folder: Path, precision: str = "fp32", provider: str = "cpu", **extra: int) -> Path:
    """Returns a folder that the builder wrote: model.onnx and genai_config.json, of random weights."""
    package = unpacked(GENAI) / "onnxruntime_genai"
    stub = types.ModuleType("onnxruntime_genai")  # the builder needs the name, not the library
    config = getattr(transformers, f"{family}Config")(**_SIZES | FAMILIES[family])
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        std = 0.08 if parameter.ndim == 2 else 0.1
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.ndim == 2 or "bias" in name else 1.0, std=std)
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


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(504)}, unk_token="t0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t1", eos_token="t2")


class Decoder:
    """Runs a decoder with the buffers that genai gives it: past and present are one memory."""

    def __init__(self, folder: Path, length: int, library: Path | None = None, provider: str = "CPU") -> None:
        options = ort.SessionOptions()
        if library is not None:
            options.register_custom_ops_library(str(library))
        providers = [f"{provider}ExecutionProvider"]
        self.session = ort.InferenceSession(folder / "model.onnx", options, providers=providers)
        self.device, self.done = ("cpu" if provider == "CPU" else "cuda"), 0
        self.caches = dict[str, ort.OrtValue]()
        for value in self.session.get_inputs():
            if value.name.startswith("past"):
                size = 64 if value.shape[2] == "past_sliding_length" else length
                dtype = np.float16 if "float16" in value.type else np.float32
                zeros = np.zeros((1, value.shape[1], size, 64), dtype)
                self.caches[value.name] = ort.OrtValue.ortvalue_from_numpy(zeros, self.device, 0)

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
