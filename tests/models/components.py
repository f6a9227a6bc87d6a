"""Networks of pipelines, loaded from the folder of one component: on one rank, or in parts on threads as ranks."""

import threading

import torch

from tilewright.layers import partition
from tilewright.parallel.group import SingleGroup
from tilewright.parallel.rendezvous import open_rendezvous
from tilewright.weights.checkpoint import open_checkpoint
from tilewright.weights.load import load
from tilewright.weights.spec import iter_weights


def loaded(build, folder, dtype=torch.float32, group=None):
    """The network that `build` makes of the folder's config, with its weights."""
    checkpoint = open_checkpoint(folder)
    with partition.use(partition.Partition(group or SingleGroup())):
        network = build(checkpoint.config)
    load(network, checkpoint, dtype=dtype, rename=network.checkpoint_name)
    return network


def on_ranks(size, make, compute):
    """What `compute(make(group))` gives on each of `size` ranks, which are threads."""
    host = open_rendezvous(size)
    results, errors = [None] * size, []

    def run(rank):
        try:
            with torch.inference_mode():
                results[rank] = compute(made[rank])
        except Exception as error:
            errors.append(error)
            host.abort(rank)

    try:
        made = [make(host.make_group(rank)) for rank in range(size)]
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
    finally:
        host.close()
    assert not errors, errors
    return results


def loaded_on_ranks(size, build, folder, compute, dtype=torch.float32):
    """What `compute(network)` gives on each rank, with its part of the network that `loaded` gives."""
    return on_ranks(size, lambda group: loaded(build, folder, dtype, group), compute)


def randomized(module, seed=0):
    """The module with random weights of a size that lets every one of them count; norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                is_scale = name.endswith("weight")
                parameter.copy_(noise * 0.2 + 1 if is_scale else noise * 0.1)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return module.eval()


def sources_of(network):
    """The tensors that the network asks a checkpoint for, and their shapes."""
    return {source.name: source.shape for weight in iter_weights(network) for source in weight.sources}


def relative(ours, theirs):
    return ((ours.float() - theirs.float()).abs().max() / theirs.abs().max()).item()


def rms(error):
    return error.double().square().mean().sqrt().item()
