"""The text encoder of CLIP: a causal transformer with learned positions; FLUX.1 reads its state at the end token.

T: tokens of all prompts, packed; D: width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.host.files import CheckpointError
from tilewright.layers import partition
from tilewright.layers.embedding import TokenEmbedding
from tilewright.layers.linear import Linear
from tilewright.layers.mlp import activation_named
from tilewright.layers.norm import LayerNorm
from tilewright.models.text_config import Config, head_width, integer, model_width, number
from tilewright.models.text_encoders.decoder_encoder import PackedPrompts
from tilewright.ops.activation import add
from tilewright.ops.attention import varlen_attention
from tilewright.ops.embedding import embedding
from tilewright.ops.plan import scope
from tilewright.types import RequestError, UnsupportedConfig
from tilewright.weights.conv import Unpacked

# The wrong end id of configs made before transformers 4.31: their end is the highest id of a prompt.
OLD_END_ID = 2


@dataclass(frozen=True)
class ClipTextConfig:
    vocab_size: int
    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    head_width: int
    max_positions: int
    eps: float
    activation: str
    end_id: int  # OLD_END_ID stands for the highest id of a prompt

    @classmethod
    def from_dict(cls, config: Config) -> ClipTextConfig:
        if (kind := config.get("model_type")) != "clip_text_model":
            raise UnsupportedConfig(f"text encoder has model_type {kind!r}, expected clip_text_model")
        width, num_heads = model_width(config), integer(config, "num_attention_heads")
        return cls(
            vocab_size=integer(config, "vocab_size", 49408),
            width=width,
            mlp_width=integer(config, "intermediate_size"),
            num_layers=integer(config, "num_hidden_layers"),
            num_heads=num_heads,
            head_width=head_width(config, width, num_heads),
            max_positions=integer(config, "max_position_embeddings", 77),
            eps=number(config, "layer_norm_eps", 1e-5),
            activation=activation_named(str(config.get("hidden_act", "quick_gelu"))),
            end_id=integer(config, "eos_token_id", 49407),
        )


class ClipBlock:
    """x + attention(norm(x)), then x + mlp(norm(x)), updating x."""

    def __init__(self, name: str, config: ClipTextConfig) -> None:
        self.config = config
        own, width = partition.current(), config.width
        self.norm1 = LayerNorm(f"{name}.layer_norm1", width, config.eps)
        heads = own.heads("attention", config.num_heads, None, config.head_width)
        self.num_heads = heads.num_queries
        rows = heads.queries.times(config.head_width)
        qkv = [(f"{name}.self_attn.{part}_proj", width, rows) for part in "qkv"]
        self.qkv = Linear(qkv, width, bias=True)
        self.output = Linear([(f"{name}.self_attn.out_proj", width)], width, column_shard=rows, bias=True)
        self.norm2 = LayerNorm(f"{name}.layer_norm2", width, config.eps)
        inner = own.width("MLP width", config.mlp_width)
        self.mlp_in = Linear([(f"{name}.mlp.fc1", config.mlp_width, inner)], width, bias=True)
        self.mlp_out = Linear([(f"{name}.mlp.fc2", width)], config.mlp_width, column_shard=inner, bias=True)

    def __call__(self, x_TD: Tensor, starts: Tensor) -> None:
        heads = self.num_heads
        qkv = self.qkv(self.norm1(x_TD)).view(len(x_TD), 3 * heads, self.config.head_width)
        q, k, v = qkv.split(heads, dim=1)
        attended = varlen_attention(q, k, v, starts, causal=True)
        self.output(attended.view(len(x_TD), -1), residual=x_TD, out=x_TD)
        inner = self.mlp_in(self.norm2(x_TD), activation=self.config.activation)
        self.mlp_out(inner, residual=x_TD, out=x_TD)


class ClipTextEncoder:
    def __init__(self, config: ClipTextConfig) -> None:
        self.config = config
        self.embedding = TokenEmbedding("embeddings.token_embedding", config.vocab_size, config.width)
        self.positions = Unpacked("embeddings.position_embedding.weight", config.max_positions, config.width)
        self.blocks = [ClipBlock(f"encoder.layers.{i}", config) for i in range(config.num_layers)]
        self.norm = LayerNorm("final_layer_norm", config.width, config.eps)

    def encode(self, token_ids: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return hidden states [L_i, D] of each prompt."""
        prompts = PackedPrompts.of(token_ids)
        if prompts.longest > self.config.max_positions:
            raise RequestError(
                f"a prompt has {prompts.longest} tokens, the limit of its text encoder is {self.config.max_positions}"
            )
        x_TD = add(self.embedding(prompts.ids_T), embedding(prompts.positions_T, self.positions.value))
        for block in self.blocks:
            with scope():
                block(x_TD, prompts.starts)
        return prompts.split(self.norm(x_TD, out=torch.empty_like(x_TD)))

    def pool(self, token_ids: Sequence[Sequence[int]]) -> Tensor:
        """Return the state at the first end token of each prompt, [B, D]."""
        ends = [self._end(ids) for ids in token_ids]
        return torch.stack([states[end] for states, end in zip(self.encode(token_ids), ends, strict=True)])

    def _end(self, ids: Sequence[int]) -> int:
        end_id = max(ids) if self.config.end_id == OLD_END_ID else self.config.end_id
        if end_id not in ids:
            raise CheckpointError(f"a prompt lacks the token {end_id}, which the text encoder's config has as its end")
        return ids.index(end_id)

    def checkpoint_name(self, stored_name: str) -> str | None:
        """Return the name without older checkpoints' prefix `text_model`; None for their table of position ids."""
        name = stored_name.removeprefix("text_model.")
        return None if name == "embeddings.position_ids" else name


def build(config: Config) -> ClipTextEncoder:
    return ClipTextEncoder(ClipTextConfig.from_dict(config))
