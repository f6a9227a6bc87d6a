"""Turns codes into samples: a transformer over frames of codes, then convolutions that upsample to a waveform.

The frames of a sequence may come in pieces, whose samples are those of the whole, bit for bit: each layer keeps the
rows it reads again (`StreamState`), bounded by attention's window and the convolutions' kernels. Samples come a little
late: a transposed convolution returns rows once all their inputs are known.

Legend of shape suffixes: B sequences, T frames or rows, Q codes of a frame, C channels, H heads, G kv heads, K head
width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.layers import partition
from tilewright.layers.attention import AttentionConfig
from tilewright.layers.batch import StateBatch
from tilewright.layers.conv import (
    CausalConv1d,
    DepthwiseConv1d,
    Pieces,
    PointwiseConv1d,
    Snake,
    StreamState,
    TransposedConv1d,
)
from tilewright.layers.decoder import DecoderLayer, LayerSpec, hidden_norm, ropes_of
from tilewright.layers.linear import Linear
from tilewright.layers.mlp import MlpConfig
from tilewright.layers.norm import LayerNorm, NormConfig
from tilewright.layers.rope import RopeConfig
from tilewright.models.qwen3_omni.config import CODE2WAV, Code2WavConfig
from tilewright.ops import backend
from tilewright.ops.attention import varlen_attention
from tilewright.ops.embedding import embedding
from tilewright.ops.plan import scope
from tilewright.weights.conv import Unpacked

# Frames that go through the network at a time: this bounds memory without changing the samples.
MAX_FRAMES = 32
DILATIONS = (1, 3, 9)
KERNEL = 7
NORM_EPS = 1e-6  # of the ConvNeXt blocks


class Code2WavState(StreamState):
    """The decoding state of one sequence: what its layers keep, and its numbers of frames and samples so far.

    The engine's `SpeechSequence` holds it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_frames = 0
        self.num_samples = 0

    @property
    def stage(self) -> int:
        """Number equal for states whose layers keep as many rows: from the first sample on, all are equal."""
        return -1 if self.num_samples else self.num_frames

    def snapshot(self) -> tuple[dict[object, Tensor], int, int]:
        """Return a snapshot of the state.

        What a layer keeps is replaced, never overwritten: the tensors need no copy.
        """
        return dict(self.rows), self.num_frames, self.num_samples

    def restore(self, snapshot: tuple[dict[object, Tensor], int, int]) -> None:
        """Restore a snapshot."""
        self.rows, self.num_frames, self.num_samples = snapshot


class _WindowBatch:
    """Frames of several sequences that attend to at most the last `window` frames of their own, themselves included.

    Every frame is a sequence of one query over a copy of the keys it sees, so that the kernel sums them in the same
    order in whatever piece the frame comes.
    """

    states: StateBatch | None = None

    def __init__(self, states: Sequence[Code2WavState], num_new: int, window: int) -> None:
        self._carried, self._num_new, self._window = states, num_new, window
        rows, lengths, first = [], [], 0
        for state in states:
            num_before = min(state.num_frames, window - 1)
            for place in range(num_before, num_before + num_new):
                begin = max(place - window + 1, 0)
                rows.append(torch.arange(first + begin, first + place + 1))
                lengths.append(place + 1 - begin)
            first += num_before + num_new
        device = backend.device()
        self._rows = torch.cat(rows).to(device)
        self._key_starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        self.query_starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device)

    def attend(
        self,
        layer: int,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGK: Tensor,
        *,
        window: int,
        scale: float | None,
        soft_cap: float,
    ) -> Tensor:
        keys = self._seen(("keys", layer), k_TGK)
        values = self._seen(("values", layer), v_TGK)
        rules: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap}
        return varlen_attention(q_THK, keys, values, self.query_starts, self._key_starts, **rules)

    def _seen(self, name: object, new_TGK: Tensor) -> Tensor:
        """Return the rows that each query sees, concatenated, and keep the last ones for the next piece."""
        pieces = []
        for i, state in enumerate(self._carried):
            new = new_TGK[i * self._num_new : (i + 1) * self._num_new].flatten(1)
            before = state.rows.get(name)
            pieces.append(new if before is None else torch.cat((before, new)))
            state.rows[name] = pieces[-1][max(len(pieces[-1]) - self._window + 1, 0) :].clone()
        return embedding(self._rows, torch.cat(pieces)).view(-1, *new_TGK.shape[1:])


