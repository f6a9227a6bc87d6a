"""Trains the hearing of the embedded Omni from scratch: `python -m training.tiny_omni.train --help`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from training.loop import Average, add_network_options, check_finite, learning_rate_at, tell, training_parser
from training.shards import read_weights, write_weights
from training.tiny_omni.batches import Batch, Sentences, features_of
from training.tiny_omni.checkpoint import write_configs
from training.tiny_omni.items import score, validation_batches
from training.tiny_omni.network import Network
from training.tiny_omni.room import as_of_others, with_gaps
from training.tiny_omni.utterances import spoken_words
from training.tiny_vl.batches import NO_TARGET, Encoder, attention_mask
from training.tiny_vl.optimiser import make_optimisers

MAX_GRADIENT = 1.0
WORDS_WEIGHT = 0.3  # of the loss of the words heard, against that of the answers
NUM_WORD_STEPS = 150  # a head for words that is new beside a tower that is not learns alone for so long
KEPT_EVERY_S = 60  # a run that is cut short loses no more
NUM_COMPILING_STEPS = 20  # at a learning rate of 0, and not counted: shapes are met for the first time
NUM_VALIDATION_SENTENCES = 400
SCORES, LATEST = "scores.json", "latest"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    folder = Path(options.out)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    network = Network(write_configs(folder), len(spoken_words()))
    if options.start_from:
        network.load_stored(read_weights(Path(options.start_from)))
        # A talker reads these rows, too: one that is trained meanwhile, or was before, goes on with them.
        network.model.embed_tokens.requires_grad_(False)
    network.to(options.device)
    tell(f"{sum(weight.numel() for weight in network.stored_weights().values()):,} parameters")
    if options.compile:
        torch._dynamo.config.cache_size_limit = 64
        for block in network.blocks():
            block.compile(dynamic=True)
    run(options, network, folder)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = training_parser(
        "training.tiny_omni.train",
        "Trains the audio tower and the decoder of the embedded Omni on synthesised speech.",
        writes="checkpoint",
        draws="sentences",
        minutes=15.0,
        batch_size=256,
        lr=6e-4,
    )
    add_network_options(parser, weight_decay=0.1)
    parser.add_argument("--score-every-s", type=float, default=60.0, help="for validation (default: %(default)s)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, network: Network, folder: Path) -> None:
    is_cuda = options.device == "cuda"
    optimisers = make_optimisers(network, "muon", options.lr, options.weight_decay, is_cuda)
    # The workers start first: they speak while validation's sentences are spoken here.
    sentences = iter(
        DataLoader(
            Sentences(folder / "tokenizer.json", options.batch_size, options.seed),
            batch_size=None,
            num_workers=options.workers,
            prefetch_factor=4 if options.workers else None,
            pin_memory=is_cuda,
        )
    )
    average = Average(network)
    batches = validation_batches(Encoder(folder / "tokenizer.json"), NUM_VALIDATION_SENTENCES)
    generator = torch.Generator(options.device).manual_seed(options.seed)
    total_s = options.minutes * 60
    began_s = scored_s = told_s = kept_s = time.monotonic()
    step = num_sentences = 0
    for on_host in sentences:
        if step == NUM_COMPILING_STEPS:
            began_s = time.monotonic()
        elapsed_s = time.monotonic() - began_s if step >= NUM_COMPILING_STEPS else 0.0
        if elapsed_s >= total_s:
            break
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = options.lr * learning_rate_at(elapsed_s / total_s)
        is_new = bool(options.start_from) and step < NUM_WORD_STEPS
        losses = train_step(network, optimisers, on_host.to(options.device), generator, are_words_apart=is_new)
        average.update()
        step, num_sentences = step + 1, num_sentences + len(on_host.ids)
        now_s = time.monotonic()
        if now_s - told_s > 10:
            told_s = now_s
            answers, words = losses.tolist()
            check_finite(step, [answers, words], folder)
            tell(f"{elapsed_s:5.0f} s  step {step}  {num_sentences:,} sentences  loss {answers:.4f}, words {words:.3f}")
        if now_s - scored_s > options.score_every_s:
            with average.in_place():
                scores = score(network, batches, options.device)
                tell(f"{elapsed_s:5.0f} s  {mean_of(scores):.4f} {scores}")
                keep(folder, network, {"steps": step, "sentences": num_sentences, "validation": scores})
            scored_s = time.monotonic()
        if now_s - kept_s > KEPT_EVERY_S:
            with average.in_place():
                write_weights(folder / LATEST, network.stored_weights())
            kept_s = time.monotonic()
    with average.in_place():
        scores = score(as_stored(network), batches, options.device)
        tell(f"{step} steps, {num_sentences:,} sentences: {mean_of(scores):.4f} {scores}")
        keep(folder, network, {"steps": step, "sentences": num_sentences, "validation": scores})


def train_step(
    network: Network,
    optimisers: list[torch.optim.Optimizer],
    batch: Batch,
    generator: torch.Generator,
    *,
    are_words_apart: bool = False,
) -> Tensor:
    """The losses of answers and of words, which teach the head for words alone where they are apart."""
    device = batch.ids.device.type
    mel = with_gaps(as_of_others(features_of(batch.samples, generator), generator), generator)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        hidden, features = network(mel, batch.ids, batch.positions, attention_mask(batch.segments), batch.start)
        is_asked = batch.targets != NO_TARGET
        logits = network.lm_head(hidden[is_asked])
        spelled = network.word_head(features.detach() if are_words_apart else features)
    answers = F.cross_entropy(logits.float(), batch.targets[is_asked])
    words = words_loss(spelled, batch)
    (answers + WORDS_WEIGHT * words).backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), MAX_GRADIENT)
    for optimiser in optimisers:
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    return torch.stack((answers, words)).detach()


def words_loss(heard: Tensor, batch: Batch) -> Tensor:
    """CTC of the words in their order: features are far more than words, so that letters would not fit and these do."""
    lengths = torch.full((len(heard),), heard.shape[1], device=heard.device)
    scores = heard.float().log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, batch.words, lengths, batch.num_words, zero_infinity=True)


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
    write_weights(folder, network.stored_weights())
    file.write_text(json.dumps(result, indent=1) + "\n")
    return True


def mean_of(scores: dict[str, float]) -> float:
    """The share of right answers, each kind counted alike."""
    return sum(scores.values()) / len(scores)


if __name__ == "__main__":
    sys.exit(main())
