"""The kernels beside torch and beside each other: on the same threads, and called from several at once."""

import threading

import pytest
import torch
from helpers import rand

from tilewright.ops.attention import varlen_attention
from tilewright.ops.linear import linear, pack_weight
from tilewright.ops.native import kernels


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    kernels.set_num_threads(0)
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_torch_and_our_tiles_take_turns_on_every_thread(threads, count):
    """torch's oneDNN remembers the tile configuration it loaded: ours must leave it as it was."""
    torch.set_num_threads(count)
    kernels.set_num_threads(count)
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        m, n, k = (int(torch.randint(1, 200, (), generator=generator)) for _ in range(3))
        x, weight = rand(m, k, dtype=torch.bfloat16), rand(n, k, dtype=torch.bfloat16, seed=1)
        expected = torch.nn.functional.linear(x.float(), weight.float())
        packed = pack_weight(weight)
        q, starts = rand(m, 2, 64, dtype=torch.bfloat16), torch.tensor([0, m], dtype=torch.int32)
        for _ in range(3):
            theirs = torch.nn.functional.linear(x, weight)
            ours = linear(x, packed)
            varlen_attention(q, q, q, starts)
            tolerance = {"rtol": 0.02, "atol": 0.02 * expected.abs().mean().item() + 1e-2}
            torch.testing.assert_close(theirs.float(), expected, **tolerance)
            torch.testing.assert_close(ours.float(), expected, **tolerance)


def test_called_from_several_python_threads(threads):
    kernels.set_num_threads(3)
    weight = rand(300, 200, dtype=torch.bfloat16)
    packed = pack_weight(weight)
    inputs = [rand(m, 200, dtype=torch.bfloat16, seed=m) for m in (1, 5, 33, 90)]
    expected = [linear(x, packed) for x in inputs]
    wrong = []

    def work(i):
        for _ in range(30):
            if not torch.equal(linear(inputs[i], packed), expected[i]):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_thread_count_does_not_change_the_bits(threads, isa, dtype):
    weight, x = rand(500, 96, dtype=dtype), rand(150, 96, dtype=dtype, seed=1)
    packed = pack_weight(weight)
    outs = []
    for count in (1, 2, 3, 7):
        kernels.set_num_threads(count)
        assert kernels.num_threads() == count
        outs.append(linear(x, packed))
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_threads_can_be_bound_and_released(threads):
    import os

    before = os.sched_getaffinity(0)
    kernels.bind_threads([min(before)])
    assert os.sched_getaffinity(0) == {min(before)}
    linear(rand(64, 64), pack_weight(rand(64, 64)))
    kernels.bind_threads([])
    assert os.sched_getaffinity(0) == before


def test_negative_thread_count():
    with pytest.raises(ValueError, match="num_threads is -1, expected 0 or more"):
        kernels.set_num_threads(-1)
