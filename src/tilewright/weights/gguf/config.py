"""Builds the config.json of a GGUF file's model from the file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tilewright.host.files import CheckpointError
from tilewright.weights.gguf.file import GgufFile, PlacedTensor

PROJECTOR_ARCHITECTURE = "clip"  # of a file with only the tower for images


@dataclass(frozen=True)
class Architecture:
    """Class and model_type in Hugging Face's config."""

    class_name: str
    model_type: str
    seeing: tuple[str, str] | None = None  # class and model_type with a projector; None: the model sees no images
    has_experts: bool = False


# By GGUF's name. Without its tower Qwen3-VL is Qwen3: text has the same position on all three axes.
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama"),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", has_experts=True),
    "qwen3vl": Architecture("Qwen3ForCausalLM", "qwen3", ("Qwen3VLForConditionalGeneration", "qwen3_vl")),
    "qwen3vlmoe": Architecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe"), has_experts=True
    ),
}

ROPE_FREQUENCIES = "rope_freqs.weight"  # the factors of Llama 3's scaling; the config has the rule instead
# Config entries for the token ids of images: a GGUF file has only the tokens.
_MEDIA_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


class Keys:
    """The metadata of one architecture, checked when read."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file, self._prefix = file, architecture

    def get(self, key: str, kind: type, default: object = None) -> object:
        """Return the value of "<architecture>.<key>", a number; `default` if the file has none."""
        value = self._file.metadata.get(f"{self._prefix}.{key}", default)
        allowed = (int, float) if kind is float else (kind,)
        if value is not default and (isinstance(value, bool) or not isinstance(value, allowed)):
            raise CheckpointError(
                f"{self._file.mapped.path}: {self._prefix}.{key} is {value!r}, expected {kind.__name__}"
            )
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, int, default)
        if not isinstance(value, int) or not 1 <= value < 1 << 32:
            raise CheckpointError(f"{self._file.mapped.path}: {self._prefix}.{key} is {value}, expected 1 or more")
        return value

    def numbers(self, key: str, length: int) -> list[float]:
        """Return a list of `length` numbers."""
        value = self._file.metadata.get(f"{self._prefix}.{key}")
        if not isinstance(value, list) or len(value) != length or not all(type(item) in (int, float) for item in value):
            raise CheckpointError(
                f"{self._file.mapped.path}: {self._prefix}.{key} is {value!r:.60}, expected a list of {length} numbers"
            )
        return value


def known_architecture(file: GgufFile) -> tuple[str, Architecture]:
    """Return GGUF's name of a language model's architecture, and its Architecture."""
    path, name = file.mapped.path, file.metadata.get("general.architecture")
    if name == PROJECTOR_ARCHITECTURE:
        raise CheckpointError(
            f"{path} is a projector of images (mmproj) alone: name the GGUF file of its language model, which reads "
            "this one if it lies in the same folder"
        )
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(f"{path} has the architecture {name!r}; those supported are {', '.join(ARCHITECTURES)}")
    return name, ARCHITECTURES[name]


def text_config(file: GgufFile, tensors: Mapping[str, PlacedTensor]) -> dict:
    """Return the config.json of the language model. `file` has the metadata."""
    path, metadata = file.mapped.path, file.metadata
    architecture, known = known_architecture(file)
    keys = Keys(file, architecture)
    if keys.get("expert_count", int, 0) and not known.has_experts:
        supported = " and ".join(name for name, other in ARCHITECTURES.items() if other.has_experts)
        raise CheckpointError(f"{path} is a mixture of experts of {architecture}; of these {supported} are supported")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{path} has no token_embd.weight: it is not a whole language model")
    hidden_size, num_heads = keys.size("embedding_length"), keys.size("attention.head_count")
    config: dict = {
        "architectures": [known.class_name],
        "model_type": known.model_type,
        "hidden_size": hidden_size,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.size("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", num_heads),
        "head_dim": keys.size("attention.key_length", hidden_size // num_heads),
        "hidden_act": "silu",
        "rms_norm_eps": keys.get("attention.layer_norm_rms_epsilon", float, 1e-6),
        "max_position_embeddings": keys.size("context_length"),
        "rope_theta": keys.get("rope.freq_base", float, 10000.0),
        "rope_scaling": _rope_scaling(file, tensors, keys),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_tokens(metadata),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if known.has_experts:
        config |= {
            "num_experts": keys.size("expert_count"),
            "num_experts_per_tok": keys.size("expert_used_count"),
            "moe_intermediate_size": keys.size("expert_feed_forward_length"),
            "norm_topk_prob": True,  # true for all Qwen3; files do not have it
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    _check_head_rows(path, tensors, config)
    return config


def num_deepstack_layers(file: GgufFile) -> int | None:
    """Return how many feature maps beside the first a language model takes; None if its file does not say."""
    value = Keys(file, str(file.metadata["general.architecture"])).get("n_deepstack_layers", int)
    assert value is None or isinstance(value, int)
    return value


def multimodal_config(file: GgufFile, text: dict, vision: dict, preprocessing: dict) -> dict:
    """Return the config.json of a language model with a projector, from its two parts `text` and `vision`.

    `preprocessing` are the entries of preprocessor_config.json.
    """
    name, known = known_architecture(file)
    assert known.seeing is not None
    class_name, model_type = known.seeing
    *sections, rest = Keys(file, name).numbers("rope.dimension_sections", 4)
    if rest:
        raise CheckpointError(
            f"{file.mapped.path}: {name}.rope.dimension_sections has {rest} on a fourth axis, expected 0: there are "
            "only time, rows and columns"
        )
    scaling = {"rope_type": "default", **(text["rope_scaling"] or {})}
    rope = {**scaling, "mrope_section": sections, "mrope_interleaved": True}
    return {
        "architectures": [class_name],
        "model_type": model_type,
        "text_config": {**text, "rope_scaling": rope},
        "vision_config": vision,
        "preprocessor_config": preprocessing,
        "tie_word_embeddings": text["tie_word_embeddings"],
        **_media_token_ids(file),
    }


def _media_token_ids(file: GgufFile) -> dict[str, int]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    ids = {token: i for i, token in enumerate(tokens)} if isinstance(tokens, list) else {}
    missing = [token for token in _MEDIA_TOKENS.values() if token not in ids]
    if missing:
        raise CheckpointError(f"{file.mapped.path} has a projector, but its vocabulary has no {', '.join(missing)}")
    return {key: ids[token] for key, token in _MEDIA_TOKENS.items()}


def _check_head_rows(path: Path, tensors: Mapping[str, PlacedTensor], config: dict) -> None:
    """Check that reordered rows are whole heads of an even width."""
    for name, heads in (("attn_q", config["num_attention_heads"]), ("attn_k", config["num_key_value_heads"])):
        for stored_name, tensor in tensors.items():
            if stored_name.endswith((f".{name}.weight", f".{name}.bias")) and tensor.shape[0] % (2 * heads):
                raise CheckpointError(f"{path}: {stored_name} has {tensor.shape[0]} rows for {heads} heads")


def _end_tokens(metadata: Mapping[str, object]) -> int | list[int] | None:
    ids = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    found = list(dict.fromkeys(token_id for token_id in ids if isinstance(token_id, int)))
    return found if len(found) > 1 else found[0] if found else None


def _rope_scaling(file: GgufFile, tensors: Mapping[str, PlacedTensor], keys: Keys) -> dict | None:
    kind = file.metadata.get(f"{file.metadata['general.architecture']}.rope.scaling.type", "none")
    if ROPE_FREQUENCIES in tensors:
        return _llama3_scaling(tensors[ROPE_FREQUENCIES], keys)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"{file.mapped.path} scales its positions by {kind!r}; linear, yarn and llama3 are known")
    scaling: dict = {"rope_type": kind, "factor": keys.get("rope.scaling.factor", float, 1.0)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = keys.size("rope.scaling.original_context_length")
    return scaling


def _llama3_scaling(tensor: PlacedTensor, keys: Keys) -> dict:
    """Return the rule for the file's factors: Llama 3's constants, checked against every factor."""
    factors = tensor.rows(0, tensor.shape[0]).double().flatten()
    theta = keys.get("rope.freq_base", float, 10000.0)
    assert isinstance(theta, (int, float))
    original, low, high, factor = 8192, 1.0, 4.0, float(factors.max())
    wavelengths = 2 * torch.pi * theta ** (torch.arange(len(factors), dtype=torch.float64) / len(factors))
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not torch.allclose(factors, expected, rtol=1e-3):
        raise CheckpointError(f"{tensor.file.path}: {ROPE_FREQUENCIES} follows no rule that is known (Llama 3's)")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
