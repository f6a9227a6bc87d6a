"""Tiny autoencoders of diffusers with random weights, and ours of the same checkpoint."""

import functools
import json

import torch
from oracle import require

from tilewright.models.registry import build_vae
from tilewright.weights.checkpoint import open_checkpoint
from tilewright.weights.load import load


def oracle(class_name, **config):
    """diffusers' autoencoder; norms and statistics are random too: with ones and zeros some mistakes would not show."""
    diffusers = require("diffusers")
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    network = getattr(diffusers, class_name)(**config).eval()
    with torch.no_grad():
        for name, tensor in network.state_dict().items():
            if not tensor.is_floating_point():
                continue
            random = torch.randn(tensor.shape, generator=generator)
            if "running_var" in name:
                tensor.copy_(random.abs() + 0.5)
            elif "running_mean" in name:
                tensor.copy_(random)
            elif "norm" in name or "gamma" in name:
                tensor.add_(0.3 * random)
    return network


def save(network, folder):
    """The checkpoint's folder."""
    safetensors = require("safetensors.torch")
    config = {"_class_name": type(network).__name__} | {
        key: value for key, value in network.config.items() if not key.startswith("_")
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
    safetensors.save_file(tensors, folder / "model.safetensors")
    return folder


def checkpoints_of(families, tmp_path_factory):
    """diffusers' autoencoder and its folder by the name of its family, made when first asked for."""

    @functools.cache
    def checkpoint(name):
        network = oracle(**families[name])
        return network, save(network, tmp_path_factory.mktemp(name))

    return checkpoint


def ours(folder, dtype=torch.float32, **options):
    checkpoint = open_checkpoint(folder)
    network = build_vae(checkpoint.config)
    load(network, checkpoint, dtype=dtype, rename=network.checkpoint_name, **options)
    return network


def channels_last(x):
    """[B, T, H, W, C] of diffusers' [B, C, H, W] or [B, C, T, H, W]."""
    return (x.unsqueeze(2) if x.dim() == 4 else x).movedim(1, -1)


def rand(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative(actual, expected):
    return ((actual.float() - expected.float()).abs().max() / expected.float().abs().max()).item()


def rms(error):
    return error.double().square().mean().sqrt().item()
