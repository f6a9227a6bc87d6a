"""A Qwen3-VL of transformers as people publish it in GGUF: a language model and a projector, named and laid out as
llama.cpp's converter does, by the format's own library and its tables of names."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import MODEL_TENSOR, TENSOR_NAMES, quants
from gguf import GGMLQuantizationType as Type

MEDIA_TOKENS = {
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}
DEEPSTACK = {"norm": MODEL_TENSOR.V_DS_NORM, "linear_fc1": MODEL_TENSOR.V_DS_FC1, "linear_fc2": MODEL_TENSOR.V_DS_FC2}
Extra = Callable[[gguf.GGUFWriter], None]


def write_text(network: torch.nn.Module, path: Path, kind: Type = Type.F32, extra: Extra = lambda writer: None) -> Path:
    """The file of the language model."""
    config, text = network.config, network.config.text_config
    has_experts = "moe" in config.model_type
    writer = gguf.GGUFWriter(path, "qwen3vlmoe" if has_experts else "qwen3vl")
    writer.add_context_length(text.max_position_embeddings)
    writer.add_embedding_length(text.hidden_size)
    writer.add_block_count(text.num_hidden_layers)
    writer.add_feed_forward_length(text.intermediate_size)
    writer.add_head_count(text.num_attention_heads)
    writer.add_head_count_kv(text.num_key_value_heads)
    writer.add_key_length(text.head_dim)
    writer.add_layer_norm_rms_eps(text.rms_norm_eps)
    writer.add_rope_freq_base(text.rope_parameters["rope_theta"])
    writer.add_rope_dimension_sections([*text.rope_parameters["mrope_section"], 0])
    writer.add_num_deepstack_layers(len(config.vision_config.deepstack_visual_indexes))
    if has_experts:
        writer.add_expert_count(text.num_experts)
        writer.add_expert_used_count(text.num_experts_per_tok)
        writer.add_expert_feed_forward_length(text.moe_intermediate_size)
    _add_vocabulary(writer, config)
    extra(writer)
    architecture = gguf.MODEL_ARCH.QWEN3VLMOE if has_experts else gguf.MODEL_ARCH.QWEN3VL
    table = gguf.get_tensor_name_map(architecture, text.num_hidden_layers)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, tensor in network.state_dict().items():
        if name.startswith("model.visual.") or name in tied:
            continue
        for own_name, part in _without_stacks(name.replace("model.language_model.", "model."), tensor.numpy()).items():
            is_kept = part.ndim == 1 or own_name.endswith("mlp.gate.weight")
            _add(
                writer, table.get_name(own_name, try_suffixes=(".weight", ".bias")), part, Type.F32 if is_kept else kind
            )
    return _finish(writer, path)


def _without_stacks(name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """Experts' gate and up are apart in the format."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(tensor, 2, axis=1)
        stem = name.removesuffix("gate_up_proj")
        return {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
    return {f"{name}.weight" if name.endswith("experts.down_proj") else name: tensor}


def _add_vocabulary(writer: gguf.GGUFWriter, config) -> None:
    """A token for every byte, or for some of them where there is no room; those of images as the config has them."""
    from tokenizers import pre_tokenizers

    tokens = [f"[PAD{i}]" for i in range(config.text_config.vocab_size)]
    types = [gguf.TokenType.UNUSED] * len(tokens)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # The format asks for a merge: of two characters that no test writes.
    normal = [*alphabet, "".join(alphabet[-2:])] if len(tokens) > 256 else alphabet[:200]
    places = [*range(len(alphabet)), len(tokens) - 1]
    for index, token in zip(places, normal, strict=False):
        tokens[index], types[index] = token, gguf.TokenType.NORMAL
    for name, token in MEDIA_TOKENS.items():
        index = getattr(config, f"{name}_token_id")
        tokens[index], types[index] = token, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(alphabet[-2:])])
    writer.add_add_bos_token(False)


def write_projector(
    network: torch.nn.Module,
    path: Path,
    kind: Type = Type.F32,
    extra: Extra = lambda writer: None,
    without: tuple[str, ...] = (),
) -> Path:
    """The file of the vision tower; `without` the tensors of these names."""
    config, vision = network.config, network.config.vision_config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.MMPROJ])
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(config.text_config.hidden_size)
    writer.add_vision_image_size(int(vision.num_position_embeddings**0.5 * vision.patch_size))
    writer.add_vision_patch_size(vision.patch_size)
    writer.add_vision_embedding_length(vision.hidden_size)
    writer.add_vision_feed_forward_length(vision.intermediate_size)
    writer.add_vision_block_count(vision.depth)
    writer.add_vision_head_count(vision.num_heads)
    writer.add_vision_image_mean([0.5, 0.5, 0.5])
    writer.add_vision_image_std([0.5, 0.5, 0.5])
    writer.add_clip_projector_type(gguf.VisionProjectorType.QWEN3VL)
    writer.add_vision_use_gelu(True)
    writer.add_vision_spatial_merge_size(vision.spatial_merge_size)
    writer.add_vision_attention_layernorm_eps(config.text_config.rms_norm_eps)
    layers = vision.deepstack_visual_indexes
    writer.add_vision_is_deepstack_layers([layer in layers for layer in range(vision.depth)])
    extra(writer)
    for name, tensor in network.state_dict().items():
        if name.startswith("model.visual."):
            for own_name, part in _projector_tensors(name.removeprefix("model."), tensor.numpy(), vision).items():
                if own_name not in without:
                    _add(writer, own_name, part, kind)
    return _finish(writer, path)


def _projector_tensors(name: str, tensor: np.ndarray, vision) -> dict[str, np.ndarray]:
    _, module, *rest = name.split(".")
    if name == "visual.patch_embed.proj.weight":
        stem = TENSOR_NAMES[MODEL_TENSOR.V_ENC_EMBD_PATCH]
        return {f"{stem}.weight": tensor[:, :, 0], f"{stem}.weight.1": tensor[:, :, 1]}
    if module == "deepstack_merger_list":
        number, part, end = rest
        layer = vision.deepstack_visual_indexes[int(number)]
        return {f"{TENSOR_NAMES[DEEPSTACK[part]].format(bid=layer)}.{end}": tensor}
    if module == "merger":
        part, end = rest
        stem = TENSOR_NAMES[MODEL_TENSOR.V_POST_NORM]
        if part != "norm":
            stem = TENSOR_NAMES[MODEL_TENSOR.V_MMPROJ].format(bid={"linear_fc1": 0, "linear_fc2": 2}[part])
        return {f"{stem}.{end}": tensor}
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision.depth)
    return {table.get_name(name, try_suffixes=(".weight", ".bias")): tensor}


def stored_kind(name: str, tensor: np.ndarray, kind: Type) -> Type:
    """The type that the converter gives a tensor in a file of this kind."""
    if tensor.ndim == 1 or "position_embd" in name:
        return Type.F32
    if "patch_embd" in name:
        return Type.F16 if kind == Type.F16 else Type.F32
    block_elements, _ = gguf.GGML_QUANT_SIZES[kind]
    return Type.F16 if tensor.shape[-1] % block_elements else kind


def _add(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray, kind: Type) -> None:
    own = stored_kind(name, tensor, kind)
    writer.add_tensor(name, quants.quantize(np.ascontiguousarray(tensor), own), raw_dtype=own)


def _finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
