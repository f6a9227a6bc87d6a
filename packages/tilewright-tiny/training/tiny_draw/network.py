"""Z-Image's transformer for training, with diffusers' names and formulas (`tests/test_tiny_draw.py` compares the two).

The images of a batch have one size and its captions one padded length: it is tensors instead of lists, and compiles.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONDITION_WIDTH = 256  # of the embedded timestep, at most
FREQUENCY_WIDTH, TIMESTEP_WIDTH = 256, 1024
PATCH = 2
CAPTION_MULTIPLE = 32  # captions and images are padded to whole multiples


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, eps: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(width, width, bias=False)])
        self.norm_q, self.norm_k = (nn.RMSNorm(width // num_heads, eps=eps) for _ in range(2))

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (to(x).unflatten(-1, (self.num_heads, -1)) for to in (self.to_q, self.to_k, self.to_v))
        q, k = turned(self.norm_q(q), turns).type_as(v), turned(self.norm_k(k), turns).type_as(v)
        attended = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.to_out[0](attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = int(width / 3 * 8)
        self.w1, self.w3 = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, eps: float, modulated: bool) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(width, num_heads, 1e-5), FeedForward(width)
        self.attention_norm1, self.ffn_norm1 = nn.RMSNorm(width, eps=eps), nn.RMSNorm(width, eps=eps)
        self.attention_norm2, self.ffn_norm2 = nn.RMSNorm(width, eps=eps), nn.RMSNorm(width, eps=eps)
        if modulated:
            self.adaLN_modulation = nn.Sequential(nn.Linear(min(width, CONDITION_WIDTH), 4 * width))
        self.modulated = modulated

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], condition: Tensor | None = None) -> Tensor:
        if not self.modulated:
            x = x + self.attention_norm2(self.attention(self.attention_norm1(x), turns))
            return x + self.ffn_norm2(self.feed_forward(self.ffn_norm1(x)))
        scale, gate, ffn_scale, ffn_gate = self.adaLN_modulation(condition).unsqueeze(1).chunk(4, dim=2)
        attended = self.attention(self.attention_norm1(x) * (1 + scale), turns)
        x = x + gate.tanh() * self.attention_norm2(attended)
        return x + ffn_gate.tanh() * self.ffn_norm2(self.feed_forward(self.ffn_norm1(x) * (1 + ffn_scale)))


class TimestepEmbedder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(FREQUENCY_WIDTH, TIMESTEP_WIDTH), nn.SiLU(), nn.Linear(TIMESTEP_WIDTH, width)
        )

    def forward(self, t: Tensor) -> Tensor:
        half = FREQUENCY_WIDTH // 2
        angles = t[:, None] * torch.exp(-math.log(10000) / half * torch.arange(half, device=t.device))
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1))


class FinalLayer(nn.Module):
    def __init__(self, width: int, out_width: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(width, out_width)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(min(width, CONDITION_WIDTH), width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return self.linear(self.norm_final(x) * (1 + self.adaLN_modulation(condition)).unsqueeze(1))


class Transformer(nn.Module):
    """x0 - noise of noisy latents, with the names of diffusers' ZImageTransformer2DModel."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, heads, eps = config["dim"], config["n_heads"], config["norm_eps"]
        self.channels, self.axes_dims = config["in_channels"], config["axes_dims"]
        self.theta, self.t_scale = config["rope_theta"], config["t_scale"]
        patch_width = PATCH * PATCH * self.channels
        self.all_x_embedder = nn.ModuleDict({"2-1": nn.Linear(patch_width, width)})
        self.all_final_layer = nn.ModuleDict({"2-1": FinalLayer(width, patch_width)})
        refiners = range(config["n_refiner_layers"])
        self.noise_refiner = nn.ModuleList([Block(width, heads, eps, True) for _ in refiners])
        self.context_refiner = nn.ModuleList([Block(width, heads, eps, False) for _ in refiners])
        self.t_embedder = TimestepEmbedder(min(width, CONDITION_WIDTH))
        caption_width = config["cap_feat_dim"]
        self.cap_embedder = nn.Sequential(nn.RMSNorm(caption_width, eps=eps), nn.Linear(caption_width, width))
        self.x_pad_token, self.cap_pad_token = (nn.Parameter(torch.zeros(1, width)) for _ in range(2))
        self.layers = nn.ModuleList([Block(width, heads, eps, True) for _ in range(config["n_layers"])])

    def start_from_nothing(self) -> None:
        """Initial weights with which every block passes its input on, and the output is 0."""
        for name, parameter in self.named_parameters():
            if name.endswith("pad_token") or parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        for name, module in self.named_modules():
            if name.endswith("adaLN_modulation") or name == "all_final_layer.2-1.linear":
                for parameter in module.parameters():
                    nn.init.zeros_(parameter)

    def forward(self, latents: Tensor, t: Tensor, captions: Tensor, is_padding: Tensor) -> Tensor:
        """Of latents [B, C, H, W], t [B] from 0 (noise) to 1, and captions [B, L, D], some of them padding [B, L]."""
        batch, _, height, width = latents.shape
        rows, columns = height // PATCH, width // PATCH
        condition = self.t_embedder(t * self.t_scale)
        x = self.all_x_embedder["2-1"](as_patches(latents))
        padding = -x.shape[1] % CAPTION_MULTIPLE
        x = torch.cat([x, self.x_pad_token.expand(batch, padding, -1).type_as(x)], dim=1)
        caption_length = captions.shape[1]
        places = torch.zeros(rows * columns + padding, 3, device=x.device)
        places[: rows * columns, 0] = caption_length + 1
        places[: rows * columns, 1] = torch.arange(rows, device=x.device).repeat_interleave(columns)
        places[: rows * columns, 2] = torch.arange(columns, device=x.device).repeat(rows)
        caption_places = torch.zeros(caption_length, 3, device=x.device)
        caption_places[:, 0] = torch.arange(1, caption_length + 1, device=x.device)
        turns, caption_turns = self._turns(places), self._turns(caption_places)
        for block in self.noise_refiner:
            x = block(x, turns, condition)
        text = self.cap_embedder(captions)
        text = torch.where(is_padding[:, :, None], self.cap_pad_token.type_as(text), text)
        for block in self.context_refiner:
            text = block(text, caption_turns)
        x = torch.cat([x, text.type_as(x)], dim=1)
        all_turns = tuple(torch.cat(pair) for pair in zip(turns, caption_turns, strict=True))
        for block in self.layers:
            x = block(x, all_turns, condition)
        x = self.all_final_layer["2-1"](x[:, : rows * columns], condition)
        return as_latents(x, rows, columns)

    def _turns(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [L, 1, K/2] of every pair of a head's elements."""
        angles = []
        for axis, size in enumerate(self.axes_dims):
            inv_freq = 1.0 / self.theta ** (torch.arange(0, size, 2, device=places.device) / size)
            angles.append(places[:, axis, None] * inv_freq)
        whole = torch.cat(angles, dim=-1)[:, None]
        return whole.cos(), whole.sin()


def turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Neighbouring elements of heads [B, L, H, K] turned as pairs."""
    cos, sin = turns
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def as_patches(latents: Tensor) -> Tensor:
    """[B, rows * columns, PATCH * PATCH * C] of latents [B, C, H, W], channels last."""
    batch, channels, height, width = latents.shape
    patches = latents.view(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, PATCH * PATCH * channels)


def as_latents(patches: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `as_patches`."""
    whole = patches.unflatten(1, (rows, columns)).unflatten(-1, (PATCH, PATCH, -1))
    return whole.permute(0, 5, 1, 3, 2, 4).reshape(len(patches), -1, rows * PATCH, columns * PATCH)
