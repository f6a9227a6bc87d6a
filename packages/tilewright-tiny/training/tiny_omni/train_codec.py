"""Trains the codec of the embedded Omni from scratch: `python -m training.tiny_omni.train_codec --help`."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.loop import Average, check_finite, learning_rate_at, tell, training_parser
from training.shards import read_weights, write_weights
from training.tiny_omni.checkpoint import CODE2WAV, CODEC_FILE
from training.tiny_omni.clips import Clips, add_clip_options, stored_clips, synthesised
from training.tiny_omni.codec import Codec, magnitudes, mel_filter

NUM_SEGMENT_FRAMES = 40  # 1.6 seconds
WINDOWS = ((256, 32), (512, 64), (1024, 80), (2048, 128))  # of the losses, and how many mel bins each has
MAGNITUDE_WEIGHT, COMMITMENT_WEIGHT = 2.0, 0.25
MAX_GRADIENT = 1.0
UNQUANTISED = 0.04  # the part of the run in which latents go through as they are: rows are then put among them
BETAS = (0.8, 0.98)
MISREAD = 0.08  # the share of codes after the first that are others where codes are given: a talker errs in them, too
NUM_VALIDATION_CLIPS = 64
STATE = "codec.pt"


class SpectralLoss(nn.Module):
    """How far apart two sounds are to the ear: mel frames by windows of several lengths, in logarithms and as is."""

    def __init__(self) -> None:
        super().__init__()
        for window, num_bins in WINDOWS:
            self.register_buffer(f"mel{window}", mel_filter(window, num_bins), persistent=False)

    def forward(self, ours_BN: Tensor, theirs_BN: Tensor) -> Tensor:
        total = ours_BN.new_zeros((), dtype=torch.float32)
        for window, _ in WINDOWS:
            filters = cast(Tensor, getattr(self, f"mel{window}"))
            ours, theirs = (filters @ magnitudes(sound, window, window // 4) for sound in (ours_BN, theirs_BN))
            total = total + F.l1_loss((ours + 1e-3).log(), (theirs + 1e-3).log())
            total = total + MAGNITUDE_WEIGHT * F.l1_loss(ours, theirs) / math.sqrt(window)
        return total / len(WINDOWS)


class Segments:
    """Pieces of clips, all of whose samples lie where the network is."""

    def __init__(self, clips: Clips, samples_per_frame: int, device: str, seed: int) -> None:
        self.samples, self.starts = clips.samples.to(device), clips.starts.to(device)
        self.num_frames = clips.num_frames.to(device)
        self.samples_per_frame, self.device = samples_per_frame, device
        self.generator = torch.Generator(device).manual_seed(seed)
        # A clip that is longer comes more often.
        self.weights = self.num_frames.double()

    def draw(self, batch_size: int) -> Tensor:
        """(batch, samples): half begin where their clip does; behind a clip's end there is silence."""
        chosen = torch.multinomial(self.weights, batch_size, replacement=True, generator=self.generator)
        spare = (self.num_frames[chosen] - NUM_SEGMENT_FRAMES).clamp(min=0)
        where = torch.rand(batch_size, 2, generator=self.generator, device=self.device)
        first = ((spare + 1) * where[:, 0]).long() * (where[:, 1] < 0.7)
        return self.cut(chosen, first, NUM_SEGMENT_FRAMES)

    def cut(self, chosen: Tensor, first: Tensor, num_frames: int) -> Tensor:
        place = torch.arange(num_frames * self.samples_per_frame, device=self.device)
        place = place + (first * self.samples_per_frame)[:, None]
        is_inside = place < (self.num_frames[chosen] * self.samples_per_frame)[:, None]
        index = (self.starts[chosen][:, None] + place).clamp(max=len(self.samples) - 1)
        return self.samples[index].float() / 32768 * is_inside


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    codec = Codec(CODE2WAV)
    # Before a GPU is used: a process that has one cannot be forked.
    validation = synthesised("validation", min(NUM_VALIDATION_CLIPS, options.clips), 0, options.workers, frame(codec))
    clips = stored_clips(options, frame(codec))
    if options.start_from:
        codec = read_codec(Path(options.start_from))
        # Codes stay what they are, so that a talker can be trained meanwhile.
        codec.encoder.requires_grad_(False)
    codec.to(options.device)
    tell(f"{sum(p.numel() for p in codec.code2wav.parameters()):,} parameters in code2wav")
    run(options, codec, clips, validation, folder)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = training_parser(
        "training.tiny_omni.train_codec",
        "Trains code2wav of the embedded Omni with an encoder and quantisers on synthesised speech.",
        writes="weights",
        draws="sentences",
        minutes=10.0,
        batch_size=48,
        lr=6e-4,
    )
    add_clip_options(parser)
    parser.add_argument("--score-every-s", type=float, default=30.0, help="for validation (default: %(default)s)")
    parser.add_argument("--start-from", metavar="FOLDER", help="of an earlier run, to go on from")
    return parser.parse_args(arguments)