class ConvNextBlock:
    """x + gamma * out(gelu(in(norm(depthwise(x))))); gamma is folded into the last weight."""

    def __init__(self, name: str, width: int) -> None:
        self.depthwise = DepthwiseConv1d(f"{name}.dwconv.conv", width, KERNEL)
        self.norm = LayerNorm(f"{name}.norm", width, NORM_EPS)
        shard = partition.current().width("ConvNeXt width", 4 * width)
        self.inner = Linear([(f"{name}.pwconv1", 4 * width, shard)], width, bias=True)
        self.output = Linear(
            [(f"{name}.pwconv2", width)], 4 * width, column_shard=shard, bias=True, row_scale=f"{name}.gamma"
        )

    def __call__(self, x_BTC: Tensor, pieces: Pieces) -> Tensor:
        inner = self.inner(self.norm(self.depthwise(x_BTC, pieces)), activation="gelu_erf")
        return self.output(inner, residual=x_BTC)


class ResidualUnit:
    """x + conv2(snake2(conv1(snake1(x)))); the first convolution is dilated."""

    def __init__(self, name: str, channels: int, dilation: int) -> None:
        self.snake1 = Snake(f"{name}.act1", channels)
        self.conv1 = CausalConv1d(f"{name}.conv1.conv", channels, channels, KERNEL, dilation=dilation)
        self.snake2 = Snake(f"{name}.act2", channels)
        self.conv2 = PointwiseConv1d(f"{name}.conv2.conv", channels, channels)

    def __call__(self, x_BTC: Tensor, pieces: Pieces) -> None:
        """Add the unit's result to x in place."""
        inner = self.conv1(x_BTC, pieces, snake=self.snake1)
        self.conv2(self.snake2(inner, out=inner), x_BTC)


