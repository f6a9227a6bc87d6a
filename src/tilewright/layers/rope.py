"""Rotary positions of language models, from their config, and on the axes of images and videos."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilewright.ops import backend
from tilewright.ops import embedding as ops
from tilewright.types import UnsupportedConfig


def rope_parameters(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the rope entries of a config beside `rope_theta`; equal tables for several layer types count as one."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise UnsupportedConfig(f"rope parameters are {given!r}, expected a table")
    by_type = {name: table for name, table in given.items() if isinstance(table, Mapping)}
    if not by_type:
        return given
    used = config.get("layer_types")
    tables = [table for name, table in by_type.items() if not isinstance(used, (list, tuple)) or name in used]
    if not tables or any(table != tables[0] for table in tables):
        raise UnsupportedConfig(
            f"rope_parameters has tables for {', '.join(map(str, by_type))}, expected one, or the same for each of the "
            "model's layer_types"
        )
    return {**{name: value for name, value in given.items() if name not in by_type}, **tables[0]}


@dataclass(frozen=True)
class RopeConfig:
    """The rope entries of a checkpoint's config, under whichever of their names it uses."""

    width: int  # how many of a head's first elements are rotated: all, or the part a config says
    theta: float
    scaling: Mapping[str, object] = field(default_factory=dict)
    max_positions: int = 0  # max_position_embeddings

    @classmethod
    def from_dict(cls, config: Mapping[str, object], head_width: int) -> RopeConfig:
        # Newer files have all of it in `rope_parameters`, older ones `rope_theta` beside `rope_scaling`.
        parameters = dict(rope_parameters(config))
        if "original_max_position_embeddings" in config:  # where Phi-3 has it
            parameters.setdefault("original_max_position_embeddings", config["original_max_position_embeddings"])
        theta = _number("rope_theta", parameters.get("rope_theta", config.get("rope_theta", 10000.0)))
        max_positions = _number("max_position_embeddings", config.get("max_position_embeddings"))
        part = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        width = int(head_width * _number("partial_rotary_factor", part))
        if not 0 < width <= head_width or width % 2:
            raise UnsupportedConfig(
                f"partial_rotary_factor is {part}, which rotates {width} elements of a head of {head_width}, expected "
                f"an even number, 2 to {head_width}"
            )
        return cls(width, theta, parameters, int(max_positions))

    @property
    def longest_context(self) -> int:
        """Context length with scaling, as vLLM computes it: the trained length times the factor.

        longrope and llama3 configs give the scaled length itself.
        """
        if self.kind not in ("linear", "dynamic", "yarn"):
            return self.max_positions
        return max(self.max_positions, int(self.trained_context * self.factor))

    @property
    def trained_context(self) -> float:
        return self._positive("original_max_position_embeddings", self.max_positions)

    @property
    def factor(self) -> float:
        """Scaling factor; without one in the config, its context length over the trained one."""
        return self._positive("factor", self.max_positions / self.trained_context)

    @property
    def kind(self) -> str:
        return str(self.scaling.get("rope_type", self.scaling.get("type", "default")))

    def number(self, key: str, default: float | None = None) -> float:
        return _number(f"rope type {self.kind!r} has {key}", self.scaling.get(key, default), "")

    def _positive(self, key: str, default: float) -> float:
        value = self.number(key, default)
        if not value > 0:
            raise UnsupportedConfig(f"rope type {self.kind!r} has {key} {value}, expected more than 0")
        return value

    def numbers(self, key: str) -> Tensor:
        """Return scaling[key], one number per frequency."""
        values = self.scaling.get(key)
        if not isinstance(values, (list, tuple)) or len(values) != self.width // 2:
            found = f"{len(values)} entries" if isinstance(values, (list, tuple)) else repr(values)
            raise UnsupportedConfig(
                f"rope type {self.kind!r} has {key} with {found}, expected {self.width // 2} numbers"
            )
        return torch.tensor([_number(key, value) for value in values])


def _number(name: str, value: object, verb: str = " is") -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise UnsupportedConfig(f"{name}{verb} {value!r}, expected a number")
    return float(value)


RopeTables = tuple[Tensor, Tensor]  # cos and sin, fp32 [T, R/2] each, for R rotated elements of a head


class Rope:
    """cos and sin tables for positions on one axis, or on three with sections of frequencies each (M-RoPE)."""

    def __init__(self, config: RopeConfig) -> None:
        self.config = config
        self.fit(config.max_positions)
        section = config.scaling.get("mrope_section")
        if section is None:
            self.num_axes = 1
            axis_of_frequency = ops.plain_axes(len(self.inv_freq))
        else:
            self.num_axes = 3
            axes = ops.interleaved_axes if config.scaling.get("mrope_interleaved") else ops.sectioned_axes
            axis_of_frequency = axes(list(section))  # type: ignore[call-overload]
            if len(axis_of_frequency) != len(self.inv_freq):
                raise UnsupportedConfig(
                    f"mrope_section is {section!r}, expected a sum of {len(self.inv_freq)}: half of the rotated part "
                    "of a head"
                )
        self.axis_of_frequency = axis_of_frequency.to(backend.device())

    def fit(self, max_context: int) -> None:
        """Choose the frequencies for contexts of up to `max_context` tokens, if they depend on the length.

        Once for all sequences, as in vLLM: transformers chooses anew as a sequence grows, but by then keys rotated with
        other frequencies are in the cache, and shared with other sequences.
        """
        inv_freq, self.attention_scaling = _frequencies(self.config, max_context)
        self.inv_freq = inv_freq.to(backend.device())

    def tables(self, positions_AT: Tensor) -> RopeTables:
        return ops.rope_table(positions_AT, self.inv_freq, self.axis_of_frequency, self.attention_scaling)


