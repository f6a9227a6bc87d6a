"""A gated delta net, the linear attention of Qwen3.5 and Qwen3-Next: a state per head instead of keys and values.

C channels (all q, all k, all v) pass a short convolution over time; G key heads of width K and H value heads of width
V then read and write the state [H, K, V] token by token (ops/gated_delta.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from tilewright.layers import partition
from tilewright.layers.batch import SequenceBatch
from tilewright.layers.linear import Linear
from tilewright.layers.rope import RopeTables
from tilewright.ops.conv import causal_conv
from tilewright.ops.gated_delta import delta_gates, gated_delta_rule, split_projections
from tilewright.ops.norm import rms_norm
from tilewright.types import UnsupportedConfig
from tilewright.weights.conv import ConvTaps, Unpacked
from tilewright.weights.spec import PADDING, HeadShard, Shard, shard_of


@dataclass(frozen=True)
class GatedDeltaConfig:
    width: int
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    num_taps: int
    eps: float
    interleaved: bool  # two projections ordered by key head (Qwen3-Next) instead of one each for qkv, z, b and a

    def __post_init__(self) -> None:
        if min(self.key_heads, self.value_heads) < 1 or self.value_heads % self.key_heads:
            raise UnsupportedConfig(
                f"linear_num_value_heads is {self.value_heads}, expected a multiple of the {self.key_heads} key heads, "
                "1 or more of each"
            )
        if self.num_taps < 1:
            raise UnsupportedConfig(f"linear_conv_kernel_dim is {self.num_taps}, expected 1 or more")

    @property
    def keys_width(self) -> int:
        return self.key_heads * self.key_width

    @property
    def values_width(self) -> int:
        return self.value_heads * self.value_width

    @property
    def num_channels(self) -> int:
        return 2 * self.keys_width + self.values_width


def heads_of(config: GatedDeltaConfig) -> HeadShard:
    """Return this rank's value heads ("queries") and the key heads whose queries and keys they use ("keys")."""
    widths = config.key_width, config.value_width
    return partition.current().heads("delta-net", config.value_heads, config.key_heads, *widths)


def own_config(config: GatedDeltaConfig) -> GatedDeltaConfig:
    """Return the config of this rank's heads."""
    heads = heads_of(config)
    return replace(config, key_heads=heads.num_keys, value_heads=heads.num_queries)


def _channels(config: GatedDeltaConfig, heads: HeadShard) -> Shard:
    """Return this rank's shard of the channels: all q, all k, all v."""
    keys, values = heads.keys.times(config.key_width), heads.queries.times(config.value_width)
    return keys + keys.after(config.keys_width) + values.after(2 * config.keys_width)


def _parts(config: GatedDeltaConfig, heads: HeadShard) -> list[tuple[str, int, Shard]]:
    """Return the projections of Qwen3.5: one each for q|k|v, z, b and a."""
    return [
        ("in_proj_qkv", config.num_channels, _channels(config, heads)),
        ("in_proj_z", config.values_width, heads.queries.times(config.value_width)),
        ("in_proj_b", config.value_heads, heads.queries),
        ("in_proj_a", config.value_heads, heads.queries),
    ]


def _interleaved_parts(config: GatedDeltaConfig, heads: HeadShard) -> list[tuple[str, int, Shard]]:
    """Return the projections of Qwen3-Next, by key head: its q, k, values and gates z; and its b and a."""
    per_key = config.value_heads // config.key_heads
    key_width, value_width = config.key_width, config.value_width
    key_rows = 2 * key_width + 2 * per_key * value_width
    own_values, per_own_key = heads.queries.entries(), heads.num_queries // heads.num_keys
    qkvz, ba = Shard(()), Shard(())
    for place, key in enumerate(heads.keys.entries()):
        values = own_values[place * per_own_key : (place + 1) * per_own_key]
        in_key = shard_of([PADDING if value == PADDING else value % per_key for value in values])
        rows = in_key.times(value_width)
        of_key = Shard.whole(2 * key_width) + rows.after(2 * key_width)
        of_key += rows.after(2 * key_width + per_key * value_width)
        gates = in_key + in_key.after(per_key)
        if key == PADDING:
            of_key, gates = Shard(((PADDING, of_key.length),)), Shard(((PADDING, gates.length),))
        else:
            of_key, gates = of_key.after(key * key_rows), gates.after(key * 2 * per_key)
        qkvz, ba = qkvz + of_key, ba + gates
    return [
        ("in_proj_qkvz", config.num_channels + config.values_width, qkvz),
        ("in_proj_ba", 2 * config.value_heads, ba),
    ]


