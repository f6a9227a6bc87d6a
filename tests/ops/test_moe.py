import pytest
import torch
from helpers import assert_close, in_fp16, poisoned, rand
from oracle import require

from tilewright.ops.linear import linear, pack_weight
from tilewright.ops.moe import PackedExperts, moe, route
from tilewright.ops.native import kernels
from tilewright.ops.torch_backend import moe as reference

SHAPES = [  # T, E, k, D, I
    (1, 8, 2, 32, 16),
    (3, 16, 4, 70, 40),
    (131, 3, 2, 96, 64),
]


def assert_same(actual: torch.Tensor, expected: torch.Tensor):
    """As assert_close, four times as wide in bf16: where act(gate) * up, rounded between the products, falls the other
    way, a large one moves an output by a rounding step of its own. Twice that where products are in fp16."""
    scale = expected.float().abs().mean().item()
    step = 2**-5 if in_fp16() else 2**-6
    assert_close(actual, expected, atol=scale * step if expected.dtype == torch.bfloat16 else None)


def pack(weights: torch.Tensor, gated: bool) -> PackedExperts:
    experts = PackedExperts.empty(*weights.shape, gated, weights.dtype)
    for expert, weight in enumerate(weights):
        experts.pack(expert, weight)
    return experts


def experts_of(num_experts: int, width: int, inner: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = rand(num_experts, 2 * inner, width, dtype=dtype, seed=1, scale=width**-0.5)
    return gate_up, rand(num_experts, width, inner, dtype=dtype, seed=2, scale=inner**-0.5)


def routing(tokens: int, num_experts: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.route(rand(tokens, num_experts, seed=3), k, renormalize=True)


# ---- route


@pytest.mark.parametrize("tokens,num_experts,k", [(5, 16, 16), (33, 100, 5)])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_route(isa, dtype, tokens, num_experts, k, scoring, renormalize):
    logits = rand(tokens, num_experts, dtype=dtype, scale=3.0)
    out = torch.full((tokens, k), -1, dtype=torch.int32), poisoned(tokens, k)
    ids, weights = route(logits, k, renormalize=renormalize, scoring=scoring, out=out)
    expected_ids, expected_weights = reference.route(logits, k, renormalize=renormalize, scoring=scoring)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("renormalize", [False, True])
def test_route_is_the_router_of_qwen3_moe(isa, renormalize):
    modeling = require("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = modeling.Qwen3MoeConfig(hidden_size=64, num_experts=128, num_experts_per_tok=8, norm_topk_prob=renormalize)
    router = modeling.Qwen3MoeTopKRouter(config)
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, expected_weights, expected_ids = router(rand(200, 64, scale=0.3))
    ids, weights = route(logits, 8, renormalize=renormalize)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


def test_equal_logits_go_to_the_lower_id(isa):
    ids, weights = route(torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 1.0]]), 5, renormalize=False)
    assert ids.tolist() == [[1, 2, 4, 0, 3]]
    assert (weights[0, :3] == weights[0, 0]).all() and (weights[0, 3:] == weights[0, 3]).all()


def test_logits_too_far_apart_for_softmax_keep_their_order(isa):
    ids, weights = route(torch.tensor([[-1e30, 0.0, -1e20, 500.0, -1e25]]), 4, renormalize=True)
    assert ids.tolist() == [[3, 1, 2, 4]]
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0.0, 0.0, 0.0]]))


def test_nan_is_chosen_last_and_shows_in_the_weights(isa):
    logits = torch.tensor([[float("nan"), 1.0, float("nan"), 2.0], [4.0, 3.0, 2.0, 1.0]])
    ids, weights = route(logits, 3, renormalize=False)
    assert ids.tolist() == [[3, 1, 0], [0, 1, 2]]
    assert weights[0].isnan().all() and not weights[1].isnan().any()


def test_route_takes_strided_logits_and_no_tokens(isa):
    logits = rand(6, 40)
    assert torch.equal(
        route(logits[:, 8:24], 3, renormalize=True)[0], reference.route(logits[:, 8:24], 3, renormalize=True)[0]
    )
    assert [t.shape for t in route(torch.zeros(0, 4), 2, renormalize=True)] == [(0, 2), (0, 2)]


