"""Qwen3-Omni's thinker for training: the same computation and names as transformers', on sounds of one length.

All sounds of a batch last equally long, so that neither the tower nor the decoder needs lengths. What is asked about
one sound lies behind one another and sees the sound and itself alone, so that a sound is encoded once for both tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright.models.qwen3_omni.audio import sinusoids
from tilewright.models.qwen3_omni.config import AudioConfig, halved
from training.tiny_vl.network import PatchEmbed, Text, VisionBlock

PREFIX = "thinker."


class AudioAttention(nn.Module):
    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(config.width, config.width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class AudioLayer(nn.Module):
    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(config.width)
        self.self_attn = AudioAttention(config)
        self.final_layer_norm = nn.LayerNorm(config.width)
        self.fc1 = nn.Linear(config.width, config.mlp_width)
        self.fc2 = nn.Linear(config.mlp_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        return x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))


class AudioTower(nn.Module):
    positions: Tensor

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.conv_channels
        self.conv2d1 = nn.Conv2d(1, channels, 3, 2, padding=1)
        self.conv2d2 = nn.Conv2d(channels, channels, 3, 2, padding=1)
        self.conv2d3 = nn.Conv2d(channels, channels, 3, 2, padding=1)
        self.conv_out = nn.Linear(channels * config.bins_after_convs, config.width, bias=False)
        self.layers = nn.ModuleList(AudioLayer(config) for _ in range(config.num_layers))
        self.ln_post = nn.LayerNorm(config.width)
        self.proj1 = nn.Linear(config.width, config.width)
        self.proj2 = nn.Linear(config.width, config.output_width)
        positions = sinusoids(config.features_per_chunk, config.width)
        self.register_buffer("positions", positions, persistent=False)

    def forward(self, mel_BLM: Tensor) -> Tensor:
        """Features (batch, count, width) of mel frames (batch, frames, bins), within one window of attention."""
        config = self.config
        batch, num_frames, _ = mel_BLM.shape
        if num_frames > config.frames_per_chunk * config.chunks_per_window:
            longest = config.frames_per_chunk * config.chunks_per_window
            raise ValueError(f"a sound of {num_frames} frames, expected {longest} at most: one window of attention")
        chunk = min(num_frames, config.frames_per_chunk)
        num_chunks = -(-num_frames // chunk)
        padded = F.pad(mel_BLM, (0, 0, 0, num_chunks * chunk - num_frames))
        x = padded.reshape(batch * num_chunks, 1, chunk, -1).transpose(2, 3)
        for conv in (self.conv2d1, self.conv2d2, self.conv2d3):
            x = F.gelu(conv(x))
        x = self.conv_out(x.permute(0, 3, 1, 2).flatten(2)) + self.positions[: halved(chunk)]
        x = x.reshape(batch, -1, config.width)[:, : config.num_features(num_frames)]
        for layer in self.layers:
            x = layer(x)
        return self.proj2(F.gelu(self.proj1(self.ln_post(x))))


class Merger(nn.Module):
    """The names of a merger."""

    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        merged = vision["hidden_size"] * vision["spatial_merge_size"] ** 2
        self.ln_q = nn.LayerNorm(vision["hidden_size"])
        self.mlp = nn.Sequential(nn.Linear(merged, merged), nn.GELU(), nn.Linear(merged, vision["out_hidden_size"]))


class Eyes(nn.Module):
    """The weights of a vision tower that is not trained."""

    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(vision)
        self.pos_embed = nn.Embedding(vision["num_position_embeddings"], vision["hidden_size"])
        self.blocks = nn.ModuleList(VisionBlock(vision) for _ in range(vision["depth"]))
        self.merger = Merger(vision)
        self.requires_grad_(False)


class Network(nn.Module):
    """The thinker, and a head that spells the words heard, which teaches the tower to listen and is then dropped."""

    def __init__(self, config: dict[str, Any], num_words: int) -> None:
        super().__init__()
        thinker = config["thinker_config"]
        self.text = text = thinker["text_config"]
        self.audio_tower = AudioTower(AudioConfig.from_dict(thinker["audio_config"]))
        self.visual = Eyes(thinker["vision_config"])
        self.model = Text(text)
        self.lm_head = nn.Linear(text["hidden_size"], text["vocab_size"], bias=False)
        self.word_head = nn.Linear(text["hidden_size"], num_words + 1)  # the first is for no word
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=text["initializer_range"])
                if isinstance(bias := getattr(module, "bias", None), Tensor):
                    nn.init.zeros_(bias)

    def forward(self, mel: Tensor, ids: Tensor, positions: Tensor, mask: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Hidden states (batch, length, width), and features of the sounds (batch, count, width).

        mel (batch, frames, bins); ids and positions (batch, length); mask (batch, 1, length, length), true where a
        query sees a key; the features of every sound go into its row from `start` on.
        """
        features = self.audio_tower(mel)
        x = self.model.embed_tokens(ids)
        x = torch.cat((x[:, :start], features.to(x.dtype), x[:, start + features.shape[1] :]), 1)
        cos, sin = self._rotations(positions)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        return self.model.norm(x), features

    def _rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Text and sound count up on all three axes alike, so that one is enough."""
        head_dim = self.text["head_dim"]
        rates = self.text["rope_theta"] ** -(torch.arange(0, head_dim, 2, device=positions.device) / head_dim)
        angles = (positions[..., None] * rates).unsqueeze(1)
        return angles.cos(), angles.sin()

    def blocks(self) -> Iterator[nn.Module]:
        """What is compiled."""
        yield from (*self.audio_tower.layers, *self.model.layers)

    def stored_weights(self) -> dict[str, Tensor]:
        """By the names of a checkpoint."""
        return {f"{PREFIX}{name}": w for name, w in self.state_dict().items() if not name.startswith("word_head.")}

    def load_stored(self, weights: dict[str, Tensor]) -> None:
        """What a checkpoint has; the head for words starts anew."""
        own = {name.removeprefix(PREFIX): weight for name, weight in weights.items()}
        self.load_state_dict(own | {n: w for n, w in self.state_dict().items() if n.startswith("word_head.")})
