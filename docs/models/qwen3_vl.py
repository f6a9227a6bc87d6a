"""Qwen3-VL in plain torch: one image and a question in, an answer out.

    python docs/models/qwen3_vl.py CHECKPOINT IMAGE "What is on it?"

This is the model as docs/models/qwen3_vl.md specifies it, written to be read: no cache, no batch, no kernel of ours.
Every token recomputes the whole sequence in fp32. A test holds the engine to its log-probabilities.

Shape suffixes: N patches of the image, M merged patches (tokens of the image), T tokens of the prompt, D model
width, H heads, K head width, V vocabulary. A weight `w` of a linear is [outputs, inputs].
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import gelu, interpolate, layer_norm, linear, silu

VISION_EPS = 1e-6
VISION_THETA = 10_000.0


@dataclass
class Checkpoint:
    """A folder: its config, its weights in fp32 by name, its tokenizer and its chat template."""

    config: dict[str, Any]
    preprocessing: dict[str, Any]
    weights: dict[str, Tensor]
    tokenizer: Tokenizer
    template: str

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        weights: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            weights |= {name: tensor.float() for name, tensor in load_file(file).items()}
        return cls(
            json.loads((folder / "config.json").read_text()),
            json.loads((folder / "preprocessor_config.json").read_text()),
            weights,
            Tokenizer.from_file(str(folder / "tokenizer.json")),
            (folder / "chat_template.jinja").read_text(),
        )

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Return x W^T + b, with the bias where the checkpoint has one."""
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def layer_norm(self, name: str, x: Tensor) -> Tensor:
        return layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], VISION_EPS)

    def rms_norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.config["text_config"]["rms_norm_eps"]
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * self.weights[f"{name}.weight"]


# The image: pixels to patches.


def fitted_size(height: int, width: int, preprocessing: dict[str, Any]) -> tuple[int, int]:
    """Return the size an image is resized to: multiples of a merged patch, within the budget of pixels."""
    factor = preprocessing["patch_size"] * preprocessing["merge_size"]
    least, most = preprocessing["size"]["shortest_edge"], preprocessing["size"]["longest_edge"]  # pixels, not edges
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > most:
        scale = math.sqrt(height * width / most)
        rows = max(factor, math.floor(height / scale / factor) * factor)
        columns = max(factor, math.floor(width / scale / factor) * factor)
    elif rows * columns < least:
        scale = math.sqrt(least / (height * width))
        rows, columns = math.ceil(height * scale / factor) * factor, math.ceil(width * scale / factor) * factor
    return rows, columns


