"""The talker: a decoder that reads what the thinker read and writes, and gives the first code of each frame of speech.

It has no text of its own. A row of its input is the sum of a text row (a row of the thinker's embedding table, or the
thinker's hidden state of a medium's token, projected to the talker's width) and of a codec row (embeddings of the codes
of the last frame, or of a codec token). `TalkerPrompt` (talker_prompt.py) says which rows there are.

Legend of shape suffixes: T packed rows, D model width, W the thinker's width, B voices, Q codes of a frame.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.layers import partition
from tilewright.layers.batch import Batch
from tilewright.layers.decoder import DecoderLayer, hidden_norm, kv_layers_of, ropes_of
from tilewright.layers.linear import GatheredLinear, Linear
from tilewright.layers.token_embedding import TokenEmbedding
from tilewright.models.protocol import KvSpec
from tilewright.models.qwen3_omni.code_predictor import CodePredictor
from tilewright.models.qwen3_omni.config import TALKER, TalkerConfig
from tilewright.models.speaking import Choose, Embed, Predict
from tilewright.ops.activation import add
from tilewright.ops.plan import empty, scope
from tilewright.types import UnsupportedConfig

NUM_SPECIAL = 1024  # the last ids of the codec's vocabulary are no codes


class Projection:
    """out(act(in(x))): rows of the thinker's width become rows of the talker's."""

    def __init__(self, name: str, config: TalkerConfig) -> None:
        inner = config.projection.width
        shard = partition.current().width("projection's width", inner)
        self.activation = config.projection.activation
        self.inner = Linear([(f"{name}.linear_fc1", inner, shard)], config.thinker_width, bias=True)
        self.output = Linear([(f"{name}.linear_fc2", config.text.width)], inner, column_shard=shard, bias=True)

    def __call__(self, x_TW: Tensor) -> Tensor:
        return self.output(self.inner(x_TW, activation=self.activation))


class Talker:
    """Layers with experts around the codec's own vocabulary; `code_predictor` completes each frame."""

    def __init__(self, config: TalkerConfig, name: str = TALKER) -> None:
        text, predictor = config.text, config.code_predictor
        if predictor.decoder.width != text.width:
            raise UnsupportedConfig(
                f"code_predictor_config has hidden_size {predictor.decoder.width}, expected the talker's, {text.width}"
            )
        self.config = config
        self.text_projection = Projection(f"{name}.text_projection", config)
        self.hidden_projection = Projection(f"{name}.hidden_projection", config)
        self.codec_embedding = TokenEmbedding(f"{name}.model.codec_embedding", text.vocab_size, text.width)
        self.layers = [DecoderLayer(f"{name}.model.layers.{i}", spec, i) for i, spec in enumerate(text.layers)]
        self.norm = hidden_norm(f"{name}.model.norm", text.width, text.norm)
        self.head = GatheredLinear.named(
            f"{name}.codec_head", text.vocab_size, text.width, what="codec vocabulary", is_head=True
        )
        self.ropes = ropes_of(text.layers)
        self.code_predictor = CodePredictor(predictor, f"{name}.code_predictor")
        self.kv_spec = KvSpec(kv_layers_of(self.layers))

    @property
    def num_position_axes(self) -> int:
        return self.ropes.num_axes

    @property
    def width(self) -> int:
        return self.config.text.width

    @property
    def vocab_size(self) -> int:
        return self.config.text.vocab_size

    @property
    def end_id(self) -> int:
        return self.config.codec.eos

    @property
    def never_said(self) -> tuple[int, ...]:
        """The codec's special ids but its end."""
        special = range(self.vocab_size - NUM_SPECIAL, self.vocab_size)
        return tuple(code for code in special if code != self.end_id)

    def hidden(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """What the head reads of the rows that the batch asks for [R, D]; x is overwritten. Ids are not read."""
        rows = batch.logit_rows
        ropes = self.ropes.tables(batch.positions_AT)
        for layer, rope in zip(self.layers[:-1], ropes, strict=False):
            with scope():
                layer(x_TD, batch, rope)
        out = empty((len(x_TD if rows is None else rows), self.config.text.width), x_TD.dtype)
        with scope():
            self.norm(self.layers[-1](x_TD, batch, ropes[-1], rows), out=out)
        return out

    def logits(self, h_TD: Tensor) -> Tensor:
        """fp32 [T, V] of what `hidden` gives."""
        return self.head(h_TD, out_dtype=torch.float32)

    def step(self, embed: Embed, text_ids_T: Tensor, codec_TD: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """What the head reads of each row, and fp32 logits, from the ids of its text and from its codec rows.

        Kernel calls alone: a step of one row for each voice can be recorded.
        """
        x_TD = self.text_projection(embed(text_ids_T))
        hidden_TD = self.hidden(add(x_TD, codec_TD, out=x_TD), batch)
        return hidden_TD, self.logits(hidden_TD)

    def complete_frames(
        self, hidden_BD: Tensor, first_codes_B: Tensor, choose: Choose, predict: Predict | None = None
    ) -> tuple[Tensor, Tensor]:
        """Frames of codes int64 [B, Q], and the codec rows [B, D] that they are for the step after.

        Made from the first code of each and the hidden state it was chosen by. A codec row is the sum of the embeddings
        of a frame's codes. `predict` stands in for the code predictor's own: one that is recorded.
        """
        embedded = self.codec_embedding(first_codes_B)
        rows = torch.stack((hidden_BD, embedded), dim=1).flatten(0, 1)
        codes, others = (predict or self.code_predictor.predict)(rows, choose)
        total = torch.stack(others).float().sum(0) + embedded.float()
        return torch.stack((first_codes_B, *codes), dim=1), total.to(embedded.dtype)
