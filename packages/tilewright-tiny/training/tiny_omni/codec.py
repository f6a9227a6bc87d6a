"""The codec: sounds to frames of codes and back. Its decoder is the family's code2wav, with the checkpoint's names.

The encoder and the quantisers are for training alone. The encoder sees mel frames, which have no phase: codes say what
is heard, and code2wav finds a phase of its own. Each quantiser has a codebook in a few dimensions for what is left by
those before it; code2wav's table has the rows of all codebooks as the decoder sees them.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.tiny_vl.network import rotate

SAMPLE_RATE = 24_000
LATENT = 64  # dimensions of the codebooks
ENCODER_WIDTH = 256
MEL_BINS, MEL_WINDOW, MEL_HOP = 80, 1024, 240
KERNEL, DILATIONS = 7, (1, 3, 9)
DECAY, DEAD_BELOW = 0.99, 0.2  # of the codebooks' running means; rows used less are put where there is something
MARGIN = 1e-9  # Snake's own


class CausalConv(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: int, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, dilation=dilation, groups=groups)
        self.before = (kernel - 1) * dilation

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (self.before, 0)))


class TransposedConv(nn.Module):
    """What only one of the rows makes that it should be made of is cut off, on both sides."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(inputs, outputs, kernel, stride)
        self.cut = kernel - stride

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y[..., self.cut : y.shape[-1] - self.cut]


