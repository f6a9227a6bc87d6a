"""The encoders of T5 v1.1 and UMT5: token ids in, a hidden state for each out.

T: tokens of all prompts, packed; D: width; H: heads; L: tokens of the longest prompt.

Positions are a bias per head, added to the score of a query and a key by their distance: T5 has one table of them for
all layers, UMT5 one per layer. A prompt attends only to itself, so padding that a pipeline masks is left out; if it is
not masked (FLUX.1), it is part of the prompt's ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.layers import partition
from tilewright.layers.embedding import TokenEmbedding
from tilewright.layers.linear import Linear
from tilewright.layers.norm import RmsNorm
from tilewright.models.text_config import Config, integer, number
from tilewright.models.text_encoders.decoder_encoder import PackedPrompts
from tilewright.ops.attention import varlen_attention
from tilewright.ops.plan import scope
from tilewright.types import UnsupportedConfig
from tilewright.weights.conv import Unpacked
from tilewright.weights.spec import along

_GATED_ACTIVATIONS = {"gated-gelu": "gelu_tanh", "gated-silu": "silu"}


@dataclass(frozen=True)
class T5Config:
    vocab_size: int
    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    head_width: int
    num_buckets: int
    max_distance: int
    eps: float
    activation: str
    shares_bias: bool  # one table of position biases for all layers (T5), or one per layer (UMT5)

    @classmethod
    def from_dict(cls, config: Config) -> T5Config:
        kind = config.get("model_type")
        if kind not in ("t5", "umt5"):
            raise UnsupportedConfig(f"text encoder has model_type {kind!r}, expected t5 or umt5")
        projection = config.get("feed_forward_proj", "relu" if kind == "t5" else "gated-gelu")
        if projection not in _GATED_ACTIVATIONS:
            raise UnsupportedConfig(
                f"text encoder has feed_forward_proj {projection!r}, expected one of {', '.join(_GATED_ACTIVATIONS)}"
            )
        num_buckets = integer(config, "relative_attention_num_buckets", 32)
        if num_buckets < 4 or num_buckets % 4:
            raise UnsupportedConfig(
                f"text encoder has relative_attention_num_buckets {num_buckets}, expected a multiple of 4: half of "
                "them are for each direction, and half of those for near tokens"
            )
        max_distance = integer(config, "relative_attention_max_distance", 128)
        if max_distance <= num_buckets // 4:
            raise UnsupportedConfig(
                f"text encoder has relative_attention_max_distance {max_distance}, "
                f"expected more than {num_buckets // 4}"
            )
        return cls(
            vocab_size=integer(config, "vocab_size"),
            width=integer(config, "d_model"),
            mlp_width=integer(config, "d_ff"),
            num_layers=integer(config, "num_layers"),
            num_heads=integer(config, "num_heads"),
            head_width=integer(config, "d_kv"),
            num_buckets=num_buckets,
            max_distance=max_distance,
            eps=number(config, "layer_norm_epsilon", 1e-6),
            activation=_GATED_ACTIVATIONS[projection],
            shares_bias=kind == "t5",
        )


def bucket_of(distances: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Return the row of the bias table for each distance, key minus query: int64 in, int64 out.

    Half of the rows are for keys after the query. In each half, near distances have a row each, and others share rows
    by their logarithm up to max_distance, from which on all share one. In fp32, as the models were trained: rounding
    decides between two rows.
    """
    per_side = num_buckets // 2
    near = per_side // 2
    distance = distances.abs()
    share = torch.log(distance.clamp(min=1).float() / near) / math.log(max_distance / near)
    far = (near + (share * (per_side - near)).long()).clamp(max=per_side - 1)
    return torch.where(distance < near, distance, far) + per_side * (distances > 0)


