"""Rows of Qwen3.5's gated delta nets: a prompt, decode steps, and the ops before and after the rule.

They are compared with plain torch: the chunked form in fp32 for a prompt, the ops of transformers for the rest.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.bench.row import ROTATION_BYTES, Calls, Row, close, random, rotation
from tilewright.bench.shapes import LINEAR_ATTENTIONS, LinearAttentionShape
from tilewright.ops import conv, gated_delta, norm
from tilewright.ops.plan import empty_in_huge_pages
from tilewright.ops.torch_backend import conv as conv_twins
from tilewright.ops.torch_backend import gated_delta as twins
from tilewright.ops.torch_backend import norm as norm_twins

CHUNK_TOKENS = 64


def chunked_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return out and the state after the last token; arguments are those of `ops.gated_delta_rule`.

    With the decay since the chunk began e_i = exp(g_1 + .. + g_i) and L_ij = beta_i (k_i . k_j) e_i / e_j below the
    diagonal, the values that a chunk adds are the solution of (I + L) U = beta (V - e K S).
    """
    group = v.shape[1] // k.shape[1]
    q_t, k_t = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(group, dim=1).transpose(0, 1)
        for x in (q.float(), k.float())
    )
    q_t, v_t = q_t * q.shape[-1] ** -0.5, v.float().transpose(0, 1)
    g_t, beta_t = g.float().t(), beta.float().t()[:, :, None]
    outputs = []
    for begin in range(0, q.shape[0], CHUNK_TOKENS):
        chunk = slice(begin, begin + CHUNK_TOKENS)
        q_c, k_c, v_c = (x[:, chunk] for x in (q_t, k_t, v_t))
        since = g_t[:, chunk].cumsum(-1)
        decay = since.exp()[:, :, None]
        between = (since[:, :, None] - since[:, None, :]).tril().exp().tril()
        lower = ((beta_t[:, chunk] * k_c) @ k_c.transpose(1, 2) * between).tril(-1)
        right = beta_t[:, chunk] * (v_c - decay * (k_c @ state))
        added = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        outputs.append(decay * (q_c @ state) + (q_c @ k_c.transpose(1, 2) * between) @ added)
        left = (since[:, -1:] - since).exp()[:, :, None] * k_c
        state = state * decay[:, -1:] + left.transpose(1, 2) @ added
    return torch.cat(outputs, dim=1).transpose(0, 1).to(q.dtype), state


PROMPT = 2048
BATCHES = (1, 8)
# The twin keeps a state per token; this many tokens suffice to show a wrong kernel.
CHECKED_TOKENS = 200

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, g, beta


def gated_delta_rows() -> Iterator[Row]:
    for net in LINEAR_ATTENTIONS:
        heads, width = net.value_heads, net.width
        sizes = f"{net.key_heads}/{heads} heads of {width}"
        row_bytes = 2 * (net.qkv_width + heads * width) + 8 * heads
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
            moved = PROMPT * row_bytes * dtype.itemsize // 2 + 8 * net.state_elements
            flops = 2 * PROMPT * heads * width * (3 * width + 2 * CHUNK_TOKENS)
            yield Row(
                "gated_delta prompt",
                f"{net.name} {name} {PROMPT} tokens, {sizes}",
                moved,
                flops,
                partial(_prompt, net, dtype),
            )
        for batch in BATCHES:
            moved = batch * (8 * net.state_elements + row_bytes)
            flops = 6 * batch * net.state_elements
            yield Row(
                "gated_delta step", f"{net.name} batch {batch}, {sizes}", moved, flops, partial(_step, net, batch)
            )
        channels = net.qkv_width
        shape = f"{net.name} [{PROMPT}, {channels}]"
        flops = 2 * PROMPT * channels * net.conv_width
        yield Row("causal_conv", shape, 4 * PROMPT * channels, flops, partial(_conv, net))
        for batch in BATCHES:
            # Reads and writes tokens and the inputs kept for them, and reads the taps.
            moved = 2 * channels * (2 * batch * net.conv_width + net.conv_width)
            flops = 2 * batch * channels * net.conv_width
            shape = f"{net.name} batch {batch}, {channels} channels"
            yield Row("causal_conv step", shape, moved, flops, partial(_conv_step, net, batch))
        packed = channels + heads * width
        for interleaved, layout in ((True, "interleaved"), (False, "contiguous")):
            shape = f"{net.name} [{PROMPT}, {packed}] {layout}"
            yield Row("split_projections", shape, 4 * PROMPT * packed, 0, partial(_split, net, interleaved))
        yield Row("delta_gates", f"{net.name} [{PROMPT}, {heads}]", 12 * PROMPT * heads, 0, partial(_gates, net))
        elements = PROMPT * heads * width
        shape = f"{net.name} [{PROMPT}, {heads}, {width}]"
        yield Row("rms_norm gated", shape, 6 * elements, 8 * elements, partial(_norm, net))