# ---- moe


@pytest.mark.parametrize("tokens,num_experts,k,width,inner", SHAPES)
def test_moe(isa, dtype, tokens, num_experts, k, width, inner):
    gate_up, down = experts_of(num_experts, width, inner, dtype)
    x, (ids, weights) = rand(tokens, width, dtype=dtype), routing(tokens, num_experts, k)
    packed = pack(gate_up, True), pack(down, False)
    out = moe(x, ids, weights, *packed, out=poisoned(tokens, width, dtype=dtype))
    assert_same(out, reference.plain_moe(x, ids, weights, gate_up, down))
    residual = rand(tokens, width, dtype=dtype, seed=5)
    expected = reference.plain_moe(x, ids, weights, gate_up, down, activation="gelu_tanh", residual=residual)
    out = moe(
        x, ids, weights, *packed, activation="gelu_tanh", residual=residual, out=poisoned(tokens, width, dtype=dtype)
    )
    assert_same(out, expected)
    # In place on the residual, as a decoder layer does.
    assert torch.equal(moe(x, ids, weights, *packed, activation="gelu_tanh", residual=residual, out=residual), out)


def test_fp32_activations_with_bf16_experts(isa):
    gate_up, down = experts_of(4, 64, 48, torch.bfloat16)
    x, (ids, weights) = rand(9, 64), routing(9, 4, 2)
    assert_same(
        moe(x, ids, weights, pack(gate_up, True), pack(down, False)),
        reference.plain_moe(x, ids, weights, gate_up, down),
    )


@pytest.mark.parametrize("chosen", [[0], [3], [3, 0], [2, 2]], ids=str)
def test_skewed_routing(isa, dtype, chosen):
    """All tokens to the same experts, the others without any; even the same expert twice."""
    gate_up, down = experts_of(4, 64, 48, dtype)
    x = rand(70, 64, dtype=dtype)
    ids = torch.tensor([chosen] * 70, dtype=torch.int32)
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0))
    for unused in {0, 1, 2, 3} - set(chosen):
        gate_up[unused] = down[unused] = float("nan")
    out = moe(x, ids, weights, pack(gate_up, True), pack(down, False))
    assert_same(out, reference.plain_moe(x, ids, weights, gate_up, down))


def test_one_expert_is_two_linears(isa, dtype):
    gate_up, down = experts_of(1, 96, 80, dtype)
    x = rand(50, 96, dtype=dtype)
    ids, weights = torch.zeros(50, 1, dtype=torch.int32), torch.ones(50, 1)
    inner = linear(x, pack_weight(gate_up[0], gated=True), activation="silu")
    expected = linear(inner, pack_weight(down[0]))
    assert torch.equal(moe(x, ids, weights, pack(gate_up, True), pack(down, False)), expected)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_token_does_not_depend_on_its_neighbours(isa, dtype, threads):
    gate_up, down = experts_of(6, 200, 70, dtype)
    experts = pack(gate_up, True), pack(down, False)
    x, (ids, weights) = rand(150, 200, dtype=dtype, seed=4), routing(150, 6, 3)
    together = moe(x, ids, weights, *experts)
    kernels.set_num_threads(threads)
    try:
        for rows in (slice(0, 1), slice(7, 9), slice(100, 117), slice(20, 60), slice(0, 150)):
            assert torch.equal(moe(x[rows], ids[rows], weights[rows], *experts), together[rows])
    finally:
        kernels.set_num_threads(0)


def test_more_tokens_than_fit_one_pass():
    """128 MB of outputs are 2,048 tokens here: 5,000 take three passes, with the same bits."""
    gate_up, down = experts_of(8, 2048, 16, torch.bfloat16)
    experts = pack(gate_up, True), pack(down, False)
    x, (ids, weights) = rand(5000, 2048, dtype=torch.bfloat16), routing(5000, 8, 8)
    residual = rand(5000, 2048, dtype=torch.bfloat16, seed=5)
    out = moe(x, ids, weights, *experts, residual=residual, out=poisoned(*x.shape, dtype=x.dtype))
    for rows in (slice(0, 40), slice(1660, 1680), slice(3320, 3350), slice(4980, 5000)):
        assert torch.equal(moe(x[rows], ids[rows], weights[rows], *experts, residual=residual[rows]), out[rows])