class GatedDeltaNet:
    """A gated delta net: the concatenated outputs of the heads; `output` projects them back to the model's width.

    `layer` counts only recurrent layers.
    """

    def __init__(self, name: str, config: GatedDeltaConfig, layer: int) -> None:
        self.layer = layer
        self.config = own_config(config)  # of this rank's heads
        heads = heads_of(config)
        channels, values = _channels(config, heads), heads.queries.times(config.value_width)
        parts = _interleaved_parts(config, heads) if config.interleaved else _parts(config, heads)
        # b and a, which give the decay and beta of every head, act over a whole answer: they are not quantised.
        self.projections = Linear(
            [(f"{name}.{part}", rows, shard) for part, rows, shard in parts],
            config.width,
            num_exact=1 if config.interleaved else 2,
        )
        self.conv = ConvTaps(f"{name}.conv1d", config.num_channels, config.num_taps, channels)
        # The decay over a whole answer depends on these: fp32 as released, exact if a checkpoint has bf16.
        self.a_log = Unpacked(f"{name}.A_log", config.value_heads, in_fp32=True, shard=heads.queries)
        self.dt_bias = Unpacked(f"{name}.dt_bias", config.value_heads, in_fp32=True, shard=heads.queries)
        self.norm = Unpacked(f"{name}.norm.weight", config.value_width, in_fp32=True)
        self.output = Linear([(f"{name}.out_proj", config.width)], config.values_width, column_shard=values)

    def __call__(self, h_TD: Tensor, batch: SequenceBatch, rope: RopeTables) -> Tensor:
        """Return the heads' outputs [T, H * V]. Positions are not used: the states carry the order of tokens."""
        config, states, starts = self.config, batch.states, batch.query_starts
        assert states is not None, "a model with recurrent layers was given a batch without states"
        slots = states.read_slots, states.write_slots
        qkv_TC, z_THV, b_TH, a_TH = self._split(self.projections(h_TD))
        mixed_TC = causal_conv(qkv_TC, self.conv.value, states.conv_states[self.layer], starts, *slots)
        q_TGK, k_TGK, v_THV = (
            part.unflatten(1, (-1, width))
            for part, width in zip(
                mixed_TC.split([config.keys_width, config.keys_width, config.values_width], dim=1),
                (config.key_width, config.key_width, config.value_width),
                strict=True,
            )
        )
        g_TH, beta_TH = delta_gates(a_TH, b_TH, self.a_log.value, self.dt_bias.value)
        out_THV = gated_delta_rule(q_TGK, k_TGK, v_THV, g_TH, beta_TH, states.delta_states[self.layer], starts, *slots)
        rms_norm(out_THV, self.norm.value, config.eps, gate=z_THV, out=out_THV)
        return out_THV.view(h_TD.shape[0], -1)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q|k|v [T, C], z [T, H, V], b and a [T, H]; views, except for interleaved projections."""
        config = self.config
        heads, values = config.value_heads, config.values_width
        if config.interleaved:
            qkvz, ba = projected.split([config.num_channels + values, 2 * heads], dim=1)
            return split_projections(
                qkvz, ba, config.key_heads, heads, config.key_width, config.value_width, interleaved=True
            )
        qkv, z, b, a = projected.split([config.num_channels, values, heads, heads], dim=1)
        return qkv, z.unflatten(1, (heads, config.value_width)), b, a