class ConvNext(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(width, width, KERNEL, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1 = nn.Linear(width, 4 * width)
        self.pwconv2 = nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.pwconv1(self.norm(self.dwconv(x).transpose(1, 2)))
        return x + (self.gamma * self.pwconv2(F.gelu(y))).transpose(1, 2)


class Snake(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha, self.beta = (nn.Parameter(torch.zeros(channels)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        alpha, beta = self.alpha.exp()[:, None], self.beta.exp()[:, None]
        # sin has to be exact: its argument may be large.
        return x + ((x.float() * alpha).sin().square() / (beta + MARGIN)).to(x.dtype)


class ResidualUnit(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1, self.act2 = Snake(channels), Snake(channels)
        self.conv1 = CausalConv(channels, channels, KERNEL, dilation)
        self.conv2 = CausalConv(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.act2(self.conv1(self.act1(x))))


class DecoderBlock(nn.Module):
    def __init__(self, channels: int, rate: int) -> None:
        super().__init__()
        half = channels // 2
        upsample = TransposedConv(channels, half, 2 * rate, rate)
        self.block = nn.Sequential(Snake(channels), upsample, *(ResidualUnit(half, d) for d in DILATIONS))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.block(x))


class Attention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, self.num_heads = config["hidden_size"], config["num_attention_heads"]
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, attn_mask=mask)
        return cast(Tensor, self.o_proj(y.transpose(1, 2).flatten(-2)))


class Mlp(nn.Module):
    """silu(gate) * up, then down."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn = Attention(config)
        self.mlp = Mlp(width, config["intermediate_size"])
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(width, eps=eps) for _ in range(2))
        self.self_attn_layer_scale, self.mlp_layer_scale = Scale(width), Scale(width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), cos, sin, mask))
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))


class Transformer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device)
        head_dim = self.config["hidden_size"] // self.config["num_attention_heads"]
        rates = self.config["rope_theta"] ** -(torch.arange(0, head_dim, 2, device=x.device) / head_dim)
        angles = place[:, None] * rates
        back = place[:, None] - place
        mask = (back >= 0) & (back < self.config["sliding_window"])
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin(), mask)
        return cast(Tensor, self.norm(x))


class Code2Wav(nn.Module):
    """The same computation and names as transformers'."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        width, channels = config["hidden_size"], config["decoder_dim"]
        num_rows = config["codebook_size"] * config["num_quantizers"]
        self.code_embedding = nn.Embedding(num_rows, width).requires_grad_(False)  # `Codec.fill_table` writes it
        self.pre_transformer = Transformer(config)
        self.upsample = nn.ModuleList(
            nn.Sequential(TransposedConv(width, width, ratio, ratio), ConvNext(width))
            for ratio in config["upsampling_ratios"]
        )
        rates = config["upsample_rates"]
        last = channels // 2 ** len(rates)
        self.decoder = nn.Sequential(
            CausalConv(width, channels, KERNEL),
            *(DecoderBlock(channels // 2**index, rate) for index, rate in enumerate(rates)),
            Snake(last),
            CausalConv(last, 1, KERNEL),
        )

    def forward(self, codes_BQT: Tensor) -> Tensor:
        """Samples (batch, count) of codes (batch, quantisers, frames)."""
        offsets = torch.arange(codes_BQT.shape[1], device=codes_BQT.device) * self.config["codebook_size"]
        return self.samples_of(self.code_embedding(codes_BQT + offsets[:, None]).mean(1))

    def samples_of(self, x_BTD: Tensor) -> Tensor:
        """Samples (batch, count) of frames' rows (batch, frames, width): a little fewer than frames last."""
        x = self.pre_transformer(x_BTD).transpose(1, 2)
        for stage in self.upsample:
            x = stage(x)
        return cast(Tensor, self.decoder(x)[:, 0])


class Encoder(nn.Module):
    """Mel frames to rows of codes' frames; it looks a little ahead, and is not needed to speak."""

    def __init__(self, hops_per_frame: int) -> None:
        super().__init__()
        width = ENCODER_WIDTH
        strides = {4: (2, 2), 8: (2, 2, 2)}[hops_per_frame]
        stages: list[nn.Module] = [nn.Conv1d(MEL_BINS, width, KERNEL, padding=KERNEL // 2), Around(width)]
        for stride in strides:
            stages += [nn.Conv1d(width, width, 2 * stride, stride, padding=stride // 2), Around(width), Around(width)]
        self.stages = nn.Sequential(*stages)
        self.out = nn.Linear(width, LATENT)

    def forward(self, mel_BMT: Tensor) -> Tensor:
        return cast(Tensor, self.out(self.stages(mel_BMT).transpose(1, 2)))


class Around(nn.Module):
    """A ConvNeXt block that sees as far ahead as back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(width, width, KERNEL, padding=KERNEL // 2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).transpose(1, 2))
        return x + self.outer(F.gelu(self.inner(y))).transpose(1, 2)


class Quantiser(nn.Module):
    """A codebook of running means."""

    rows: Tensor
    sums: Tensor
    counts: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(size, LATENT))
        self.register_buffer("sums", torch.zeros(size, LATENT))
        self.register_buffer("counts", torch.zeros(size))

    def nearest(self, x_ND: Tensor) -> Tensor:
        return (self.rows.square().sum(1) - 2 * x_ND @ self.rows.T).argmin(1)

    @torch.no_grad()
    def learn(self, x_ND: Tensor, codes_N: Tensor) -> None:
        chosen = F.one_hot(codes_N, len(self.rows)).to(x_ND.dtype)
        self.counts.lerp_(chosen.sum(0), 1 - DECAY)
        self.sums.lerp_(chosen.T @ x_ND, 1 - DECAY)
        spare = x_ND[torch.randint(len(x_ND), (len(self.rows),), device=x_ND.device)]
        is_dead = self.counts < DEAD_BELOW * len(x_ND) / len(self.rows) / 4
        self.counts.copy_(torch.where(is_dead, torch.ones_like(self.counts), self.counts))
        self.sums.copy_(torch.where(is_dead[:, None], spare, self.sums))
        self.rows.copy_(self.sums / self.counts[:, None].clamp(min=1e-5))


class Codec(nn.Module):
    """Encoder, quantisers and code2wav."""

    mel: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.samples_per_frame = math.prod(config["upsample_rates"]) * math.prod(config["upsampling_ratios"])
        self.encoder = Encoder(self.samples_per_frame // MEL_HOP)
        self.quantisers = nn.ModuleList(Quantiser(config["codebook_size"]) for _ in range(config["num_quantizers"]))
        self.out = nn.Linear(LATENT, config["hidden_size"], bias=False)
        self.code2wav = Code2Wav(config)
        self.register_buffer("mel", mel_filter(MEL_WINDOW, MEL_BINS), persistent=False)

    def latents(self, samples_BN: Tensor) -> Tensor:
        """(batch, frames, LATENT) of samples, of which there are whole frames."""
        with torch.autocast(samples_BN.device.type, enabled=False):
            mel = log_mel(samples_BN, MEL_WINDOW, MEL_HOP, self.mel)
        return cast(Tensor, self.encoder(mel))

    def codes(self, samples_BN: Tensor) -> Tensor:
        """(batch, frames, quantisers) of samples."""
        return self.quantised(self.latents(samples_BN))[1]

    def quantised(self, x_BTD: Tensor, *, is_learning: bool = False) -> tuple[Tensor, Tensor]:
        """The rows chosen, summed up, and which they are; in fp32, for a row is nearest by little."""
        with torch.autocast(x_BTD.device.type, enabled=False):
            return self._quantised(x_BTD.float(), is_learning)

    def _quantised(self, x_BTD: Tensor, is_learning: bool) -> tuple[Tensor, Tensor]:
        rest = x_BTD.detach().flatten(0, 1)
        total, codes = torch.zeros_like(rest), []
        for quantiser in cast("list[Quantiser]", list(self.quantisers)):
            chosen = quantiser.nearest(rest)
            if is_learning:
                quantiser.learn(rest, chosen)
            picked = quantiser.rows[chosen]
            total, rest = total + picked, rest - picked
            codes.append(chosen)
        return total.view_as(x_BTD), torch.stack(codes, 1).unflatten(0, x_BTD.shape[:2])

    def misread(self, codes_BTQ: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """The rows of codes, summed up, and the codes, of which those after the first are others now and then."""
        others = torch.randint_like(codes_BTQ, len(cast(Quantiser, self.quantisers[0]).rows))
        is_other = torch.rand(codes_BTQ.shape, device=codes_BTQ.device) < share
        is_other[..., 0] = False
        codes = torch.where(is_other, others, codes_BTQ)
        rows = [cast(Quantiser, quantiser).rows[codes[..., i]] for i, quantiser in enumerate(self.quantisers)]
        return torch.stack(rows).sum(0), codes

    @torch.no_grad()
    def fill_table(self) -> None:
        """Writes code2wav's table: the mean of a frame's rows is what the decoder was trained on."""
        rows = [self.out(cast(Quantiser, quantiser).rows) * len(self.quantisers) for quantiser in self.quantisers]
        self.code2wav.code_embedding.weight.copy_(torch.cat(rows))


def mel_filter(window: int, num_bins: int, most_hz: float = 12_000.0) -> Tensor:
    """(bins, frequencies): triangles of one height whose corners are evenly spaced to the ear."""
    corners = torch.linspace(0, 2595 * math.log10(1 + most_hz / 700), num_bins + 2)
    hertz = 700 * (10 ** (corners / 2595) - 1)
    frequencies = torch.linspace(0, SAMPLE_RATE / 2, window // 2 + 1)
    up = (frequencies - hertz[:-2, None]) / (hertz[1:-1] - hertz[:-2])[:, None]
    down = (hertz[2:, None] - frequencies) / (hertz[2:] - hertz[1:-1])[:, None]
    return torch.minimum(up, down).clamp(min=0)


def magnitudes(samples_BN: Tensor, window: int, hop: int) -> Tensor:
    """(batch, frequencies, frames), a frame for each hop, in fp32."""
    edge = (window - hop) // 2
    padded = F.pad(samples_BN.float(), (edge, window - hop - edge))
    shape = torch.hann_window(window, device=samples_BN.device)
    spectrum = torch.stft(padded, window, hop, window=shape, center=False, return_complex=True)
    power = spectrum.real.square() + spectrum.imag.square()
    return (power + 1e-9).sqrt()  # its slope is finite


def log_mel(samples_BN: Tensor, window: int, hop: int, filters: Tensor) -> Tensor:
    return (filters @ magnitudes(samples_BN, window, hop) + 1e-3).log()
