import pytest
import torch
from helpers import assert_close, poisoned, rand

from tilewright.ops import embedding
from tilewright.ops.torch_backend import embedding as reference

# Whole heads, odd halves, partial rotation.
WIDTHS = [(10, 4), (72, 72), (80, 34)]


def frequencies(count: int, theta: float = 5e6) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, count, dtype=torch.float) / count)


def table(num_tokens: int, rotated: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = rand(num_tokens, rotated // 2, seed=9, scale=3.0)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("position_dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("num_frequencies", [7, 64])
def test_table(isa, position_dtype, num_frequencies):
    generator = torch.Generator().manual_seed(3)
    positions = torch.randint(0, 262_145, (3, 41), generator=generator)
    positions[:, :3] = torch.tensor([0, 1, 262_144])
    axes = torch.randint(0, 3, (num_frequencies,), generator=generator).to(torch.int32)
    out = poisoned(41, num_frequencies), poisoned(41, num_frequencies)
    inv_freq = frequencies(num_frequencies)
    actual = embedding.rope_table(positions.to(position_dtype), inv_freq, axes, 1.25, out=out)
    expected = reference.rope_table(positions, inv_freq, axes, 1.25)
    for ours, exact in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, exact, rtol=0, atol=1.25 * 1.2e-7 + 6e-8)


def oracle_table(module: torch.nn.Module, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin [T, R/2] of a transformers module, whose own tables hold each half twice."""
    cos, sin = module(torch.zeros(1), positions)
    half = cos.shape[-1] // 2
    return cos.reshape(-1, 2 * half)[:, :half], sin.reshape(-1, 2 * half)[:, :half]


def assert_same_table(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs.contiguous(), rtol=0, atol=3e-7)


ODD_POSITIONS = torch.tensor([[0, 1, 17, 4099, 4099, 99_991], [0, 3, 18, 4100, 5001, 7], [0, 5, 19, 4103, 131_071, 11]])


@pytest.mark.parametrize("section", [[24, 20, 20], [11, 11, 10], [44, 10, 10]])
def test_interleaved_axes_as_qwen3_vl(section):
    from transformers.models.qwen3_vl import modeling_qwen3_vl as oracle
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig

    parameters = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": section}
    config = Qwen3VLTextConfig(head_dim=2 * sum(section), rope_parameters=parameters)
    module = oracle.Qwen3VLTextRotaryEmbedding(config)
    expected = oracle_table(module, ODD_POSITIONS[:, None])
    assert_same_table(
        embedding.rope_table(ODD_POSITIONS, module.inv_freq, embedding.interleaved_axes(section)), expected
    )


def test_sectioned_axes_as_qwen2_vl():
    from transformers.models.qwen2_vl import modeling_qwen2_vl as oracle
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig

    section = [16, 24, 24]
    parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": section}
    config = Qwen2VLTextConfig(hidden_size=256, num_attention_heads=2, rope_parameters=parameters)
    module = oracle.Qwen2VLRotaryEmbedding(config)
    cos, sin = embedding.rope_table(ODD_POSITIONS, module.inv_freq, embedding.sectioned_axes(section))
    assert_same_table((cos, sin), oracle_table(module, ODD_POSITIONS[:, None]))
    q, k = rand(6, 4, 128), rand(6, 2, 128, seed=1)
    expected = oracle.apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], *module(q, ODD_POSITIONS[:, None])
    )
    embedding.rope_qk(q, k, cos, sin)
    assert_close(q, expected[0][0].transpose(0, 1))
    assert_close(k, expected[1][0].transpose(0, 1))


@pytest.mark.parametrize("head_width", [64, 72])
def test_vision_axes_as_qwen3_vl(head_width, dtype):
    from transformers.models.qwen3_vl import modeling_qwen3_vl as oracle
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

    module = oracle.Qwen3VLVisionRotaryEmbedding(Qwen3VLVisionConfig(hidden_size=16 * head_width, num_heads=16))
    rows, columns = torch.meshgrid(torch.arange(7), torch.arange(13), indexing="ij")
    positions = torch.stack((rows.flatten(), columns.flatten()))
    their_cos, their_sin = module(torch.zeros(1), positions.T)
    cos, sin = embedding.rope_table(positions, module.inv_freq.repeat(2), embedding.vision_axes(head_width // 4))
    assert_same_table((cos, sin), (their_cos[:, : head_width // 2], their_sin[:, : head_width // 2]))
    q, k = rand(91, 3, head_width, dtype=dtype), rand(91, 3, head_width, dtype=dtype, seed=1)
    expected = oracle.apply_rotary_pos_emb_vision(q, k, their_cos, their_sin)
    assert_close(embedding.rope(q, cos, sin), expected[0])
    assert_close(embedding.rope(k, cos, sin), expected[1])


@pytest.mark.parametrize("width,rotated", WIDTHS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(isa, dtype, width, rotated, interleaved):
    x = rand(5, 3, width, dtype=dtype)
    cos, sin = table(5, rotated)
    expected = reference.rope(x, cos, sin, interleaved=interleaved)
    out = poisoned(5, 3, width, dtype=dtype)
    assert embedding.rope(x, cos, sin, interleaved=interleaved, out=out) is out
    assert_close(out, expected)
    embedding.rope(x, cos, sin, interleaved=interleaved, out=x)
    assert torch.equal(x, out)


@pytest.mark.parametrize("width,rotated", [(10, 4), (72, 72)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("form", ["rope", "norm", "norm_plus_one"])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_q_and_k_in_a_packed_row(isa, dtype, width, rotated, interleaved, form, weight_dtype):
    heads, kv_heads = 4, 2
    qkv = rand(7, (heads + 2 * kv_heads) * width + 3, dtype=dtype)
    before = qkv.clone()
    q = qkv[:, 1 : 1 + heads * width].view(7, heads, width)
    k = qkv[:, 1 + heads * width :][:, : kv_heads * width].view(7, kv_heads, width)
    cos, sin = table(7, rotated)
    weights = rand(width, dtype=weight_dtype, seed=4), rand(width, dtype=weight_dtype, seed=5)
    if form == "rope":
        expected = [reference.rope(x, cos, sin, interleaved=interleaved) for x in (q, k)]
        embedding.rope_qk(q, k, cos, sin, interleaved=interleaved)
    else:
        options = {"interleaved": interleaved, "weight_plus_one": form == "norm_plus_one"}
        expected = [reference.norm_rope(x, w, 1e-6, cos, sin, **options) for x, w in zip((q, k), weights, strict=True)]
        embedding.qk_norm_rope(q, k, *weights, 1e-6, cos, sin, **options)
    assert_close(q, expected[0])
    assert_close(k, expected[1])
    before[:, 1 : 1 + (heads + kv_heads) * width] = qkv[:, 1 : 1 + (heads + kv_heads) * width]
    assert torch.equal(qkv, before)


def test_errors_name_the_tensor():
    x, (cos, sin) = torch.zeros(3, 2, 8), table(3, 8)
    with pytest.raises(ValueError, match=r"rope: cos has shape \[4, 4\], expected \[T=3, R/2\]"):
        embedding.rope(x, *table(4, 8))
    with pytest.raises(ValueError, match="cos has 5 frequencies, too many for heads of width 8"):
        embedding.rope(x, *table(3, 10))
    with pytest.raises(ValueError, match="cos is bfloat16, expected float32"):
        embedding.rope(x, cos.bfloat16(), sin)
    with pytest.raises(ValueError, match=r"rope_qk: k has shape \[3, 2, 6\], expected \[T=3, G, K=8\]"):
        embedding.rope_qk(x, torch.zeros(3, 2, 6), cos, sin)
    with pytest.raises(ValueError, match=r"axis_of_frequency\[1\] is 1, expected 0 to 0"):
        embedding.rope_table(torch.zeros(1, 3), torch.ones(2), torch.tensor([0, 1], dtype=torch.int32))


def test_no_tokens(isa):
    assert embedding.rope(torch.zeros(0, 2, 8), torch.zeros(0, 4), torch.zeros(0, 4)).shape == (0, 2, 8)


def test_pairs_by_frame_row_and_column_are_complex_products(isa, dtype):
    """As diffusion transformers have it: each axis of a clip turns its share of the pairs of a head."""
    sections, heads = [4, 6, 5], 3
    positions = torch.cartesian_prod(*(torch.arange(n) for n in (2, 3, 4))).T.contiguous()  # [3 axes, T]
    inv_freq = torch.cat([10000.0 ** -(torch.arange(n) / n) for n in sections])
    axes = embedding.sectioned_axes(sections)
    cos, sin = embedding.rope_table(positions, inv_freq, axes)
    x = rand(positions.shape[1], heads, 2 * sum(sections), dtype=dtype)
    turns = torch.polar(torch.ones(1), positions.float()[axes.long()].T * inv_freq)
    products = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * turns[:, None]
    expected = torch.view_as_real(products).flatten(-2).to(dtype)
    out = embedding.rope(x, cos, sin, interleaved=True, out=poisoned(*x.shape, dtype=dtype))
    assert_close(out, expected)
