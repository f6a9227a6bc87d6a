"""The Engine's options. Each is declared here alone; imports no torch, since the commands' flags are made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.inputs.media import MediaLimits
from tilewright.options import option


@dataclass(frozen=True)
class EngineOptions:
    """How a model is loaded and run."""

    dtype: str = option(
        "auto",
        "type of weights, keys and values",
        choices=("auto", "bfloat16", "float32"),
        default_means="that of the checkpoint",
    )
    quantize: str | None = option(
        None,
        "quantise weights while loading: int8 and fp8 take half of bf16's memory, int4 a quarter, auto chooses by "
        "memory and measured speed; none: dequantise a quantised checkpoint",
        choices=("int8", "int4", "fp8", "auto", "none"),
        default_means="as stored",
        note="docs/quantisation.md tells what each costs",
    )
    mmproj: str | Path | None = option(
        None,
        "the mmproj file of a GGUF model, for images; none: text only",
        metavar="FILE|none",
        default_means="the one in its folder that fits",
    )
    device: str = option("cpu", "cpu, or a GPU: cuda, cuda:1", metavar="NAME", note="docs/devices.md")
    backend: str | None = option(
        None,
        "what computes on a CPU: Tilewright's kernels (native), or plain torch, slowly, for comparison",
        choices=("native", "torch"),
        default_means="native, and torch on a GPU",
    )
    tp: int | str = option(
        1,
        "processes that the model is split over, one per NUMA node; auto: as many as are faster",
        metavar="N|auto",
        least=1,
        words=("auto",),
        note="docs/parallel.md",
    )
    cpu_binding: str | None = option(
        None,
        'CPUs of each process, such as "0-7|8-15"',
        metavar="LISTS",
        default_means="those of its NUMA node",
    )
    kv_memory: int | str | None = option(
        None,
        "memory for the KV cache, such as 4GB or 25% of the free memory",
        metavar="SIZE",
        default_means="half of it",
        note="Cross-attention and recurrent states are part of it; a number is of bytes",
    )
    kv_cache_dtype: str = option(
        "auto",
        "keys and values in the model's type (auto), or in 8 bits: twice as many tokens fit",
        choices=("auto", "int8", "fp8"),
    )
    max_context: int | None = option(
        None,
        "tokens of a prompt and its answer together",
        metavar="N",
        least=1,
        default_means="as many as the model allows",
    )
    max_sequences: int = option(64, "answers computed together", metavar="N", least=1)
    max_tokens_per_step: int = option(1152, "tokens of prompts and answers computed in one step", metavar="N", least=1)
    speculate: int = option(
        4,
        "most draft tokens per step; 0: no speculative decoding",
        metavar="N",
        least=0,
        note="They come from the checkpoint's multi-token predictor, if it has one and while that saves time, else "
        "from prompt look-up; answers do not depend on them",
    )
    prefix_cache: bool = option(True, "compute every prompt from its first token on")
    replay: bool = option(
        True,
        "run steps op by op",
        note="Else small steps are recorded and replayed, natively or as CUDA graphs, with equal results",
    )
    pack_cache: bool = option(True, "do not keep packed weights on disk for the next start")
    allow_special_tokens: bool = option(
        False,
        "parse special tokens in messages' text: authors can then impersonate the system or the assistant",
        note="Prompts of `generate` are raw and may always have them",
    )
    progress: bool = option(False, "show a progress bar while loading", has_flag=False)
    media_limits: MediaLimits | None = option(
        None,
        "the largest images, videos and sounds",
        has_flag=False,
        default_means="`tilewright.inputs.media.MediaLimits()`",
    )
    isolate_media: bool = option(False, "decode them in separate processes: for untrusted media", has_flag=False)

    @property
    def is_drafting(self) -> bool:
        """Whether tokens are drafted, for which a multi-token predictor is loaded."""
        return self.speculate > 0

    def to_json(self) -> dict[str, Any]:
        """Return the options for another process."""
        return dataclasses.asdict(self) | {"mmproj": None if self.mmproj is None else str(self.mmproj)}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> EngineOptions:
        """Return the options from the fields of `to_json`, or from some of them."""
        limits = fields.get("media_limits")
        return EngineOptions(**{**fields, "media_limits": None if limits is None else MediaLimits(**limits)})