class DecoderBlock:
    """Upsampling to half the channels and `rate` times the rows, then residual units."""

    def __init__(self, name: str, channels: int, rate: int) -> None:
        self.snake = Snake(f"{name}.block.0", channels)
        self.upsample = TransposedConv1d(f"{name}.block.1.conv", channels, channels // 2, 2 * rate, rate)
        self.units = [
            ResidualUnit(f"{name}.block.{i}", channels // 2, dilation) for i, dilation in enumerate(DILATIONS, start=2)
        ]

    def __call__(self, x_BTC: Tensor, pieces: Pieces) -> Tensor:
        x_BTC = self.upsample(x_BTC, pieces, snake=self.snake)
        if x_BTC.shape[1]:
            for unit in self.units:
                with scope():
                    unit(x_BTC, pieces)
        return x_BTC


class Code2Wav:
    """Vocoder, from frames of codes to samples in [-1, 1]. A `SpeechModel` holds it."""

    def __init__(self, config: Code2WavConfig, name: str = CODE2WAV) -> None:
        self.config = config
        num_codes = config.codebook_size * config.num_quantizers
        self.embedding = Unpacked(f"{name}.code_embedding.weight", num_codes, config.width)
        specs = [_layer_spec(config)] * config.num_layers
        self.layers = [DecoderLayer(f"{name}.pre_transformer.layers.{i}", spec, i) for i, spec in enumerate(specs)]
        self.norm = hidden_norm(f"{name}.pre_transformer.norm", config.width, NormConfig(config.eps))
        self.ropes = ropes_of(specs)
        self.upsamples = [
            TransposedConv1d(f"{name}.upsample.{i}.0.conv", config.width, config.width, ratio, ratio)
            for i, ratio in enumerate(config.upsampling_ratios)
        ]
        self.convnexts = [
            ConvNextBlock(f"{name}.upsample.{i}.1", config.width) for i in range(len(config.upsampling_ratios))
        ]
        self.first = CausalConv1d(f"{name}.decoder.0.conv", config.width, config.decoder_width, KERNEL)
        num_blocks, channels = len(config.upsample_rates), config.decoder_width
        self.blocks = [
            DecoderBlock(f"{name}.decoder.{i + 1}", channels // 2**i, rate)
            for i, rate in enumerate(config.upsample_rates)
        ]
        self.snake = Snake(f"{name}.decoder.{num_blocks + 1}", channels // 2**num_blocks)
        self.last = CausalConv1d(f"{name}.decoder.{num_blocks + 2}.conv", channels // 2**num_blocks, 1, KERNEL)

    def decode(self, codes: Sequence[Tensor], states: Sequence[Code2WavState]) -> list[Tensor]:
        """Return the next samples of each sequence, fp32 [n], from its next frames int64 [T, Q] and its state.

        Sequences with as many frames and the same stage go through the network together. If it raises, all states are
        unchanged.
        """
        snapshots = [state.snapshot() for state in states]
        try:
            return self._decode(codes, states)
        except BaseException:
            for state, snapshot in zip(states, snapshots, strict=True):
                state.restore(snapshot)
            raise

    def _decode(self, codes: Sequence[Tensor], states: Sequence[Code2WavState]) -> list[Tensor]:
        parts: list[list[Tensor]] = [[] for _ in states]
        rest = list(codes)
        while waiting := [i for i, frames in enumerate(rest) if len(frames)]:
            first = waiting[0]
            kind = min(len(rest[first]), MAX_FRAMES), states[first].stage
            together = [i for i in waiting if (min(len(rest[i]), MAX_FRAMES), states[i].stage) == kind]
            with scope():
                samples = self._decode_together(
                    torch.stack([rest[i][: kind[0]] for i in together]), [states[i] for i in together]
                )
            for i, own in zip(together, samples, strict=True):
                parts[i].append(own)
                rest[i] = rest[i][kind[0] :]
        return [torch.cat(own) if own else torch.empty(0) for own in parts]

    def _decode_together(self, codes_BTQ: Tensor, states: Sequence[Code2WavState]) -> Tensor:
        """Return samples fp32 [B, n] of sequences of one stage."""
        pieces = Pieces(states)
        x_BTC = self._frames(codes_BTQ, states)
        for upsample, convnext in zip(self.upsamples, self.convnexts, strict=True):
            x_BTC = convnext(upsample(x_BTC, pieces), pieces)
        x_BTC = self.first(x_BTC, pieces)
        for block in self.blocks:
            if x_BTC.shape[1]:
                x_BTC = block(x_BTC, pieces)
        samples = x_BTC.new_empty(len(states), 0)
        if x_BTC.shape[1]:
            samples = self.last(x_BTC, pieces, snake=self.snake)[..., 0]
        for state in states:
            state.num_frames += codes_BTQ.shape[1]
            state.num_samples += samples.shape[1]
        return samples.float().clamp(-1, 1)  # a copy

    def _frames(self, codes_BTQ: Tensor, states: Sequence[Code2WavState]) -> Tensor:
        """Return the transformer's result for frames [B, T, C]; each starts as the mean of its codes' embeddings."""
        batch_size, num_frames, num_codes = codes_BTQ.shape
        offsets = torch.arange(num_codes, device=codes_BTQ.device) * self.config.codebook_size
        rows = embedding((codes_BTQ + offsets).flatten(), self.embedding.value)
        x_TD = rows.view(-1, num_codes, self.config.width).float().mean(1).to(rows.dtype)
        places = torch.arange(num_frames, device=codes_BTQ.device)
        positions = torch.cat([state.num_frames + places for state in states])
        ropes = self.ropes.tables(positions[None])
        batch = _WindowBatch(states, num_frames, self.config.window)
        for layer, rope in zip(self.layers, ropes, strict=True):
            layer(x_TD, batch, rope)
        return self.norm(x_TD).view(batch_size, num_frames, -1)


def _layer_spec(config: Code2WavConfig) -> LayerSpec:
    """Return the spec of every layer of the transformer."""
    attention = AttentionConfig(
        width=config.width,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_width=config.head_width,
        rope=RopeConfig(config.head_width, config.rope_theta, {}, config.max_positions),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        window=config.window,
    )
    mlp = MlpConfig(config.mlp_width, config.activation)
    return LayerSpec(attention, mlp, NormConfig(config.eps), scales_rows=True)


def build(config: Mapping[str, object]) -> Code2Wav:
    """Return the network that a code2wav_config describes, without weights."""
    return Code2Wav(Code2WavConfig.from_dict(config))
