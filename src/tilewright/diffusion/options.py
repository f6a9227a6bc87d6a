"""The options of `Diffusion`. Each is declared only here; imports no torch, since commands make flags of them."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.options import option


@dataclass(frozen=True)
class DiffusionOptions:
    """How a pipeline is loaded and run."""

    low_memory: bool = option(
        False,
        "keep only one of text encoder, transformer and VAE in memory at a time",
        note="They are mapped and released in turn",
    )
    stream_layers: int | str | None = option(
        None,
        "memory for the layers of a network, such as 4GB; the others are read from disk in every step",
        metavar="SIZE",
        default_means="all",
        note="They are read from the pack cache; a number is of bytes",
    )
    dtype: str = option(
        "auto",
        "type of weights",
        choices=("auto", "bfloat16", "float32"),
        default_means="as each component is stored",
    )
    device: str = option("cpu", "cpu, or a GPU: cuda, cuda:1", metavar="NAME", note="docs/devices.md")
    backend: str | None = option(
        None,
        "what computes on a CPU: Tilewright's kernels (native), or plain torch, slowly, for comparison",
        choices=("native", "torch"),
        default_means="native, and torch on a GPU",
    )
    tp: int = option(
        1,
        "processes that the model is split over, one per NUMA node",
        metavar="N",
        least=1,
        note="docs/parallel.md",
    )
    cpu_binding: str | None = option(
        None,
        'CPUs of each process, such as "0-7|8-15"',
        metavar="LISTS",
        default_means="those of its NUMA node",
    )
    pack_cache: bool = option(
        True,
        "do not keep packed weights on disk for the next start",
        note="Nor how long requests took",
    )
    progress: bool = option(False, "show a progress bar while loading", has_flag=False)