class LayerRopes:
    """The rope of each layer of a decoder; layers with equal configs share one and its tables."""

    def __init__(self, configs: Sequence[RopeConfig | None]) -> None:
        """Take the configs of the layers; None: the layer has no rope."""
        distinct: list[RopeConfig] = []
        for config in configs:
            if config is not None and config not in distinct:
                distinct.append(config)
        self.ropes = [Rope(config) for config in distinct]
        self._of_layer = [0 if config is None else distinct.index(config) for config in configs]

    @property
    def num_axes(self) -> int:
        return self.ropes[0].num_axes

    def fit(self, max_context: int) -> None:
        """Choose frequencies as `Rope.fit` does."""
        for rope in self.ropes:
            rope.fit(max_context)

    def of(self, config: RopeConfig) -> Rope:
        """Return the rope of the layers with this config."""
        return next(rope for rope in self.ropes if rope.config == config)

    def tables(self, positions_AT: Tensor) -> list[RopeTables]:
        """Return the tables of each layer; a layer without rope gets those of another and ignores them."""
        made = [rope.tables(positions_AT) for rope in self.ropes]
        return [made[place] for place in self._of_layer]


class AxialRope:
    """Tables for positions on several axes; each rotates a part of a head, in pairs of neighbours 2j, 2j + 1."""

    def __init__(self, widths: Sequence[int], theta: float) -> None:
        # In fp64, as in diffusers: rounded once.
        frequencies = [theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width) for width in widths]
        self.inv_freq = torch.cat(frequencies).float().to(backend.device())
        counts = torch.tensor([len(of_axis) for of_axis in frequencies])
        self.axes = torch.arange(len(widths), dtype=torch.int32).repeat_interleave(counts).to(backend.device())

    def tables(self, positions_AT: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, fp32 [T, K/2] each."""
        return ops.rope_table(positions_AT.to(backend.device()), self.inv_freq, self.axes)


def _frequencies(config: RopeConfig, max_context: int) -> tuple[Tensor, float]:
    """Return inverse frequencies fp32 [R/2] and the factor on cos and sin, for up to `max_context` tokens."""
    theta = _dynamic_theta(config, max_context) if config.kind == "dynamic" else config.theta
    exponents = torch.arange(0, config.width, 2, dtype=torch.float32) / config.width
    inv_freq = 1.0 / (theta**exponents)
    if config.kind in ("default", "mrope", "dynamic"):
        return inv_freq, 1.0
    if config.kind == "linear":
        return inv_freq / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(inv_freq, config), 1.0
    if config.kind == "yarn":
        return _yarn(inv_freq, config)
    if config.kind == "longrope":
        return _longrope(inv_freq, config, max_context)
    raise UnsupportedConfig(
        f"rope type is {config.kind!r}, expected default, linear, dynamic, llama3, yarn or longrope"
    )


def _dynamic_theta(config: RopeConfig, max_context: int) -> float:
    """Return a larger base, with which the slowest frequency turns as far over the context as over the trained one."""
    factor, stretch = config.factor, max(max_context / config.max_positions, 1.0)
    return config.theta * (factor * stretch - (factor - 1)) ** (config.width / (config.width - 2))


def _longrope(inv_freq: Tensor, config: RopeConfig, max_context: int) -> tuple[Tensor, float]:
    """Divide each frequency by its own factor: one list for contexts up to the trained length, one for longer ones."""
    divisors = config.numbers("long_factor" if max_context > config.trained_context else "short_factor")
    scaling = config.scaling.get("attention_factor")
    if scaling is None:
        scaling = (
            math.sqrt(1 + math.log(config.factor) / math.log(config.trained_context)) if config.factor > 1 else 1.0
        )
    return inv_freq / divisors, _number("attention_factor", scaling)


def _llama3(inv_freq: Tensor, config: RopeConfig) -> Tensor:
    """Divide slow frequencies by the factor, keep fast ones, and blend those between."""
    factor, context = config.number("factor"), config.number("original_max_position_embeddings")
    low, high = config.number("low_freq_factor"), config.number("high_freq_factor")
    turns = context * inv_freq / (2 * math.pi)  # of each frequency within the original context
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inv_freq / factor + blend * inv_freq


def _yarn(inv_freq: Tensor, config: RopeConfig) -> tuple[Tensor, float]:
    """Blend like `_llama3`, with borders in turns (beta), a ramp over the index, and a temperature on attention."""
    context, factor, width = config.trained_context, config.factor, config.width

    def index_of(turns: float) -> float:
        return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low = index_of(config.number("beta_fast", 32))
    high = index_of(config.number("beta_slow", 1))
    if config.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), _yarn_scaling(config)


def _yarn_scaling(config: RopeConfig) -> float:
    """Return the temperature: as stated, or from the factor; with both of DeepSeek's scales, their ratio."""
    if "attention_factor" in config.scaling:
        return config.number("attention_factor")
    scales = [config.number(key, 0.0) for key in ("mscale", "mscale_all_dim")]
    above, below = scales if all(scales) else (1.0, 0.0)
    growth = 0.1 * math.log(config.factor) if config.factor > 1 else 0.0
    return (above * growth + 1) / (below * growth + 1)