def frame(codec: Codec) -> int:
    return codec.samples_per_frame


def run(options: argparse.Namespace, codec: Codec, clips: Clips, validation: Clips, folder: Path) -> None:
    loss_of = SpectralLoss().to(options.device)
    segments = Segments(clips, frame(codec), options.device, options.seed)
    held_out = Segments(validation, frame(codec), options.device, 0)
    trained = [parameter for parameter in codec.parameters() if parameter.requires_grad]
    average = Average(codec)
    optimiser = torch.optim.AdamW(trained, options.lr, betas=BETAS, weight_decay=0.01, fused=options.device == "cuda")
    sounding = codec.code2wav.samples_of
    if options.compile:
        sounding = torch.compile(sounding)
    total_s = options.minutes * 60
    began_s: float | None = None
    scored_s = time.monotonic()
    step = 0
    while True:
        elapsed_s = time.monotonic() - began_s if began_s is not None else 0.0
        if elapsed_s >= total_s:
            break
        part = elapsed_s / total_s
        for group in optimiser.param_groups:
            group["lr"] = options.lr * learning_rate_at(part)
        is_quantised = part >= UNQUANTISED
        sound = segments.draw(options.batch_size)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
            if options.start_from:
                with torch.no_grad():
                    latents, codes = codec.misread(codec.codes(sound), MISREAD)
                chosen = passed = latents
            else:
                latents = codec.latents(sound).float()
                chosen, codes = codec.quantised(latents, is_learning=True)
                passed = latents + (chosen - latents).detach() if is_quantised else latents
            made = sounding(codec.out(passed)).float()
        spectral = loss_of(made, sound[:, : made.shape[1]])
        commitment = F.mse_loss(latents, chosen.detach())
        (spectral + COMMITMENT_WEIGHT * commitment * is_quantised + 1e-3 * latents.square().mean()).backward()
        size = torch.nn.utils.clip_grad_norm_(trained, MAX_GRADIENT)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        average.update()
        step += 1
        if began_s is None and step == 5:
            began_s = time.monotonic()  # by then kernels are compiled and chosen
        now_s = time.monotonic()
        if now_s - scored_s > options.score_every_s:
            scored_s = now_s
            losses = torch.stack((spectral.detach(), commitment.detach(), size)).tolist()
            check_finite(step, losses, folder)
            tell(f"{elapsed_s:5.0f} s  step {step}  loss {losses[0]:.4f}, commitment {losses[1]:.4f}, {used(codes)}")
            with average.in_place():
                tell(f"{elapsed_s:5.0f} s  validation {score(codec, held_out, loss_of):.4f}")
                keep(folder, codec)
    with average.in_place():
        tell(f"{step} steps: validation {score(codec, held_out, loss_of):.4f}, {used(codes)}")
        keep(folder, codec)


def used(codes_BTQ: Tensor) -> str:
    """How many entries of each codebook a batch uses."""
    return f"entries used {[len(codes_BTQ[..., place].unique()) for place in range(codes_BTQ.shape[-1])]}"


@torch.no_grad()
def score(codec: Codec, held_out: Segments, loss_of: SpectralLoss) -> float:
    """The loss through codes and the table, as speech will be made; of whole clips of up to four seconds."""
    codec.fill_table()
    everything = torch.arange(len(held_out.starts), device=held_out.device)
    sound = held_out.cut(everything, torch.zeros_like(everything), 100)
    codes = codec.codes(sound)
    made = codec.code2wav(codes.transpose(1, 2))
    return loss_of(made, sound[:, : made.shape[1]]).item()


def keep(folder: Path, codec: Codec) -> None:
    """Code2wav by the checkpoint's names, and what only encodes beside it."""
    codec.fill_table()
    stored = {name: value for name, value in codec.state_dict().items() if not name.startswith(f"{CODEC_FILE}.")}
    torch.save({name: value.half() for name, value in stored.items()}, folder / STATE)
    write_weights(
        folder, {f"code2wav.{name}": value for name, value in codec.code2wav.state_dict().items()}, CODEC_FILE
    )


def read_codec(folder: Path) -> Codec:
    """What `keep` wrote."""
    codec = Codec(CODE2WAV)
    encoding = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    codec.load_state_dict({name: value.float() for name, value in encoding.items()} | read_weights(folder, CODEC_FILE))
    return codec


if __name__ == "__main__":
    sys.exit(main())