class PositionBias:
    """Biases for the scores of this rank's heads."""

    def __init__(self, name: str, config: T5Config) -> None:
        self.config = config
        self.table = Unpacked(f"{name}.weight", config.num_buckets, config.num_heads)
        self._heads = partition.current().heads("attention", config.num_heads, None, config.head_width).queries

    def of_length(self, length: int) -> Tensor:
        """Return the biases [1, H, length, length] of prompts of up to `length` tokens.

        They take 32 MB for 512 tokens of UMT5-XXL in bf16.
        """
        config, table = self.config, self.table.value
        distances = torch.arange(1 - length, length, device=table.device)
        rows = bucket_of(distances, config.num_buckets, config.max_distance)
        by_distance = along(table, 1, self._heads)[rows].t().contiguous()
        # Each window of `length` distances is a query's row, the last query's first.
        return by_distance.unfold(1, length, 1).flip(1).contiguous()[None]


class T5Block:
    """x + attention(norm(x)), then x + mlp(norm(x)), updating x."""

    def __init__(self, name: str, config: T5Config) -> None:
        self.config = config
        own, width = partition.current(), config.width
        attention, mlp = f"{name}.layer.0.SelfAttention", f"{name}.layer.1.DenseReluDense"
        self.attention_norm = RmsNorm(f"{name}.layer.0.layer_norm", width, config.eps)
        heads = own.heads("attention", config.num_heads, None, config.head_width)
        self.num_heads = heads.num_queries
        rows, attention_width = heads.queries.times(config.head_width), config.num_heads * config.head_width
        self.qkv = Linear([(f"{attention}.{part}", attention_width, rows) for part in "qkv"], width)
        self.output = Linear([(f"{attention}.o", width)], attention_width, column_shard=rows)
        self.mlp_norm = RmsNorm(f"{name}.layer.1.layer_norm", width, config.eps)
        inner = own.width("MLP width", config.mlp_width)
        gate_up = [(f"{mlp}.wi_0", config.mlp_width, inner), (f"{mlp}.wi_1", config.mlp_width, inner)]
        self.gate_up = Linear(gate_up, width, gated=True)
        self.down = Linear([(f"{mlp}.wo", width)], config.mlp_width, column_shard=inner)

    def __call__(self, x_TD: Tensor, starts: Tensor, bias_1HLL: Tensor) -> None:
        heads = self.num_heads
        qkv = self.qkv(self.attention_norm(x_TD)).view(len(x_TD), 3 * heads, self.config.head_width)
        q, k, v = qkv.split(heads, dim=1)
        # Scores are not divided by the root of the head width: it is folded into the weights.
        attended = varlen_attention(q, k, v, starts, scale=1.0, mask=bias_1HLL)
        self.output(attended.view(len(x_TD), -1), residual=x_TD, out=x_TD)
        inner = self.gate_up(self.mlp_norm(x_TD), activation=self.config.activation)
        self.down(inner, residual=x_TD, out=x_TD)


class T5Encoder:
    def __init__(self, config: T5Config) -> None:
        self.config = config
        self.embedding = TokenEmbedding("shared", config.vocab_size, config.width)
        self.blocks = [T5Block(f"encoder.block.{i}", config) for i in range(config.num_layers)]
        bias = "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias"
        num_biases = 1 if config.shares_bias else config.num_layers
        self.biases = [PositionBias(bias.format(i), config) for i in range(num_biases)]
        self.norm = RmsNorm("encoder.final_layer_norm", config.width, config.eps)

    def encode(self, token_ids: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return hidden states [L_i, D] of each prompt."""
        prompts = PackedPrompts.of(token_ids)
        x_TD = self.embedding(prompts.ids_T)
        bias_1HLL = self.biases[0].of_length(prompts.longest)
        for i, block in enumerate(self.blocks):
            if 0 < i < len(self.biases):
                bias_1HLL = self.biases[i].of_length(prompts.longest)
            with scope():
                block(x_TD, prompts.starts, bias_1HLL)
        return prompts.split(self.norm(x_TD, out=torch.empty_like(x_TD)))

    def checkpoint_name(self, stored_name: str) -> str | None:
        """Return the name; None for the embedding's second name, a copy."""
        return None if stored_name == "encoder.embed_tokens.weight" else stored_name


def build(config: Config) -> T5Encoder:
    return T5Encoder(T5Config.from_dict(config))