def in_merge_order(x: Tensor, merge: int) -> Tensor:
    """Return [rows, columns, ...] as [rows * columns, ...] with the merge x merge patches of a token as neighbours."""
    rows, columns, *rest = x.shape
    x = x.reshape(rows // merge, merge, columns // merge, merge, *rest)
    return x.transpose(1, 2).reshape(rows * columns, *rest)


def read_patches(file: str | Path, preprocessing: dict[str, Any]) -> tuple[Tensor, int, int]:
    """Return the patches [N, C * frames * side * side] of an image, and how many rows and columns there are."""
    pixels = torch.from_numpy(np.asarray(Image.open(file).convert("RGB")).copy()).permute(2, 0, 1)  # [C, height, width]
    size = fitted_size(*pixels.shape[1:], preprocessing)
    if tuple(pixels.shape[1:]) != size:
        resized = interpolate(pixels[None].float(), size, mode="bicubic", antialias=True)[0]
        pixels = resized.round().clamp(0, 255)  # the images of the training were 8-bit after resizing
    mean = torch.tensor(preprocessing["image_mean"])[:, None, None]
    std = torch.tensor(preprocessing["image_std"])[:, None, None]
    normalized = (pixels.float() / 255 - mean) / std
    side, frames = preprocessing["patch_size"], preprocessing["temporal_patch_size"]
    rows, columns = size[0] // side, size[1] // side
    patches = normalized.view(3, rows, side, columns, side).permute(1, 3, 0, 2, 4)  # [rows, columns, C, side, side]
    # A still image is a clip of `frames` equal frames: the patch kernel spans them.
    patches = patches[:, :, :, None].expand(-1, -1, -1, frames, -1, -1)
    return in_merge_order(patches, preprocessing["merge_size"]).flatten(1), rows, columns


# The vision tower: patches to tokens.


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [.., K] with component i turned against component i + K/2 by the angle of frequency i."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(q_HTK: Tensor, k_HTK: Tensor, v_HTK: Tensor, *, is_causal: bool) -> Tensor:
    """Return softmax(q k^T / sqrt(K)) v; heads of q share those of k and v in equal groups of neighbours."""
    group = len(q_HTK) // len(k_HTK)
    k_HTK, v_HTK = k_HTK.repeat_interleave(group, 0), v_HTK.repeat_interleave(group, 0)
    scores = q_HTK @ k_HTK.transpose(1, 2) / math.sqrt(q_HTK.shape[-1])
    if is_causal:
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores.softmax(-1) @ v_HTK


def learned_positions(model: Checkpoint, rows: int, columns: int) -> Tensor:
    """Return the learned square table of positions resampled to the image's grid, corner on corner: [N, D]."""
    table = model.weights["model.visual.pos_embed.weight"]
    side = round(len(table) ** 0.5)
    square = table.view(1, side, side, -1).permute(0, 3, 1, 2)
    grid = interpolate(square, (rows, columns), mode="bilinear", align_corners=True)[0].permute(1, 2, 0)
    return in_merge_order(grid, model.preprocessing["merge_size"])


def vision_angles(rows: int, columns: int, head_width: int, merge: int) -> Tensor:
    """Return the angles [N, K/2]: a quarter of a head turns by the patch's row, the next quarter by its column."""
    frequencies = VISION_THETA ** -(torch.arange(head_width // 4) / (head_width // 4))
    by_row = torch.arange(rows)[:, None, None] * frequencies
    by_column = torch.arange(columns)[None, :, None] * frequencies
    angles = torch.cat([by_row.expand(rows, columns, -1), by_column.expand(rows, columns, -1)], dim=-1)
    return in_merge_order(angles, merge)


def merge_patches(model: Checkpoint, name: str, x_ND: Tensor, *, norm_merged: bool) -> Tensor:
    """Return tokens [M, text width] of neighbouring patches; the last merger norms patches, the others merged ones."""
    merged_width = x_ND.shape[1] * model.preprocessing["merge_size"] ** 2
    if norm_merged:
        x_MD = model.layer_norm(f"{name}.norm", x_ND.view(-1, merged_width))
    else:
        x_MD = model.layer_norm(f"{name}.norm", x_ND).view(-1, merged_width)
    return model.linear(f"{name}.linear_fc2", gelu(model.linear(f"{name}.linear_fc1", x_MD)))


def see(model: Checkpoint, patches: Tensor, rows: int, columns: int) -> tuple[Tensor, list[Tensor]]:
    """Return the image's tokens [M, D], and those of each deepstack layer, which the text layers add."""
    config = model.config["vision_config"]
    heads = config["num_heads"]
    kernel = model.weights["model.visual.patch_embed.proj.weight"].flatten(1)
    x_ND = linear(patches, kernel, model.weights["model.visual.patch_embed.proj.bias"])
    x_ND = x_ND + learned_positions(model, rows, columns)
    angles = vision_angles(rows, columns, config["hidden_size"] // heads, model.preprocessing["merge_size"])
    cos, sin = angles.cos(), angles.sin()
    deepstack: dict[int, Tensor] = {}
    for i in range(config["depth"]):
        block = f"model.visual.blocks.{i}"
        qkv = model.linear(f"{block}.attn.qkv", model.layer_norm(f"{block}.norm1", x_ND))
        q, k, v = qkv.view(len(x_ND), 3, heads, -1).permute(1, 2, 0, 3)  # each [H, N, K]
        attended = attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=False)
        x_ND = x_ND + model.linear(f"{block}.attn.proj", attended.transpose(0, 1).flatten(1))
        inner = gelu(
            model.linear(f"{block}.mlp.linear_fc1", model.layer_norm(f"{block}.norm2", x_ND)), approximate="tanh"
        )
        x_ND = x_ND + model.linear(f"{block}.mlp.linear_fc2", inner)
        if i in config["deepstack_visual_indexes"]:
            merger = config["deepstack_visual_indexes"].index(i)  # mergers are numbered by the config's list
            deepstack[i] = merge_patches(model, f"model.visual.deepstack_merger_list.{merger}", x_ND, norm_merged=True)
    tokens = merge_patches(model, "model.visual.merger", x_ND, norm_merged=False)
    return tokens, [deepstack[i] for i in sorted(deepstack)]


# The prompt: messages to ids and positions.


def prompt_ids(model: Checkpoint, question: str, num_image_tokens: int) -> list[int]:
    """Return the ids of a chat with one image, its placeholder repeated once for each of its tokens."""
    content = [{"type": "image"}, {"type": "text", "text": question}]
    template = jinja2.Environment().from_string(model.template)
    text = template.render(messages=[{"role": "user", "content": content}], add_generation_prompt=True)
    placeholder = model.config["image_token_id"]
    ids: list[int] = []
    for token in model.tokenizer.encode(text, add_special_tokens=False).ids:
        ids += [token] * (num_image_tokens if token == placeholder else 1)
    return ids


def positions_of(ids: list[int], placeholder: int, rows: int, columns: int) -> Tensor:
    """Return positions [3, T] on the axes time, row and column; `rows` and `columns` are those of merged patches.

    Text counts up on all three axes. The image stays at one time and runs over its rows and columns; the text behind
    it goes on after the longer of the two.
    """
    columns_of_prompt: list[tuple[int, int, int]] = []
    next_position, image_at = 0, 0
    for token in ids:
        if token != placeholder:
            columns_of_prompt.append((next_position,) * 3)
            next_position += 1
            continue
        row, column = divmod(image_at, columns)
        columns_of_prompt.append((next_position, next_position + row, next_position + column))
        image_at += 1
        if image_at == rows * columns:
            next_position += max(rows, columns)
    return torch.tensor(columns_of_prompt).T


# The decoder: tokens to logits.


def text_angles(config: dict[str, Any], positions_3T: Tensor) -> Tensor:
    """Return the angles [T, K/2]: each frequency turns by one of the three positions, as mrope_section says."""
    half = config["head_dim"] // 2
    _, num_rows, num_columns = config["rope_scaling"]["mrope_section"]
    axis = torch.zeros(half, dtype=torch.long)
    axis[1 : 3 * num_rows : 3] = 1
    axis[2 : 3 * num_columns : 3] = 2
    frequencies = config["rope_theta"] ** -(torch.arange(half) / half)
    return positions_3T[axis].T * frequencies


def read(model: Checkpoint, ids: list[int], positions_3T: Tensor, tokens: Tensor, deepstack: list[Tensor]) -> Tensor:
    """Return the logits [V] of the token after the last."""
    config = model.config["text_config"]
    head_width = config["head_dim"]
    embeddings = model.weights["model.language_model.embed_tokens.weight"]
    x_TD = embeddings[torch.tensor(ids)]
    is_image = torch.tensor(ids) == model.config["image_token_id"]
    x_TD[is_image] = tokens
    angles = text_angles(config, positions_3T)
    cos, sin = angles.cos(), angles.sin()
    for i in range(config["num_hidden_layers"]):
        layer = f"model.language_model.layers.{i}"
        normed = model.rms_norm(f"{layer}.input_layernorm", x_TD)
        q, k, v = (
            model.linear(f"{layer}.self_attn.{part}_proj", normed).view(len(ids), -1, head_width).transpose(0, 1)
            for part in "qkv"
        )
        q = rotated(model.rms_norm(f"{layer}.self_attn.q_norm", q), cos, sin)  # norms of each head come before rope
        k = rotated(model.rms_norm(f"{layer}.self_attn.k_norm", k), cos, sin)
        attended = attention(q, k, v, is_causal=True)
        x_TD = x_TD + model.linear(f"{layer}.self_attn.o_proj", attended.transpose(0, 1).flatten(1))
        normed = model.rms_norm(f"{layer}.post_attention_layernorm", x_TD)
        gate, up = model.linear(f"{layer}.mlp.gate_proj", normed), model.linear(f"{layer}.mlp.up_proj", normed)
        x_TD = x_TD + model.linear(f"{layer}.mlp.down_proj", silu(gate) * up)
        if i < len(deepstack):  # the first deepstack features go to the first layer's output, and so on
            x_TD[is_image] += deepstack[i]
    head = model.weights.get("lm_head.weight", embeddings)  # tied where the checkpoint has none
    return linear(model.rms_norm("model.language_model.norm", x_TD[-1]), head)


@torch.inference_mode()
def answer(model: Checkpoint, image: str | Path, question: str, max_tokens: int) -> tuple[list[int], list[float]]:
    """Return the ids of the likeliest answer, token by token, and their log-probabilities."""
    patches, rows, columns = read_patches(image, model.preprocessing)
    merge = model.preprocessing["merge_size"]
    tokens, deepstack = see(model, patches, rows, columns)
    ids = prompt_ids(model, question, len(tokens))
    end = model.config["text_config"]["eos_token_id"]
    num_prompt_ids, log_probs = len(ids), []
    while len(ids) < num_prompt_ids + max_tokens:
        positions = positions_of(ids, model.config["image_token_id"], rows // merge, columns // merge)
        scores = read(model, ids, positions, tokens, deepstack).log_softmax(-1)
        ids.append(int(scores.argmax()))
        log_probs.append(float(scores.max()))
        if ids[-1] in (end if isinstance(end, list) else [end]):
            break
    return ids[num_prompt_ids:], log_probs


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    checkpoint = Checkpoint.open(Path(sys.argv[1]))
    answer_ids, _ = answer(checkpoint, sys.argv[2], sys.argv[3], max_tokens=100)
    print(checkpoint.tokenizer.decode(answer_ids))
