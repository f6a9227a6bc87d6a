"""What all training loops share."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

WARM_UP, DECAY_FROM = 0.02, 0.45  # parts of the run: up to the learning rate, from there in a straight line to 0
AVERAGED = 300  # steps that a mean of weights remembers


def training_parser(
    module: str, description: str, *, writes: str, draws: str, minutes: float, batch_size: int, lr: float
) -> argparse.ArgumentParser:
    """A parser with the options of every training: `writes` is what --out holds, `draws` what the seed is of."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        epilog=f"example: python -m {module} --minutes {minutes:g} --out candidate",
    )
    parser.add_argument("--out", default="candidate", help=f"folder of the {writes} (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=minutes, help="how long it trains (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=batch_size, help="images a step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=lr, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=15, help="processes that draw (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help=f"of weights and {draws} (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="run the network uncompiled")
    return parser


def add_network_options(parser: argparse.ArgumentParser, weight_decay: float) -> None:
    """Those of the networks that are trained with Muon, and may go on from earlier weights."""
    parser.add_argument("--weight-decay", type=float, default=weight_decay, help="(default: %(default)s)")
    parser.add_argument("--start-from", metavar="FOLDER", help="weights to go on from, instead of random ones")


def learning_rate_at(part: float) -> float:
    """Of the peak: up, flat, down to 0."""
    if part < WARM_UP:
        return part / WARM_UP
    return min(1.0, (1 - part) / (1 - DECAY_FROM))


class Average:
    """A running mean of a network's weights, which does better than any of those it is the mean of."""

    def __init__(self, network: nn.Module) -> None:
        self._weights: list[Tensor] = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self._means = [weight.detach().clone() for weight in self._weights]
        self._step = 0

    @torch.no_grad()
    def update(self) -> None:
        self._step += 1
        torch._foreach_lerp_(self._means, self._weights, max(1 / self._step, 1 / AVERAGED))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The network has the means for as long."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, mean in zip(self._weights, self._means, strict=True):
            held = weight.clone()
            weight.copy_(mean)
            mean.copy_(held)


def check_finite(step: int, losses: list[float], folder: Path) -> None:
    """SystemExit where a loss is no number any more."""
    if not all(map(math.isfinite, losses)):
        raise SystemExit(f"step {step}: losses are {losses}, no numbers any more; {folder} has the last weights")


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
