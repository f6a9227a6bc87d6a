"""Trains the embedded model from scratch: `python -m training.tiny_vl.train --help`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from training.loop import add_network_options, learning_rate_at, tell, training_parser
from training.shards import write_weights
from training.tiny_vl.batches import NO_TARGET, Batch, Encoder, Lessons, as_pixels, attention_mask
from training.tiny_vl.checkpoint import write_configs
from training.tiny_vl.network import Network
from training.tiny_vl.optimiser import make_optimisers
from training.tiny_vl.validation import score, validation_batches

NOISE = 0.06  # of pixels, which lie in -1 to 1: the most that is added, in half of the images
MAX_GRADIENT = 1.0
NUM_COMPILING_STEPS = 12  # at a learning rate of 0, and not counted: shapes are met for the first time
NUM_VALIDATION_ITEMS = 1000
SCORES = "scores.json"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    folder = Path(options.out)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    config = write_configs(folder)  # takes ten seconds: the tokenizer's words are those of many lessons
    network = Network(config)
    if options.start_from:
        for file in sorted(Path(options.start_from).glob("*.safetensors")):
            network.load_state_dict({k: v.float() for k, v in load_file(file).items()}, strict=False)
    network.to(options.device)
    if options.compile:
        torch._dynamo.config.cache_size_limit = 64
        for block in (*network.model.visual.blocks, *network.model.language_model.layers):
            block.compile(dynamic=True)
    run(options, network, folder)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = training_parser(
        "training.tiny_vl.train",
        "Trains the embedded model from scratch, for as long as it is told.",
        writes="checkpoint",
        draws="lessons",
        minutes=20.0,
        batch_size=256,
        lr=2e-3,
    )
    add_network_options(parser, weight_decay=0.1)
    parser.add_argument("--optimiser", choices=("muon", "adamw"), default="muon", help="(default: %(default)s)")
    parser.add_argument("--photos", type=Path, metavar="FOLDER", help="photographs, to learn what it cannot know")
    parser.add_argument("--score-every-s", type=float, default=60.0, help="for validation (default: %(default)s)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, network: Network, folder: Path) -> None:
    is_cuda = options.device == "cuda"
    optimisers = make_optimisers(network, options.optimiser, options.lr, options.weight_decay, is_cuda)
    tokenizer_file = folder / "tokenizer.json"
    lessons = DataLoader(
        Lessons(tokenizer_file, options.batch_size, options.seed, options.photos),
        batch_size=None,
        num_workers=options.workers,
        prefetch_factor=3 if options.workers else None,
        pin_memory=is_cuda,
    )
    batches = validation_batches(Encoder(tokenizer_file), NUM_VALIDATION_ITEMS)
    total_s = options.minutes * 60
    began_s = scored_s = told_s = time.monotonic()
    step = num_images = 0
    for on_host in lessons:
        if step == NUM_COMPILING_STEPS:
            began_s = time.monotonic()
        elapsed_s = time.monotonic() - began_s if step >= NUM_COMPILING_STEPS else 0.0
        if elapsed_s >= total_s:
            break
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = options.lr * learning_rate_at(elapsed_s / total_s)
        loss = train_step(network, optimisers, on_host.to(options.device), options.device)
        step, num_images = step + 1, num_images + on_host.frames.shape[0]
        now_s = time.monotonic()
        if now_s - told_s > 10:
            told_s = now_s
            tell(f"{elapsed_s:5.0f} s  step {step}  {num_images:,} images  loss {loss.item():.4f}")
        if now_s - scored_s > options.score_every_s:
            scored_s = now_s
            scores = score(network, batches, options.device)
            tell(f"{elapsed_s:5.0f} s  {scores}")
            keep(folder, network, {"steps": step, "pictures": num_images, "validation": scores})
    scores = score(as_stored(network), batches, options.device)
    tell(f"{step} steps, {num_images:,} images: {scores}")
    keep(folder, network, {"steps": step, "pictures": num_images, "validation": scores})


def as_stored(network: Network) -> Network:
    """The network with its weights rounded to what a file holds."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.bfloat16())
    return network


def keep(folder: Path, network: Network, result: dict[str, Any]) -> bool:
    """Writes the weights and what they score, unless weights that score higher lie there already."""
    file = folder / SCORES
    if file.exists():
        stored, new = (mean_of(scores["validation"]) for scores in (json.loads(file.read_text()), result))
        if stored > new:
            tell(f"{folder} keeps its weights: they score {stored:.4f}, these {new:.4f}")
            return False
    write_weights(folder, network.state_dict())
    file.write_text(json.dumps(result, indent=1) + "\n")
    return True


def mean_of(scores: dict[str, float]) -> float:
    """The share of right answers, each kind counted alike."""
    return sum(scores.values()) / len(scores)


def train_step(network: Network, optimisers: list[torch.optim.Optimizer], batch: Batch, device: str) -> torch.Tensor:
    pixels = as_pixels(batch.frames, batch.is_clip, NOISE)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        hidden = network(batch.ids, batch.positions, attention_mask(batch.segments), pixels, batch.slots)
        logits = network.logits(hidden)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=NO_TARGET)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), MAX_GRADIENT)
    for optimiser in optimisers:
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    return loss.detach()


if __name__ == "__main__":
    sys.exit(main())
