"""What depends on the device, and unsupported devices."""

import pytest
import torch
from fake_device import FakeDevice

from tilewright.ops import platform
from tilewright.types import RequestError


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_cpu(backend):
    cpu = platform.resolve("cpu", backend)
    assert (cpu.device, cpu.backend, cpu.streams_layers) == ("cpu", backend, False)
    assert platform.resolve("cpu", backend, streams_layers=True).streams_layers
    assert cpu.available_bytes() > 0 and cpu.attention


@pytest.mark.parametrize("device", ["mps", "xpu", "npu:1"])
def test_devices_that_are_not_built(device):
    with pytest.raises(RequestError, match=rf"device is '{device}', which is not supported \(docs/devices\.md\)"):
        platform.resolve(device, "torch")


def refuse(message):
    def fail():
        raise RuntimeError(message)

    return fail


def test_a_gpu_that_cannot_be_used(monkeypatch):
    with pytest.raises(RequestError, match="a GPU needs backend="):
        platform.resolve("cuda", "native")
    with pytest.raises(RequestError, match="device is 'cuda:1', where layers are not streamed"):
        platform.resolve("cuda:1", streams_layers=True)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RequestError, match=r"device is 'cuda', and this torch .* was built without CUDA"):
        platform.resolve("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", refuse("The NVIDIA driver on your system is too old (found 11)\nUpdate"))
    with pytest.raises(RequestError, match=r"driver on your system is too old .*; expected a driver for CUDA 13\.0 or"):
        platform.resolve("cuda")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    for count, expected in ((0, "cpu: there is none"), (1, "cuda:0"), (4, "cuda:0 to cuda:3")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with pytest.raises(RequestError, match=f"device is 'cuda:7', expected {expected}"):
            platform.resolve("cuda:7")


def test_what_a_device_of_its_own_has_no_room_for():
    own = platform.Platform("cuda:0", "torch", "flash", platform.WORKER, False, lambda: 10**9, FakeDevice())
    own.require_one_rank(1)
    own.require_room("the weights", 10**9)
    with pytest.raises(RequestError, match="tp is 2 and device cuda:0, expected 1"):
        own.require_one_rank(2)
    with pytest.raises(RequestError, match=r"the weights take 2\.0 GB, and cuda:0 has 1\.0 GB free"):
        own.require_room("the weights", 2 * 10**9)


def test_a_host_has_ranks_and_maps_what_it_has_no_room_for():
    own = platform.resolve("cpu")
    own.require_one_rank(2)
    own.require_room("the weights", 1 << 60)


@pytest.mark.parametrize(("device", "backend"), [("tpu", "native"), ("cpu:3", "native"), ("cpu", "jax")])
def test_what_nobody_knows(device, backend):
    with pytest.raises(RequestError, match="expected"):
        platform.resolve(device, backend)
