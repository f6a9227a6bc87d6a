"""Texts spoken by a checkpoint: the library says them as `/v1/audio/speech` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

Say = Callable[[str], tuple[np.ndarray, int]]  # samples, and how many a second has


@contextmanager
def speaker_of(model: Path, voice: str | None, dtype: str) -> Iterator[Say]:
    """Says a text as an answer that is written already, by the likeliest codes."""
    from tilewright import Engine

    with Engine(model, dtype=dtype, pack_cache=False) as engine:

        def say(text: str) -> tuple[np.ndarray, int]:
            messages: list[dict[str, Any]] = [{"role": "assistant", "content": text}]
            spoken = engine.chat(
                messages,
                continue_final_message=True,
                modalities=("text", "audio"),
                voice=voice,
                max_tokens=1,
                temperature=0.0,
            )
            assert spoken.audio is not None and spoken.audio_rate is not None
            return spoken.audio, spoken.audio_rate

        yield say
