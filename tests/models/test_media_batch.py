"""What encoders read: patches where they lie, all of a step in one product for each kind of weight."""

import pytest
import tiny
import torch

from tilewright.models.protocol import MediaBatch, MediaItem

MEDIA = [("image", (1, 6, 8)), ("video", (3, 4, 6)), ("image", (1, 2, 12)), ("video", (1, 2, 2)), ("image", (1, 4, 4))]


def item(first_row, num_rows):
    return MediaItem("image", (1, 1, num_rows), (1, 1), first_row, num_rows, num_rows)


def test_neighbours_are_read_where_they_lie():
    buffer = torch.arange(40.0).view(10, 4)
    items = (item(2, 3), item(5, 1), item(6, 2))
    rows = MediaBatch(buffer, items).rows(items)
    assert rows.data_ptr() == buffer[2:].data_ptr() and torch.equal(rows, buffer[2:8])


def test_others_are_copied_in_order():
    buffer = torch.arange(40.0).view(10, 4)
    items = (item(6, 2), item(0, 1), item(1, 2))
    rows = MediaBatch(buffer, items).rows(items)
    assert torch.equal(rows, buffer[[6, 7, 0, 1, 2]])


def record_products(monkeypatch, layer):
    """The rows that each call of a layer multiplies."""
    calls = []
    plain = type(layer).__call__
    monkeypatch.setattr(
        type(layer),
        "__call__",
        lambda self, x, **options: (calls.append(x) if self is layer else None) or plain(self, x, **options),
    )
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_media_of_a_step_are_two_products(networks, models, monkeypatch, dtype):
    """One for pictures and one for videos, whatever their order; and features are those of each medium alone."""
    hf, _ = networks("qwen3_vl")
    model = models("qwen3_vl", dtype)
    inputs = tiny.in_dtype(tiny.media_prompt(hf, MEDIA, 5).inputs, dtype)
    buffer = tiny.media_buffer(dtype)
    alone = [model.encode(MediaBatch.of(buffer.rows, [medium]))[0] for medium in inputs.media]
    calls = record_products(monkeypatch, model.vision.patch_embedding)
    together = model.encode(MediaBatch.of(buffer.rows, inputs.media))
    assert [tuple(x.shape) for x in calls] == [(48 + 24 + 16, 48), (72 + 4, 96)]
    assert all(torch.equal(ours, want) for ours, want in zip(together, alone, strict=True))


def test_pictures_of_one_request_are_not_copied(networks, models, monkeypatch):
    hf, _ = networks("qwen3_vl")
    model = models("qwen3_vl", torch.float32)
    inputs = tiny.in_dtype(tiny.media_prompt(hf, [("image", (1, 4, 4)), ("image", (1, 2, 6))], 6).inputs, torch.float32)
    buffer = tiny.media_buffer(torch.float32)
    calls = record_products(monkeypatch, model.vision.patch_embedding)
    model.encode(MediaBatch.of(buffer.rows, inputs.media[::-1]))
    (x,) = calls
    assert x.data_ptr() == buffer.view(inputs.media[0].region).data_ptr() and len(x) == 28


def test_the_tiles_of_a_picture_are_one_product(networks, models, monkeypatch):
    networks("mllama")
    model = models("mllama", torch.float32)
    calls = record_products(monkeypatch, model.vision.patches)
    tiny.encode(model, tiny.cross_prompt([(2, 2), 4, (1, 3)], 8).inputs, torch.float32)
    assert [tuple(x.shape) for x in calls] == [(4 * 16, 48), (3 * 16, 48)]
