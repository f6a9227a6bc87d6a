import pytest
import torch
from helpers import poisoned, rand

from tilewright.ops import embedding
from tilewright.ops.linear import PackedWeight, pack_weight
from tilewright.ops.packed import PackedForm, weight_format
from tilewright.ops.torch_backend import embedding as reference


@pytest.mark.parametrize("rows,width", [(1, 1), (33, 32), (70, 100)])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_embedding(isa, dtype, id_dtype, rows, width):
    table = rand(rows, width, dtype=dtype)
    ids = torch.randint(0, rows, (37,), generator=torch.Generator().manual_seed(1)).to(id_dtype)
    expected = reference.embedding(ids, table)
    room = poisoned(37, width + 3, dtype=dtype)
    embedding.embedding(ids, table, out=room[:, :width])
    assert torch.equal(room[:, :width], expected) and room[:, width:].isnan().all()
    out = embedding.embedding(ids, pack_weight(table), out=poisoned(37, width, dtype=dtype))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("width", [5, 33])
def test_scatter_rows(isa, dtype, width):
    rows = torch.randperm(50, generator=torch.Generator().manual_seed(2))[:29]
    values, tokens = rand(29, width, dtype=dtype), rand(50, width, dtype=dtype, seed=1)
    written, summed = tokens.clone(), tokens.clone()
    assert embedding.scatter_rows(written, rows, values) is written
    assert torch.equal(written, reference.scatter_rows(tokens.clone(), rows, values))
    embedding.scatter_add_rows(summed, rows, values)
    assert torch.equal(summed, reference.scatter_add_rows(tokens.clone(), rows, values))


@pytest.mark.parametrize("bad", [-1, 12, 2**40])
def test_a_bad_id_is_named(bad):
    table, ids = rand(12, 8), torch.tensor([3, 11, bad, -7])
    message = rf"ids\[2\] is {bad}, expected 0 to 11"
    with pytest.raises(ValueError, match=f"embedding: {message}"):
        embedding.embedding(ids, table)
    with pytest.raises(ValueError, match=message):
        embedding.embedding(ids, pack_weight(table))
    with pytest.raises(ValueError, match=rf"scatter_rows: rows\[2\] is {bad}, expected 0 to 11"):
        embedding.scatter_rows(table, ids, torch.zeros(4, 8))


def test_other_errors():
    with pytest.raises(ValueError, match=r"scatter_add_rows: rows\[2\] is 4, a row that was named before"):
        embedding.scatter_add_rows(torch.zeros(9, 8), torch.tensor([4, 3, 4]), torch.zeros(3, 8))
    with pytest.raises(ValueError, match="table has 1024 elements, expected 2048 for a packed table of 33 by 32"):
        form = PackedForm(weight_format(torch.float32), 33, 32)
        embedding.embedding(torch.tensor([0]), PackedWeight(torch.zeros(1024), form))
    with pytest.raises(ValueError, match="packed as gate and up rows"):
        embedding.embedding(torch.tensor([0]), pack_weight(torch.zeros(64, 32), gated=True))


def test_nothing(isa):
    assert embedding.embedding(torch.zeros(0, dtype=torch.int64), torch.zeros(4, 8)).shape == (0, 8)
