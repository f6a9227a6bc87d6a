"""Rotary positions of a language model: frequencies from its config, tables for a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilewright.ops import rope as ops
from tilewright.types import UnsupportedConfig


@dataclass(frozen=True)
class RopeConfig:
    """The rope entries of a checkpoint's config, under whichever of their names it uses."""

    width: int  # of a head's first elements that are turned: all of them, or the part a config says
    theta: float
    scaling: Mapping[str, object] = field(default_factory=dict)
    max_context: int = 0

    @classmethod
    def from_dict(cls, config: Mapping[str, object], head_width: int) -> RopeConfig:
        # `rope_parameters` holds all of it in newer files; older ones have `rope_theta` beside `rope_scaling`.
        parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(parameters, Mapping):
            raise UnsupportedConfig(f"rope parameters are {parameters!r}, expected a table")
        theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
        max_context = config.get("max_position_embeddings", 0)
        part = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        width = int(head_width * float(part))
        if not 0 < width <= head_width or width % 2:
            raise UnsupportedConfig(
                f"partial_rotary_factor is {part}, which turns {width} elements of a head of {head_width}, expected an "
                f"even number, 2 to {head_width}"
            )
        return cls(width, float(theta), dict(parameters), int(max_context))  # type: ignore[call-overload]

    @property
    def kind(self) -> str:
        return str(self.scaling.get("rope_type", self.scaling.get("type", "default")))

    def number(self, key: str, default: float | None = None) -> float:
        value = self.scaling.get(key, default)
        if not isinstance(value, (int, float)):
            raise UnsupportedConfig(f"rope type {self.kind!r} has {key} {value!r}, expected a number")
        return float(value)


class Rope:
    """cos and sin tables for positions on one axis, or on three that are interleaved over the frequencies (M-RoPE)."""

    def __init__(self, config: RopeConfig) -> None:
        self.inv_freq, self.attention_scaling = _frequencies(config)
        section = config.scaling.get("mrope_section")
        if section is None:
            self.num_axes = 1
            self.axis_of_frequency = ops.plain_axes(len(self.inv_freq))
        else:
            self.num_axes = 3
            axes = ops.interleaved_axes if config.scaling.get("mrope_interleaved") else ops.sectioned_axes
            self.axis_of_frequency = axes(list(section))  # type: ignore[call-overload]
            if len(self.axis_of_frequency) != len(self.inv_freq):
                raise UnsupportedConfig(
                    f"mrope_section is {section!r}, expected a sum of {len(self.inv_freq)}: half of the turned part of "
                    "a head"
                )

    def tables(self, positions_AT: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, fp32 [T, R/2] each, R of a head's elements being turned."""
        return ops.rope_table(positions_AT, self.inv_freq, self.axis_of_frequency, self.attention_scaling)


def _frequencies(config: RopeConfig) -> tuple[Tensor, float]:
    """Inverse frequencies fp32 [R/2] and the factor on cos and sin."""
    exponents = torch.arange(0, config.width, 2, dtype=torch.float32) / config.width
    inv_freq = 1.0 / (config.theta**exponents)
    if config.kind in ("default", "mrope"):
        return inv_freq, 1.0
    if config.kind == "linear":
        return inv_freq / config.number("factor"), 1.0
    if config.kind == "llama3":
        return _llama3(inv_freq, config), 1.0
    if config.kind == "yarn":
        return _yarn(inv_freq, config)
    raise UnsupportedConfig(f"rope type is {config.kind!r}, expected default, linear, llama3 or yarn")


def _llama3(inv_freq: Tensor, config: RopeConfig) -> Tensor:
    """Slow frequencies divided by the factor, fast ones kept, those between blended."""
    factor, context = config.number("factor"), config.number("original_max_position_embeddings")
    low, high = config.number("low_freq_factor"), config.number("high_freq_factor")
    turns = context * inv_freq / (2 * math.pi)  # of each frequency within the original context
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inv_freq / factor + blend * inv_freq


def _yarn(inv_freq: Tensor, config: RopeConfig) -> tuple[Tensor, float]:
    """The same idea with the borders given in turns (beta), a ramp over the index, and a temperature on attention."""
    context = config.number("original_max_position_embeddings", config.max_context)
    factor = config.number("factor")
    width = config.width

    def index_of(turns: float) -> float:
        return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low = index_of(config.number("beta_fast", 32))
    high = index_of(config.number("beta_slow", 1))
    if config.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    scaling = config.scaling.get("attention_factor")
    if scaling is None:
        scaling = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), float(scaling)  # type: ignore[arg-type]
