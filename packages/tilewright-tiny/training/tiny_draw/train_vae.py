"""Trains the VAE: `python -m training.tiny_draw.train_vae --help`. The transformer is trained on its latents."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor
from torch.utils.data import DataLoader

from training.loop import learning_rate_at, tell, training_parser
from training.shards import read_weights, write_weights
from training.tiny_draw.batches import Drawings, as_pixels, met_again
from training.tiny_draw.checkpoint import SIDE, VAE, WEIGHTS, write_configs, write_tokenizer

KL_WEIGHT = 2e-4  # of nats per latent: latents spread by a tenth, so the decoder forgives what denoising leaves
EDGE_WEIGHT = 0.5  # of the difference of neighbouring pixels: edges stay sharp
NUM_STATISTICS_BATCHES = 16
MAX_STORED = 500  # batches of images, on the device
NUM_COMPILING_STEPS = 5  # at a learning rate of 0, and not counted


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    folder = Path(options.out)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    write_tokenizer(folder / "tokenizer")
    vae = AutoencoderKL.from_config(VAE)
    if options.decoder_of:
        vae.load_state_dict(read_weights(Path(options.decoder_of) / "vae"))
        vae.encoder.requires_grad_(False)
    vae.to(options.device, memory_format=torch.channels_last)
    tell(f"{sum(parameter.numel() for parameter in vae.parameters()):,} parameters")
    batches = DataLoader(
        Drawings(folder / "tokenizer" / "tokenizer.json", options.batch_size, options.seed, ((SIDE, SIDE),)),
        batch_size=None,
        num_workers=options.workers,
        prefetch_factor=3 if options.workers else None,
        pin_memory=options.device == "cuda",
    )
    if options.compile:
        vae.encoder.compile()
        vae.decoder.compile()
    run(options, vae, iter(batches))
    if options.decoder_of:
        known = json.loads((Path(options.decoder_of) / "vae" / "config.json").read_text())
        shift, scale = known["shift_factor"], known["scaling_factor"]
    else:
        shift, scale = statistics(vae, iter(batches), options.device)
    tell(f"latents: mean {shift:.4f}, standard deviation {1 / scale:.4f}")
    write_configs(folder, vocab_size(folder), shift, scale)
    write_weights(folder / "vae", vae.state_dict(), WEIGHTS)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = training_parser(
        "training.tiny_draw.train_vae",
        "Trains the VAE from scratch, for as long as it is told, and writes the pipeline's configs.",
        writes="pipeline",
        draws="drawings",
        minutes=4.0,
        batch_size=64,
        lr=1e-3,
    )
    text = "go on with the decoder of this pipeline alone: a transformer trained on its latents stays right"
    parser.add_argument("--decoder-of", metavar="FOLDER", help=text)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, vae: Any, batches: Any) -> None:
    trained = [parameter for parameter in vae.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0)
    began_s = told_s = time.monotonic()
    total_s = options.minutes * 60
    drawings = met_again(batches, lambda batch: batch.to(options.device).images, MAX_STORED, Random(options.seed))
    for step, images in enumerate(drawings):
        if step == NUM_COMPILING_STEPS:
            began_s = time.monotonic()
        elapsed_s = time.monotonic() - began_s if step >= NUM_COMPILING_STEPS else 0.0
        if elapsed_s >= total_s:
            break
        for group in optimiser.param_groups:
            group["lr"] = options.lr * learning_rate_at(elapsed_s / total_s)
        pixels = as_pixels(images)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
            posterior = vae.encode(pixels).latent_dist
            drawn = vae.decode(posterior.sample()).sample
        difference, kl = loss_of(drawn.float(), pixels), posterior.kl().mean() / posterior.mean[0].numel()
        loss = difference + KL_WEIGHT * kl
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if time.monotonic() - told_s > 10:
            told_s = time.monotonic()
            psnr = -10 * (F.mse_loss(drawn.detach().float().clamp(-1, 1), pixels) / 4).log10().item()
            told = f"difference {difference.item():.4f}  PSNR {psnr:.1f}  kl {kl.item():.2f}"
            tell(f"{elapsed_s:5.0f} s  step {step}  {told}")


def loss_of(drawn: Tensor, pixels: Tensor) -> Tensor:
    across = F.l1_loss(drawn.diff(dim=-1), pixels.diff(dim=-1))
    down = F.l1_loss(drawn.diff(dim=-2), pixels.diff(dim=-2))
    return F.l1_loss(drawn, pixels) + F.mse_loss(drawn, pixels) + EDGE_WEIGHT * (across + down)


@torch.no_grad()
def statistics(vae: Any, batches: Any, device: str) -> tuple[float, float]:
    """What is subtracted from latents, and what they are multiplied by, so that they have mean 0 and deviation 1."""
    latents = [
        vae.encode(as_pixels(next(batches).to(device).images)).latent_dist.mode().flatten()
        for _ in range(NUM_STATISTICS_BATCHES)
    ]
    whole = torch.cat(latents)
    return whole.mean().item(), 1 / whole.std().item()


def vocab_size(folder: Path) -> int:
    from tokenizers import Tokenizer

    size = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json")).get_vocab_size()
    return -(-size // 64) * 64


if __name__ == "__main__":
    sys.exit(main())
