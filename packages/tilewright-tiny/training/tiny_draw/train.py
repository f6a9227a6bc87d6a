"""Trains text encoder and transformer together, on the latents of a trained VAE:
`python -m training.tiny_draw.train --help`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Qwen3Config, Qwen3Model

from training.loop import add_network_options, learning_rate_at, tell, training_parser
from training.shards import read_weights, write_weights
from training.tiny_draw.batches import Batch, Drawings, as_pixels, met_again
from training.tiny_draw.checkpoint import TRANSFORMER, WEIGHTS
from training.tiny_draw.network import Transformer
from training.tiny_vl.optimiser import make_optimisers

SHIFT = 3.0  # more lessons where there is much noise: what is drawn, and how many, is decided there
AVERAGED_STEPS = 1000  # the weights that are kept are an average over about as many steps
MAX_GRADIENT = 1.0
KEPT_EVERY_S = 180  # a run that is cut short loses no more
MAX_STORED = 8000  # batches of latents, on the device
NUM_COMPILING_STEPS = 30  # at a learning rate of 0, and not counted: shapes are met for the first time


class Network(nn.Module):
    """What is trained: x0 - noise of noisy latents, from token ids of their captions."""

    def __init__(self, text_config: dict) -> None:
        super().__init__()
        self.text_encoder = Qwen3Model(Qwen3Config(**text_config))
        for unused in (self.text_encoder.layers[-1], self.text_encoder.norm):
            unused.requires_grad_(False)
        self.transformer = Transformer(TRANSFORMER)
        self.transformer.start_from_nothing()

    def forward(self, latents: Tensor, t: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        # Padding lies behind the caption, and attention is causal: no mask is needed.
        captions = self.text_encoder(ids, output_hidden_states=True, use_cache=False).hidden_states[-2]
        is_padding = torch.arange(ids.shape[1], device=ids.device) >= lengths[:, None]
        return self.transformer(latents, t, captions, is_padding)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    folder = Path(options.out)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    vae = AutoencoderKL.from_pretrained(folder / "vae").to(options.device, torch.bfloat16).requires_grad_(False)
    network = Network(json.loads((folder / "text_encoder" / "config.json").read_text()))
    if options.start_from:
        before = Path(options.start_from)
        network.text_encoder.load_state_dict(read_weights(before / "text_encoder"))
        network.transformer.load_state_dict(read_weights(before / "transformer"))
    network.to(options.device)
    tell(f"{sum(parameter.numel() for parameter in network.parameters()):,} parameters")
    if options.compile:
        vae.encoder.compile()
        transformer = network.transformer
        for block in (*transformer.noise_refiner, *transformer.context_refiner, *transformer.layers):
            block.compile(dynamic=True)
    run(options, network, vae, folder)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = training_parser(
        "training.tiny_draw.train",
        "Trains the text encoder and the transformer of the pipeline in --out, whose VAE is trained.",
        writes="pipeline",
        draws="drawings",
        minutes=15.0,
        batch_size=256,
        lr=1e-3,
    )
    add_network_options(parser, weight_decay=0.05)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, network: Network, vae: Any, folder: Path) -> None:
    optimisers = make_optimisers(network, "muon", options.lr, options.weight_decay, options.device == "cuda")
    average = [parameter.detach().clone() for parameter in network.parameters()]
    began_s = told_s = kept_s = time.monotonic()
    total_s = options.minutes * 60
    step = num_images = 0
    mean_loss = 0.0
    for batch in latent_batches(options, vae, folder):
        if step == NUM_COMPILING_STEPS:
            began_s = time.monotonic()
        elapsed_s = time.monotonic() - began_s if step >= NUM_COMPILING_STEPS else 0.0
        if elapsed_s >= total_s:
            break
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = options.lr * learning_rate_at(elapsed_s / total_s)
        loss = train_step(network, optimisers, *batch, options.device)
        kept = min(1 - 1 / AVERAGED_STEPS, step / (step + 10))
        torch._foreach_lerp_(average, [parameter.detach() for parameter in network.parameters()], 1 - kept)
        step, num_images = step + 1, num_images + len(batch[0])
        if time.monotonic() - told_s > 10:
            told_s = time.monotonic()
            mean_loss = loss.item()
            tell(f"{elapsed_s:5.0f} s  step {step}  {num_images:,} images  loss {mean_loss:.4f}")
        if time.monotonic() - kept_s > KEPT_EVERY_S:
            kept_s = time.monotonic()
            keep(folder, network, average)
    keep(folder, network, average)
    result = {"steps": step, "pictures": num_images, "loss": mean_loss}
    (folder / "training.json").write_text(json.dumps(result, indent=1) + "\n")
    tell(f"{step} steps, {num_images:,} images")


def latent_batches(options: argparse.Namespace, vae: Any, folder: Path) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Latents of mean 0 and deviation 1, ids and lengths of captions, on the device."""
    loader = DataLoader(
        Drawings(folder / "tokenizer" / "tokenizer.json", options.batch_size, options.seed),
        batch_size=None,
        num_workers=options.workers,
        prefetch_factor=3 if options.workers else None,
        pin_memory=options.device == "cuda",
    )

    @torch.no_grad()
    def encode(on_host: Batch) -> tuple[Tensor, Tensor, Tensor]:
        batch = on_host.to(options.device)
        posterior = vae.encode(as_pixels(batch.images).bfloat16()).latent_dist
        latents = (posterior.mode().float() - vae.config.shift_factor) * vae.config.scaling_factor
        return latents.bfloat16(), batch.ids, batch.lengths

    for latents, ids, lengths in met_again(iter(loader), encode, MAX_STORED, Random(options.seed)):
        yield latents.float(), ids, lengths


def train_step(
    network: Network,
    optimisers: list[torch.optim.Optimizer],
    latents: Tensor,
    ids: Tensor,
    lengths: Tensor,
    device: str,
) -> Tensor:
    evenly = torch.randn(len(latents), device=device).sigmoid()
    sigma = SHIFT * evenly / (1 + (SHIFT - 1) * evenly)
    noise = torch.randn_like(latents)
    noisy = torch.lerp(latents, noise, sigma[:, None, None, None])
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        found = network(noisy, 1 - sigma, ids, lengths)
    loss = F.mse_loss(found.float(), latents - noise)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), MAX_GRADIENT)
    for optimiser in optimisers:
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    return loss.detach()


def keep(folder: Path, network: Network, average: list[Tensor]) -> None:
    names = [name for name, _ in network.named_parameters()]
    weights = {**network.state_dict(), **dict(zip(names, average, strict=True))}
    for part, stem in (("text_encoder", "model"), ("transformer", WEIGHTS)):
        prefix = f"{part}."
        own = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        write_weights(folder / part, own, stem)


if __name__ == "__main__":
    sys.exit(main())
