"""Sayings as a synthesiser says them: all samples in one tensor, as whole frames of the codec."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor

from training.loop import tell
from training.tiny_omni.codec import SAMPLE_RATE
from training.tiny_omni.said import VOICES, Said, sayings
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
    speakers: list[str]

    def __len__(self) -> int:
        return len(self.texts)


def samples_of(said: Said, speaker: str, samples_per_frame: int) -> np.ndarray:
    """int16, whole frames."""
    spoken = resampled(speak(said.spoken, VOICES[speaker]), Fraction(SAMPLE_RATE, SPOKEN_RATE)) * GAIN
    behind = TAIL + -(LEAD + len(spoken) + TAIL) % samples_per_frame
    return (np.pad(spoken, (LEAD, behind)).clip(-1, 1) * 32767).astype(np.int16)


def synthesised(set_name: str, count: int, seed: int, num_workers: int, samples_per_frame: int) -> Clips:
    """So many clips of a set, voices in turn, by processes that must be started before a GPU is used."""
    began_s = time.monotonic()
    rng = Random(f"clips {set_name} {seed}")
    jobs = [
        (said, tuple(VOICES)[index % len(VOICES)], samples_per_frame)
        for index, said in enumerate(islice(_short(rng, set_name), count))
    ]
    if num_workers:
        with multiprocessing.get_context("fork").Pool(num_workers) as pool:
            sounds = pool.map(_spoken, jobs, chunksize=16)
    else:
        sounds = list(map(_spoken, jobs))
    lengths = torch.tensor([len(sound) for sound in sounds])
    clips = Clips(
        torch.from_numpy(np.concatenate(sounds)),
        lengths.cumsum(0) - lengths,
        lengths // samples_per_frame,
        [said.text for said, _, _ in jobs],
        [speaker for _, speaker, _ in jobs],
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
        torch.save(vars(clips), file)
    return clips


def _short(rng: Random, set_name: str) -> Iterator[Said]:
    """Those that surely last less than MAX_SECONDS, each for every voice."""
    for said in sayings(rng, set_name):
        if len(said.spoken) < MAX_SECONDS * 10:
            yield said


def _spoken(job: tuple[Said, str, int]) -> np.ndarray:
    return samples_of(*job)
