"""Networks of diffusion filled from diffusers' modules, on one rank or on several, which are threads."""

import threading

import torch

from tilewright.layers import partition
from tilewright.layers.partition import Partition
from tilewright.ops.native import kernels
from tilewright.parallel.rendezvous import open_rendezvous
from tilewright.weights.spec import iter_weights


def randomize(module, seed=0, spread=0.1):
    """Every value of the module: norms and tables that start as ones or zeros would hide what is done with them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in module.named_parameters():
            scale = spread if value.dim() < 2 else value[0].numel() ** -0.5
            noise = torch.randn(value.shape, generator=generator) * scale
            value.copy_(1 + noise if "norm" in name and name.endswith("weight") else noise)
    return module.eval()


def fill(network, module, dtype=torch.float32):
    """The network with the module's weights, all of which it must ask for, and no other."""
    state = {network.checkpoint_name(name): value for name, value in module.state_dict().items()}
    state.pop(None, None)
    weights = list(iter_weights(network))
    assert {source.name for weight in weights for source in weight.sources} == set(state)
    for weight in weights:
        for source in weight.sources:
            assert tuple(state[source.name].shape) == source.shape
        weight.build([state[source.name].float().contiguous() for source in weight.sources], dtype)
    return network


def on_ranks(size, build, module, dtype, compute):
    """compute(network) on each of `size` ranks, each with its part of the network: the results, by rank."""
    host = open_rendezvous(size)
    results, errors = [None] * size, []

    def run(rank):
        try:
            kernels.set_num_threads(1)
            with partition.use(Partition(host.make_group(rank))):
                network = build()
            with torch.inference_mode():
                results[rank] = compute(fill(network, module, dtype))
        except BaseException as error:  # the others wait for this rank
            errors.append(error)
            host.abort(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    host.close()
    if errors:
        raise errors[0]
    return results


def rms(error):
    return error.double().square().mean().sqrt().item()
