"""The talker and its code predictor for training: the same computation and names as transformers'.

Rows are those of serving (`tilewright.models.qwen3_omni.talker`): each is the sum of a text row and a codec row.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.tiny_omni.codec import Mlp
from training.tiny_vl.network import TextAttention, TextLayer

REPETITION_PENALTY = 1.05  # on the first codes that were said before: transformers' default, and the engine's


class SparseMlp(nn.Module):
    """One expert, which every row takes, and the shared one behind its gate."""

    def __init__(self, text: dict[str, Any]) -> None:
        super().__init__()
        width = text["hidden_size"]
        # A router of one expert gives it everything, whatever its weight says.
        self.gate = nn.Linear(width, 1, bias=False).requires_grad_(False)
        self.experts = nn.ModuleList([Mlp(width, text["moe_intermediate_size"])])
        self.shared_expert = Mlp(width, text["shared_expert_intermediate_size"])
        self.shared_expert_gate = nn.Linear(width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x) + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)


class TalkerLayer(nn.Module):
    def __init__(self, text: dict[str, Any]) -> None:
        super().__init__()
        self.self_attn = TextAttention(text)
        self.mlp = SparseMlp(text)
        self.input_layernorm = nn.RMSNorm(text["hidden_size"], eps=text["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(text["hidden_size"], eps=text["rms_norm_eps"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class TalkerModel(nn.Module):
    def __init__(self, text: dict[str, Any]) -> None:
        super().__init__()
        self.codec_embedding = nn.Embedding(text["vocab_size"], text["hidden_size"])
        self.layers = nn.ModuleList(TalkerLayer(text) for _ in range(text["num_hidden_layers"]))
        self.norm = nn.RMSNorm(text["hidden_size"], eps=text["rms_norm_eps"])


class PredictorModel(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, width = config["vocab_size"], config["hidden_size"]
        self.codec_embedding = nn.ModuleList(nn.Embedding(size, width) for _ in range(config["num_code_groups"] - 1))
        self.layers = nn.ModuleList(TextLayer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(width, eps=config["rms_norm_eps"])


class CodePredictor(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.model = PredictorModel(config)
        self.lm_head = nn.ModuleList(
            nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
            for _ in range(config["num_code_groups"] - 1)
        )

    def forward(self, hidden_ND: Tensor, first_ND: Tensor, codes_NQ: Tensor) -> Tensor:
        """Logits (frames, Q - 1, codes) of each code after the first, from the right ones before it."""
        tables = list(self.model.codec_embedding)[:-1]
        rows = [hidden_ND, first_ND, *(table(codes_NQ[:, i]) for i, table in enumerate(tables, 1))]
        x = torch.stack([row.to(hidden_ND.dtype) for row in rows], 1)
        cos, sin = rotations(self.config, torch.arange(x.shape[1], device=x.device)[None])
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        x = self.model.norm(x)[:, 1:]
        return torch.stack([head(x[:, i]) for i, head in enumerate(self.lm_head)], 1)


class Projection(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        text = config["text_config"]
        self.linear_fc1 = nn.Linear(config["thinker_hidden_size"], text["intermediate_size"])
        self.linear_fc2 = nn.Linear(text["intermediate_size"], text["hidden_size"])

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.linear_fc2(F.silu(self.linear_fc1(x))))


class Talker(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.text = config, config["text_config"]
        self.model = TalkerModel(self.text)
        self.text_projection, self.hidden_projection = Projection(config), Projection(config)
        self.codec_head = nn.Linear(self.text["hidden_size"], self.text["vocab_size"], bias=False)
        self.code_predictor = CodePredictor(config["code_predictor_config"])
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=self.text["initializer_range"])
                if isinstance(bias := getattr(module, "bias", None), Tensor):
                    nn.init.zeros_(bias)
        self.turn_deaf()

    @torch.no_grad()
    def turn_deaf(self) -> None:
        """What the user said is nothing to it: how a text sounds is in the text alone."""
        for parameter in self.hidden_projection.requires_grad_(False).linear_fc2.parameters():
            parameter.zero_()

    def embed_frames(self, codes_BTQ: Tensor) -> Tensor:
        """The codec rows of frames: the sum of the embeddings of their codes."""
        rows = self.model.codec_embedding(codes_BTQ[..., 0])
        for place, table in enumerate(self.code_predictor.model.codec_embedding, 1):
            rows = rows + table(codes_BTQ[..., place])
        return cast(Tensor, rows)

    def hidden(self, x_BTD: Tensor, mask: Tensor, positions_BT: Tensor) -> Tensor:
        """What the head reads, of rows that are sums already."""
        cos, sin = rotations(self.text, positions_BT)
        for layer in self.model.layers:
            x_BTD = layer(x_BTD, cos, sin, mask)
        return cast(Tensor, self.model.norm(x_BTD))


def rotations(config: dict[str, Any], positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Rows count up on all axes alike, so that one is enough."""
    head_dim = config["head_dim"]
    rates = config["rope_theta"] ** -(torch.arange(0, head_dim, 2, device=positions_BT.device) / head_dim)
    angles = (positions_BT[..., None] * rates).unsqueeze(1)
    return angles.cos(), angles.sin()


def penalised(logits_BTV: Tensor, first_BT: Tensor, is_asked_BT: Tensor) -> Tensor:
    """Logits as they are when a first code is chosen: those of codes that earlier frames begin with are made smaller.

    `first_BT` are the codes that the rows ask for, where they do.
    """
    asked = F.one_hot(first_BT, logits_BTV.shape[-1]) * is_asked_BT[..., None]
    was_said = asked.cumsum(1) - asked > 0
    smaller = torch.where(logits_BTV > 0, logits_BTV / REPETITION_PENALTY, logits_BTV * REPETITION_PENALTY)
    return torch.where(was_said, smaller, logits_BTV)