def _in_huge_pages(tensor: Tensor) -> Tensor:
    """Return a copy in huge pages, like the engine's activations and states."""
    return empty_in_huge_pages(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor)


def _starts(*starts: int) -> Tensor:
    return torch.tensor(starts, dtype=torch.int32)


def _inputs(net: LinearAttentionShape, tokens: int, dtype: torch.dtype) -> Inputs:
    """Return q, k and v as slices of packed rows, g and beta."""
    keys = net.key_heads * net.width
    packed = _in_huge_pages(random(tokens, net.qkv_width, dtype=dtype))
    q, k, v = (x.unflatten(1, (-1, net.width)) for x in packed.split([keys, keys, net.value_heads * net.width], dim=1))
    generator = torch.Generator().manual_seed(1)
    g, beta = (
        -torch.rand(tokens, net.value_heads, generator=generator),
        torch.rand(tokens, net.value_heads, generator=generator),
    )
    return q, k, v, g, beta


def _each(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    q, k, v, g, beta = map(change, inputs)
    return q, k, v, g, beta


def _prompt(net: LinearAttentionShape, dtype: torch.dtype) -> Calls:
    inputs = _inputs(net, PROMPT, dtype)
    wide = _each(inputs, lambda x: x.float().contiguous())
    states = torch.zeros(1, net.value_heads, net.width, net.width)
    starts, slots = _starts(0, PROMPT), _starts(0)
    out = _in_huge_pages(torch.zeros(PROMPT, net.value_heads, net.width, dtype=dtype))

    def check() -> bool:
        some = _each(inputs, lambda x: x[:CHECKED_TOKENS])
        actual_states, expected_states = torch.zeros_like(states), torch.zeros_like(states)
        arguments = _starts(0, CHECKED_TOKENS), slots
        actual = gated_delta.gated_delta_rule(*some, actual_states, *arguments)
        expected = twins.gated_delta_rule(*some, expected_states, *arguments)
        return close(actual, expected) and close(actual_states, expected_states, steps=0.1)

    return Calls(
        lambda _: gated_delta.gated_delta_rule(*inputs, states, starts, slots, out=out),
        lambda _: chunked_delta_rule(*wide, states[0]),
        check,
    )


def _step(net: LinearAttentionShape, batch: int) -> Calls:
    """Return calls that rotate among the slots of a pool too large for caches, as layers do among their pools."""
    inputs = _inputs(net, batch, torch.bfloat16)
    shape = (net.value_heads, net.width, net.width)
    num_calls = max(2, ROTATION_BYTES // (4 * batch * net.state_elements))
    states = empty_in_huge_pages(num_calls * batch * net.state_elements, torch.float32).view(-1, *shape)
    states[:] = random(*shape, dtype=torch.float32, scale=0.1)
    starts, slots = _starts(*range(batch + 1)), torch.arange(num_calls * batch, dtype=torch.int32).view(-1, batch)
    out = torch.empty(batch, *shape[::2], dtype=torch.bfloat16)
    group = net.value_heads // net.key_heads

    def theirs(call: int) -> Tensor:
        q, k, v, g, beta = (x.float() for x in inputs)
        q, k = (functional.normalize(x, dim=-1).repeat_interleave(group, dim=1) for x in (q, k))
        first = call % num_calls * batch
        state = states[first : first + batch]
        state.mul_(g.exp()[:, :, None, None])
        change = (v - (state * k[..., None]).sum(-2)) * beta[..., None]
        state.add_(k[..., None] * change[..., None, :])
        return (state * (q * net.width**-0.5)[..., None]).sum(-2).bfloat16()

    def check() -> bool:
        actual_states, expected_states = states[:batch].clone(), states[:batch].clone()
        actual = gated_delta.gated_delta_rule(*inputs, actual_states, starts, slots[0])
        expected = twins.gated_delta_rule(*inputs, expected_states, starts, slots[0])
        return close(actual, expected) and close(actual_states, expected_states, steps=0.01)

    def ours(call: int) -> Tensor:
        return gated_delta.gated_delta_rule(*inputs, states, starts, slots[call % num_calls], out=out)

    return Calls(ours, theirs, check)


def _conv(net: LinearAttentionShape) -> Calls:
    x, weight = _in_huge_pages(random(PROMPT, net.qkv_width)), random(net.conv_width, net.qkv_width, seed=1)
    states = torch.zeros(1, net.conv_width - 1, net.qkv_width)
    starts, slots, out = _starts(0, PROMPT), _starts(0), _in_huge_pages(x)
    their_x, their_weight = x.t().contiguous()[None], weight.t().contiguous()[:, None]

    def theirs(_: int) -> Tensor:
        y = functional.conv1d(their_x, their_weight, padding=net.conv_width - 1, groups=net.qkv_width)
        return functional.silu(y[..., :PROMPT])

    def check() -> bool:
        actual = conv.causal_conv(x, weight, torch.zeros_like(states), starts, slots)
        return close(actual, conv_twins.causal_conv(x, weight, torch.zeros_like(states), starts, slots))

    return Calls(lambda _: conv.causal_conv(x, weight, states, starts, slots, out=out), theirs, check)


def _conv_step(net: LinearAttentionShape, batch: int) -> Calls:
    """Return calls that rotate among taps and states too large for caches, as layers do among theirs."""
    channels, taps = net.qkv_width, net.conv_width
    x, out = random(batch, channels), random(batch, channels)
    copies = rotation(random(taps, channels, seed=1), random(batch, taps - 1, channels, seed=2))
    starts, slots = _starts(*range(batch + 1)), _starts(*range(batch))

    def ours(call: int) -> Tensor:
        weight, states = copies[call % len(copies)]
        return conv.causal_conv(x, weight, states, starts, slots, out=out)

    def theirs(call: int) -> Tensor:
        weight, states = copies[call % len(copies)]
        past = states.view(batch, channels, taps - 1)  # the same memory in torch's order
        window = torch.cat([past, x[..., None]], dim=-1)
        past.copy_(window[..., 1:])
        return functional.silu(functional.conv1d(window, weight.view(channels, 1, taps), groups=channels)[..., 0])

    def check() -> bool:
        weight, states = copies[0]
        actual_states, expected_states = states.clone(), states.clone()
        actual = conv.causal_conv(x, weight, actual_states, starts, slots)
        expected = conv_twins.causal_conv(x, weight, expected_states, starts, slots)
        return close(actual, expected) and torch.equal(actual_states, expected_states)

    return Calls(ours, theirs, check)


def _split(net: LinearAttentionShape, interleaved: bool) -> Calls:
    heads = net.key_heads, net.value_heads, net.width, net.width
    qkvz = _in_huge_pages(random(PROMPT, net.qkv_width + net.value_heads * net.width))
    ba = random(PROMPT, 2 * net.value_heads, seed=1)
    qkv, z, b, a = map(_in_huge_pages, twins.split_projections(qkvz, ba, *heads, interleaved=interleaved))

    def ours(_: int) -> tuple[Tensor, ...]:
        return gated_delta.split_projections(qkvz, ba, *heads, interleaved=interleaved, out=(qkv, z, b, a))

    def theirs(_: int) -> tuple[Tensor, ...]:
        # Some contiguous parts are views: copy them, so that both sides write as much.
        return tuple(part.contiguous() for part in twins.split_projections(qkvz, ba, *heads, interleaved=interleaved))

    def check() -> bool:
        actual = gated_delta.split_projections(qkvz, ba, *heads, interleaved=interleaved)
        return all(torch.equal(mine, right) for mine, right in zip(actual, theirs(0), strict=True))

    return Calls(ours, theirs, check)


def _gates(net: LinearAttentionShape) -> Calls:
    a, b = random(PROMPT, net.value_heads), random(PROMPT, net.value_heads, seed=1)
    a_log, dt_bias = random(net.value_heads, dtype=torch.float32), random(net.value_heads, seed=1)
    out = torch.empty(a.shape), torch.empty(a.shape)

    def check() -> bool:
        actual, expected = gated_delta.delta_gates(a, b, a_log, dt_bias), twins.delta_gates(a, b, a_log, dt_bias)
        return all(close(x, y, steps=0.01) for x, y in zip(actual, expected, strict=True))

    return Calls(
        lambda _: gated_delta.delta_gates(a, b, a_log, dt_bias, out=out),
        lambda _: twins.delta_gates(a, b, a_log, dt_bias),
        check,
    )


def _norm(net: LinearAttentionShape) -> Calls:
    shape = PROMPT, net.value_heads, net.width
    x, gate, weight = _in_huge_pages(random(*shape)), _in_huge_pages(random(*shape, seed=1)), torch.ones(net.width)
    out = _in_huge_pages(x)

    def theirs(_: int) -> Tensor:
        normed = functional.rms_norm(x.float(), (net.width,), weight, 1e-6)
        return (normed * functional.silu(gate.float())).to(x.dtype)

    def check() -> bool:
        return close(norm.rms_norm(x, weight, 1e-6, gate=gate), norm_twins.rms_norm(x, weight, 1e-6, gate=gate))

    return Calls(lambda _: norm.rms_norm(x, weight, 1e-6, gate=gate, out=out), theirs, check)
