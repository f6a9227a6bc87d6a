"""Quantised checkpoints are refused by the name of their format, not by a list of tensors."""

import pytest
import torch

from tilewright.weights.checkpoint import CheckpointError
from tilewright.weights.linear import LinearWeight
from tilewright.weights.load import load

INTS, HALVES = torch.zeros(4, 8, dtype=torch.int32), torch.zeros(4, 8, dtype=torch.float16)
BYTES = torch.zeros(16, dtype=torch.uint8)
AWQ = {"q.qweight": INTS, "q.qzeros": INTS, "q.scales": HALVES}
PACKED = {"q.weight_packed": INTS, "q.weight_scale": HALVES, "q.weight_shape": torch.tensor([4, 8])}
FP8 = {"q.weight": torch.zeros(4, 8).to(torch.float8_e4m3fn), "q.weight_scale_inv": torch.ones(1, 1)}
NF4 = {"q.weight": BYTES, "q.weight.absmax": HALVES, "q.weight.quant_state.bitsandbytes__nf4": BYTES}
MLX = {"q.weight": INTS, "q.scales": HALVES, "q.biases": HALVES}


def method(name: str) -> dict:
    return {"quantization_config": {"quant_method": name, "bits": 4}}


@pytest.mark.parametrize(
    "config, tensors, name",
    [
        ({}, AWQ, "AWQ"),
        ({}, AWQ | {"q.g_idx": INTS}, "GPTQ"),
        ({}, PACKED, "compressed-tensors"),
        ({}, FP8, "FP8"),
        (method("bitsandbytes"), NF4, "bitsandbytes"),
        ({"quantization_config": {"load_in_4bit": True}}, NF4, "bitsandbytes"),
        ({}, NF4, "bitsandbytes"),
        ({"quantization": {"group_size": 64, "bits": 4}}, MLX, "MLX"),
        ({}, MLX, "MLX"),
        ({"text_config": method("aqlm")}, {"q.codes": INTS}, "aqlm"),
        (method("hqq"), {"q.W_q": INTS}, "hqq"),
    ],
)
def test_the_format_is_named(make_checkpoint, config, tensors, name):
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}  # none shares memory in a file
    checkpoint = make_checkpoint(tensors, config={"model_type": "test", **config})
    message = f"checkpoint is quantised as {name}, which is not supported; .*not quantised"
    with pytest.raises(CheckpointError, match=message):
        load([LinearWeight([("q", 4)], 8)], checkpoint, dtype=torch.float32)


def test_whole_weights_load_whatever_the_config_says_of_quantisation(make_checkpoint):
    checkpoint = make_checkpoint({"q.weight": torch.ones(4, 8)}, config={"model_type": "test", **method("fp8")})
    weight = LinearWeight([("q", 4)], 8)
    load([weight], checkpoint, dtype=torch.float32)
    assert torch.equal(weight.value.unpack(), torch.ones(4, 8))
