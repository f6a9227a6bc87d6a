"""Tilewright: multimodal models, served fast on the CPUs people already have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.diffusion.diffusion import Diffusion
    from tilewright.engine.engine import Engine

__version__ = "0.1.0"
__all__ = ["Diffusion", "Engine"]


def __getattr__(name: str) -> Any:
    # Imported on use: `tilewright --help` answers without torch.
    if name == "Engine":
        from tilewright.engine.engine import Engine

        return Engine
    if name == "Diffusion":
        from tilewright.diffusion.diffusion import Diffusion

        return Diffusion
    raise AttributeError(f"module 'tilewright' has no attribute {name!r}")
