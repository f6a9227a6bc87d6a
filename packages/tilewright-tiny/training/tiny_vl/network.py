"""Qwen3-VL for training: the same computation and parameter names as the released models', on batches of one shape.

Images of a batch have one size, so attention needs no lengths; questions about one image lie behind one another and
see the image and themselves alone, so that an image is encoded once for all of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VISION_THETA = 10_000.0


class PatchEmbed(nn.Module):
    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        kernel = (vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
        self.proj = nn.Conv3d(vision["in_channels"], vision["hidden_size"], kernel, stride=kernel)

    def forward(self, patches: Tensor) -> Tensor:
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class VisionAttention(nn.Module):
    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        self.num_heads = vision["num_heads"]
        self.qkv = nn.Linear(vision["hidden_size"], 3 * vision["hidden_size"])
        self.proj = nn.Linear(vision["hidden_size"], vision["hidden_size"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class VisionMlp(nn.Module):
    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(vision["hidden_size"], vision["intermediate_size"])
        self.linear_fc2 = nn.Linear(vision["intermediate_size"], vision["hidden_size"])

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(vision["hidden_size"], eps=1e-6)
        self.norm2 = nn.LayerNorm(vision["hidden_size"], eps=1e-6)
        self.attn = VisionAttention(vision)
        self.mlp = VisionMlp(vision)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """Four neighbouring patches to one token."""

    def __init__(self, vision: dict[str, Any], norm_is_after_merging: bool) -> None:
        super().__init__()
        self.merged = vision["hidden_size"] * vision["spatial_merge_size"] ** 2
        self.norm_is_after_merging = norm_is_after_merging
        self.norm = nn.LayerNorm(self.merged if norm_is_after_merging else vision["hidden_size"], eps=1e-6)
        self.linear_fc1 = nn.Linear(self.merged, self.merged)
        self.linear_fc2 = nn.Linear(self.merged, vision["out_hidden_size"])

    def forward(self, x: Tensor) -> Tensor:
        merged = (x.shape[0], -1, self.merged)
        x = self.norm(x.reshape(merged)) if self.norm_is_after_merging else self.norm(x).reshape(merged)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class Vision(nn.Module):
    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        self.vision = vision
        self.patch_embed = PatchEmbed(vision)
        self.pos_embed = nn.Embedding(vision["num_position_embeddings"], vision["hidden_size"])
        self.blocks = nn.ModuleList(VisionBlock(vision) for _ in range(vision["depth"]))
        self.merger = Merger(vision, norm_is_after_merging=False)
        self.deepstack_merger_list = nn.ModuleList(
            Merger(vision, norm_is_after_merging=True) for _ in vision["deepstack_visual_indexes"]
        )

    def forward(self, frames: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Tokens of frames (count, 2, channels, height, width), and what the first text layers add to them."""
        size = self.vision["patch_size"]
        height, width = frames.shape[-2] // size, frames.shape[-1] // size
        x = self.patch_embed(to_patches(frames, size, self.vision["spatial_merge_size"]))
        x = x + self._positions(height, width)
        cos, sin = self._rotations(height, width, x.device)
        deepstack = []
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin)
            if index in self.vision["deepstack_visual_indexes"]:
                rank = self.vision["deepstack_visual_indexes"].index(index)
                deepstack.append(self.deepstack_merger_list[rank](x))
        return self.merger(x), deepstack

    def _positions(self, height: int, width: int) -> Tensor:
        """The learned grid, stretched over the image's by straight lines between its points."""
        side = int(self.vision["num_position_embeddings"] ** 0.5)
        grid = self.pos_embed.weight.view(side, side, -1)
        for axis, length in ((0, height), (1, width)):
            spots = torch.linspace(0, side - 1, length, device=grid.device)
            low = spots.long()
            high = (low + 1).clamp(max=side - 1)
            part = (spots - low).view(-1, *[1] * (2 - axis))
            grid = grid.index_select(axis, low) * (1 - part) + grid.index_select(axis, high) * part
        return merge_order(grid, self.vision["spatial_merge_size"])

    def _rotations(self, height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        head_dim = self.vision["hidden_size"] // self.vision["num_heads"]
        rates = VISION_THETA ** -(torch.arange(0, head_dim // 2, 2, device=device) / (head_dim // 2))
        rows = (torch.arange(height, device=device)[:, None] * rates).unsqueeze(1).expand(-1, width, -1)
        columns = (torch.arange(width, device=device)[:, None] * rates).unsqueeze(0).expand(height, -1, -1)
        angles = merge_order(torch.cat((rows, columns), -1), self.vision["spatial_merge_size"])
        return angles.cos(), angles.sin()


class TextAttention(nn.Module):
    def __init__(self, text: dict[str, Any]) -> None:
        super().__init__()
        self.head_dim, self.eps = text["head_dim"], text["rms_norm_eps"]
        self.num_heads, self.num_kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
        width = text["hidden_size"]
        self.q_proj = nn.Linear(width, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, width, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=self.eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=self.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        group = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class TextMlp(nn.Module):
    def __init__(self, text: dict[str, Any]) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(text["hidden_size"], text["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(text["hidden_size"], text["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(text["intermediate_size"], text["hidden_size"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TextLayer(nn.Module):
    def __init__(self, text: dict[str, Any]) -> None:
        super().__init__()
        self.self_attn = TextAttention(text)
        self.mlp = TextMlp(text)
        self.input_layernorm = nn.RMSNorm(text["hidden_size"], eps=text["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(text["hidden_size"], eps=text["rms_norm_eps"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Text(nn.Module):
    def __init__(self, text: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(text["vocab_size"], text["hidden_size"])
        self.layers = nn.ModuleList(TextLayer(text) for _ in range(text["num_hidden_layers"]))
        self.norm = nn.RMSNorm(text["hidden_size"], eps=text["rms_norm_eps"])


class Body(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.visual = Vision(config["vision_config"])
        self.language_model = Text(config["text_config"])


class Network(nn.Module):
    """Qwen3-VL with tied embeddings; `state_dict()` has the names of the released checkpoints."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        std = config["text_config"]["initializer_range"]
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.Conv3d):
                nn.init.normal_(module.weight, std=std)
                if isinstance(bias := getattr(module, "bias", None), Tensor):
                    nn.init.zeros_(bias)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor, frames: Tensor, slots: Tensor) -> Tensor:
        """Hidden states (batch, length, width).

        ids (batch, length); positions (3, batch, length) in time, rows and columns; mask (batch, 1, length, length),
        true where a query sees a key; frames (batch, count, 2, channels, height, width); slots (batch, media tokens)
        says where in a row the tokens of its frames go.
        """
        text = self.model.language_model
        x = text.embed_tokens(ids)
        media, deepstack = self.model.visual(frames.flatten(0, 1))
        row = torch.arange(len(ids), device=ids.device)[:, None]
        x = x.index_put((row, slots), media.reshape(*slots.shape, -1).to(x.dtype))
        cos, sin = self._rotations(positions)
        for index, layer in enumerate(text.layers):
            x = layer(x, cos, sin, mask)
            if index < len(deepstack):
                added = deepstack[index].reshape(*slots.shape, -1).to(x.dtype)
                x = x + torch.zeros_like(x).index_put((row, slots), added)
        return text.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.language_model.embed_tokens.weight)

    def _rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Angles whose places take turns between time, rows and columns."""
        text = self.config["text_config"]
        head_dim, sections = text["head_dim"], text["rope_scaling"]["mrope_section"]
        rates = text["rope_theta"] ** -(torch.arange(0, head_dim, 2, device=positions.device) / head_dim)
        axis = torch.zeros(head_dim // 2, dtype=torch.long, device=positions.device)
        for number in (1, 2):
            axis[number : 3 * sections[number] : 3] = number
        angles = positions.permute(1, 2, 0)[..., axis] * rates
        return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def to_patches(frames: Tensor, size: int, merge: int) -> Tensor:
    """(count, 2, channels, height, width) to (count, patches, values), patches that are merged side by side."""
    count, depth, channels, height, width = frames.shape
    grid = frames.reshape(count, depth, channels, height // size, size, width // size, size)
    patches = grid.permute(0, 3, 5, 2, 1, 4, 6).reshape(count, height // size, width // size, -1)
    return merge_order(patches, merge)


def merge_order(grid: Tensor, merge: int) -> Tensor:
    """(..., rows, columns, width) to (..., rows * columns, width), blocks of merge x merge together."""
    *outer, rows, columns, width = grid.shape
    blocks = grid.reshape(*outer, rows // merge, merge, columns // merge, merge, width)
    return blocks.transpose(-3, -4).reshape(*outer, rows * columns, width)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
