"""What depends on the device, and devices that are not built."""

import pytest
import torch

from tilewright import platform
from tilewright.types import RequestError


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_cpu(backend):
    cpu = platform.resolve("cpu", backend)
    assert (cpu.device, cpu.backend, cpu.streams_layers) == ("cpu", backend, False)
    assert platform.resolve("cpu", backend, streams_layers=True).streams_layers
    assert cpu.available_bytes() > 0 and cpu.attention


@pytest.mark.parametrize("device", ["mps", "xpu", "npu:1"])
def test_devices_that_are_not_built(device):
    with pytest.raises(RequestError, match=rf"device is '{device}', which is not built \(docs/platforms\.md\)"):
        platform.resolve(device, "torch")


def test_a_gpu(monkeypatch):
    with pytest.raises(RequestError, match="a GPU needs backend="):
        platform.resolve("cuda", "native")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RequestError, match="device is 'cuda:1', but torch finds no such GPU here"):
        platform.resolve("cuda:1", "torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert platform.resolve("cuda:1", "torch").device == "cuda:1"
    with pytest.raises(RequestError, match="device is 'cuda:1', where layers are not streamed"):
        platform.resolve("cuda:1", "torch", streams_layers=True)


@pytest.mark.parametrize(("device", "backend"), [("tpu", "native"), ("cpu:3", "native"), ("cpu", "jax")])
def test_what_nobody_knows(device, backend):
    with pytest.raises(RequestError, match="expected"):
        platform.resolve(device, backend)
