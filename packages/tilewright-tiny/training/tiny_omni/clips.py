"""Sayings as a synthesiser says them: all samples in one tensor, as whole frames of the codec."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor

from training.loop import tell
from training.tiny_omni.checkpoint import SAMPLES_PER_FRAME
from training.tiny_omni.codec import SAMPLE_RATE
from training.tiny_omni.said import VOICES, as_spoken, sayings
from training.tiny_omni.speech import SAMPLE_RATE as SPOKEN_RATE
from training.tiny_omni.speech import resampled, speak

LEAD, TAIL = 960, 2880  # samples of silence before and behind: what the decoder begins with, and what it does not give
MAX_SECONDS = 8.0
GAIN = 0.9


@dataclass
class Clips:
    samples: Tensor  # int16 (all samples)
    starts: Tensor  # int64 (clips): of each in the samples
    num_frames: Tensor  # int64 (clips)
    texts: list[str]

    def __len__(self) -> int:
        return len(self.texts)


def samples_of(text: str, samples_per_frame: int) -> np.ndarray:
    """int16, whole frames."""
    [voice] = VOICES.values()
    spoken = resampled(speak(as_spoken(text), voice), Fraction(SAMPLE_RATE, SPOKEN_RATE)) * GAIN
    behind = TAIL + -(LEAD + len(spoken) + TAIL) % samples_per_frame
    return (np.pad(spoken, (LEAD, behind)).clip(-1, 1) * 32767).astype(np.int16)


def synthesised(set_name: str, count: int, seed: int, num_workers: int, samples_per_frame: int) -> Clips:
    """So many clips of a set, by processes that must be started before a GPU is used."""
    began_s = time.monotonic()
    rng = Random(f"clips {set_name} {seed}")
    texts = list(islice(_short(rng, set_name), count))
    spoken = partial(samples_of, samples_per_frame=samples_per_frame)
    if num_workers:
        with multiprocessing.get_context("fork").Pool(num_workers) as pool:
            sounds = pool.map(spoken, texts, chunksize=16)
    else:
        sounds = list(map(spoken, texts))
    lengths = torch.tensor([len(sound) for sound in sounds])
    clips = Clips(
        torch.from_numpy(np.concatenate(sounds)),
        lengths.cumsum(0) - lengths,
        lengths // samples_per_frame,
        texts,
    )
    hours, took_s = len(clips.samples) / SAMPLE_RATE / 3600, time.monotonic() - began_s
    tell(f"{len(clips):,} clips of the {set_name} set, {hours:.2f} hours, spoken in {took_s:.0f} s")
    return clips


def add_clip_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clips", type=int, default=20_000, help="that are spoken (default: %(default)s)")
    parser.add_argument("--store", metavar="FILE", help="clips of an earlier run, or where to leave them for the next")


def stored_clips(options: argparse.Namespace, samples_per_frame: int) -> Clips:
    """Clips of training: those in the store, or new ones, which go there."""
    file = Path(options.store) if options.store else None
    if file is not None and file.exists():
        clips = Clips(**torch.load(file, weights_only=True))
        tell(f"{len(clips):,} clips from {file}")
        return clips
    clips = synthesised("training", options.clips, options.seed, options.workers, samples_per_frame)
    if file is not None:
        half_written = file.with_suffix(".part")
        torch.save(vars(clips), half_written)
        half_written.rename(file)
    return clips


def _short(rng: Random, set_name: str) -> Iterator[str]:
    """Those that surely last less than MAX_SECONDS."""
    for text in sayings(rng, set_name):
        if len(text) < MAX_SECONDS * 10:
            yield text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m training.tiny_omni.clips", description="Speaks the sentences that a voice is trained on."
    )
    add_clip_options(parser)
    parser.add_argument("--workers", type=int, default=15, help="processes that speak (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the sentences (default: %(default)s)")
    stored_clips(parser.parse_args(arguments), SAMPLES_PER_FRAME)
    return 0


if __name__ == "__main__":
    sys.exit(main())
