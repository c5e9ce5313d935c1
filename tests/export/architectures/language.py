"""transformers' encoders, decoders and what takes sound or text and images."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from architectures.common import VOCABULARY, Architecture, Tensors, image, tokens

LENGTH = {0: "batch", 1: "length"}
BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA = BERT | {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip


def hugging(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    """A class of transformers with a configuration of these sizes."""

    def make() -> nn.Module:
        found = getattr(importlib.import_module("transformers"), kind)
        return found(found.config_class(**sizes))

    return make


def encoder(name: str, kind: str, **sizes: Any) -> Architecture:
    return Architecture(name, hugging(kind, **sizes), tokens, LENGTH, library="transformers")


def decoder(name: str, kind: str, **sizes: Any) -> Architecture:
    """Without its cache of keys and values, which is not a tensor."""
    return Architecture(name, hugging(kind, **sizes, use_cache=False), tokens, LENGTH, library="transformers")


def pixels(name: str, kind: str, **sizes: Any) -> Architecture:
    return Architecture(name, hugging(kind, **sizes), image(32, "pixel_values"), library="transformers")


def translation(batch: int, length: int) -> Tensors:
    return tokens(batch, length) | {"decoder_input_ids": torch.randint(3, VOCABULARY, (batch, length))}


def pairs(batch: int, length: int) -> Tensors:
    """Ids, pixels and mask in the order of CLIP's forward: as many texts as images."""
    text = tokens(batch, 7)
    text["pixel_values"] = torch.randn(batch, 3, 32, 32)
    return {name: text[name] for name in ("input_ids", "pixel_values", "attention_mask")}


def spectra(batch: int, length: int) -> Tensors:
    return {"input_features": torch.randn(batch, 16, 32)}


T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
}  # fmt: skip
WHISPER = BART | {
    "num_mel_bins": 16, "max_source_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip


def whisper_encoder() -> nn.Module:
    model: Any = hugging("WhisperModel", **WHISPER)()
    return model.get_encoder()


CLIP_TEXT = BERT | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

MODELS = (
    encoder("bert", "BertModel", **BERT),
    encoder("distilbert", "DistilBertModel", vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4,
            hidden_dim=64, max_position_embeddings=64),
    encoder("roberta", "RobertaModel", **BERT),
    encoder("electra", "ElectraModel", embedding_size=16, **BERT),
    encoder("albert", "AlbertModel", embedding_size=16, **BERT),
    encoder("mpnet", "MPNetModel", **BERT),
    encoder("deberta_v2", "DebertaV2Model", relative_attention=True, pos_att_type=["p2c", "c2p"], **BERT),
    encoder("modernbert", "ModernBertModel", **BERT, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            cls_token_id=1, sep_token_id=2),
    decoder("gpt2", "GPT2LMHeadModel", vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4,
            bos_token_id=1, eos_token_id=2),
    decoder("gpt_neox", "GPTNeoXForCausalLM", **BERT),
    decoder("opt", "OPTForCausalLM", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, ffn_dim=64,
            num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=32),
    decoder("llama", "LlamaForCausalLM", **LLAMA),
    decoder("mistral", "MistralForCausalLM", **LLAMA, sliding_window=16),
    decoder("mixtral", "MixtralForCausalLM", **LLAMA, num_local_experts=4,
            experts_implementation="batched_mm"),  # the default is an operator that no exporter knows
    decoder("granite", "GraniteForCausalLM", **LLAMA),
    decoder("qwen2", "Qwen2ForCausalLM", **LLAMA),
    decoder("qwen3", "Qwen3ForCausalLM", **LLAMA, head_dim=8),
    decoder("gemma", "GemmaForCausalLM", **LLAMA, head_dim=8),
    decoder("gemma2", "Gemma2ForCausalLM", **LLAMA, head_dim=8),
    decoder("gemma3", "Gemma3ForCausalLM", **LLAMA, head_dim=8),
    decoder("phi3", "Phi3ForCausalLM", **LLAMA),
    Architecture("t5_encoder", hugging("T5EncoderModel", **T5), tokens, LENGTH, library="transformers"),
    Architecture("t5", hugging("T5ForConditionalGeneration", **T5), translation, LENGTH, {"use_cache": False},
                 library="transformers"),
    Architecture("bart", hugging("BartModel", **BART), translation, LENGTH, {"use_cache": False},
                 library="transformers"),
    Architecture("whisper_encoder", whisper_encoder, spectra,
                 library="transformers"),
    Architecture("clip", hugging("CLIPModel", projection_dim=16, text_config=CLIP_TEXT, vision_config=VISION),
                 pairs, library="transformers"),
    pixels("vit", "ViTModel", **VISION),
    pixels("dinov2", "Dinov2Model", **VISION),
    pixels("swin", "SwinModel", image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
           window_size=4),
    pixels("convnext", "ConvNextModel", hidden_sizes=[16, 32], depths=[2, 2], num_stages=2),
    pixels("segformer", "SegformerModel", hidden_sizes=[16, 32], depths=[1, 1], num_attention_heads=[2, 4],
           num_encoder_blocks=2, sr_ratios=[2, 1], patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2]),
)  # fmt: skip
