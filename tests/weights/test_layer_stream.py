"""Layers that are read ahead and let go: what is resident of the file they are mapped from."""

import copy
import mmap
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tilewright.types import RequestError
from tilewright.weights.layer_stream import AROUND_BYTES, LayerStream, Range, StreamedLayer, stream_layers
from tilewright.weights.safetensors import MappedFile

PAGE = mmap.PAGESIZE
LAYER = 8 << 20
NUM_LAYERS = 6
AROUND = 2 * AROUND_BYTES  # before and behind what is in memory


def resident_bytes(path):
    """Of the mappings of a file, as the system counts them."""
    text, total, is_own = Path("/proc/self/smaps").read_text(), 0, False
    for line in text.splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_own = line.endswith(f" {path}")
        elif is_own and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.truncate(NUM_LAYERS * LAYER)
        for index in range(NUM_LAYERS):
            file.seek(index * LAYER)
            file.write(bytes([index + 1]))
    return MappedFile(path)


def ranges_of(file):
    begin = file.bytes_at(0, 1).data_ptr()
    return [Range(begin + i * LAYER, begin + (i + 1) * LAYER) for i in range(NUM_LAYERS)]


@pytest.mark.slow
@pytest.mark.parametrize(("num_layers", "num_kept"), [(2, 0), (4, 2), (6, 6)])
def test_what_is_resident_stays_within_the_budget(file, num_layers, num_kept):
    stream = LayerStream(ranges_of(file), num_layers * LAYER)
    assert stream.num_kept == num_kept
    highest = 0
    for _ in range(2):
        for index in range(NUM_LAYERS):
            stream.enter(index)
            for reading in stream._reading.values():
                reading.result()
            highest = max(highest, resident_bytes(file.path))
            # What computes finds its weights.
            assert file.memory[index * LAYER] == index + 1
            highest = max(highest, resident_bytes(file.path))
    expected = min(num_layers, NUM_LAYERS) * LAYER
    assert expected <= highest <= expected + AROUND


def test_layers_out_of_order_do_not_pile_up(file):
    stream = LayerStream(ranges_of(file), 2 * LAYER)
    for index in (0, 3, 1, 5, 2, 2, 4, 0):
        stream.enter(index)
        for reading in stream._reading.values():
            reading.result()
        assert 2 * LAYER <= resident_bytes(file.path) <= 2 * LAYER + AROUND


def test_a_budget_below_two_layers(file):
    with pytest.raises(RequestError, match=rf"stream_layers is {LAYER} bytes, expected {2 * LAYER} or more"):
        LayerStream(ranges_of(file), LAYER)


def test_ranges_give_back_only_pages_of_their_own(file):
    begin = ranges_of(file)[0].begin
    Range(begin, begin + LAYER).read()
    whole = resident_bytes(file.path)
    Range(begin + 100, begin + 3 * PAGE + 100).release()
    assert resident_bytes(file.path) == whole - 2 * PAGE
    Range(begin + 100, begin + 200).release()
    assert resident_bytes(file.path) == whole - 2 * PAGE


def test_a_layer_is_entered_by_whatever_is_used_of_it():
    entered = []
    layer = StreamedLayer(torch.nn.Identity(), SimpleNamespace(enter=entered.append), 3)
    assert layer(7) == 7 and entered == [3]
    assert layer.training is True and entered == [3, 3]
    assert copy.copy(layer)(8) == 8


def test_a_network_without_layers():
    assert stream_layers(SimpleNamespace(sizes=[1, 2], stages=[SimpleNamespace()]), 1) is None