def test_strided_rows_and_no_tokens(isa, dtype):
    gate_up, down = experts_of(3, 48, 20, dtype)
    experts = pack(gate_up, True), pack(down, False)
    wide, wide_out, (ids, weights) = rand(7, 100, dtype=dtype), poisoned(7, 90, dtype=dtype), routing(7, 3, 2)
    moe(wide[:, 10:58], ids, weights, *experts, out=wide_out[:, 20:68])
    assert_same(wide_out[:, 20:68], reference.plain_moe(wide[:, 10:58], ids, weights, gate_up, down))
    assert wide_out[:, :20].isnan().all() and wide_out[:, 68:].isnan().all()
    assert moe(wide[:0, :48], ids[:0], weights[:0], *experts).shape == (0, 48)


@pytest.mark.parametrize("gated", [False, True])
def test_an_expert_has_the_bytes_of_a_packed_weight(dtype, gated):
    weights = rand(3, 70, 45, dtype=dtype)
    experts = pack(weights, gated)
    for expert, weight in enumerate(weights):
        assert torch.equal(experts.data[expert], pack_weight(weight, gated=gated).data)
        assert torch.equal(experts.expert(expert).unpack(), weight)


def test_experts_may_come_in_another_type():
    weight = rand(8, 4)
    experts = PackedExperts.empty(2, 8, 4, False, torch.bfloat16)
    experts.pack(1, weight)
    assert torch.equal(experts.expert(1).unpack(), weight.bfloat16())


def test_errors():
    gate_up, down = pack(torch.zeros(4, 6, 8), True), pack(torch.zeros(4, 8, 3), False)
    x, ids, weights = torch.zeros(2, 8), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2)
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match=rf"moe: ids\[1, 0\] is {wrong}, expected 0 to 3"):
            moe(x, torch.tensor([[0, 3], [wrong, 0]], dtype=torch.int32), weights, gate_up, down)
    with pytest.raises(ValueError, match=r"moe: x has shape \[2, 7\], expected \[T, D=8\]"):
        moe(torch.zeros(2, 7), ids, weights, gate_up, down)
    with pytest.raises(ValueError, match=r"moe: weights has shape \[2, 1\], expected \[T=2, k=2\]"):
        moe(x, ids, weights[:, :1].contiguous(), gate_up, down)
    with pytest.raises(ValueError, match="moe: ids is int64"):
        moe(x, ids.long(), weights, gate_up, down)
    with pytest.raises(ValueError, match="residual is bfloat16, expected float32 as out"):
        moe(x, ids, weights, gate_up, down, residual=torch.zeros(2, 8).bfloat16())
    with pytest.raises(ValueError, match=r"gate_up is gated \[6, 8\] and down gated \[6, 8\], expected gated"):
        moe(x, ids, weights, gate_up, gate_up)
    with pytest.raises(ValueError, match=r"down has shape \[3, \d+\], expected \[E=4, _\]"):
        moe(x, ids, weights, gate_up, pack(torch.zeros(3, 8, 3), False))
    with pytest.raises(ValueError, match="top_k is 5, expected 1 to the number of experts, 4"):
        route(torch.zeros(2, 4), 5, renormalize=True)
    with pytest.raises(ValueError, match="scoring is 'linear', expected one of softmax, sigmoid"):
        route(torch.zeros(2, 4), 2, renormalize=True, scoring="linear")
    with pytest.raises(ValueError, match="expert is 4, expected 0 to 3"):
        gate_up.pack(4, torch.zeros(6, 8))
    with pytest.raises(ValueError, match=r"weight has shape \[6, 7\], expected \[n=6, k=8\]"):
        gate_up.pack(0, torch.zeros(6, 7))
    with pytest.raises(ValueError, match=r"2 experts of 5 x 8, expected 1 or more gate\|up experts of an even n"):
        PackedExperts.empty(2, 5, 8, True, torch.float32)
