"""The gated delta rule of a prompt beside transformers' torch form of it, in turns: python benchmarks/delta_rule.py

2,048 tokens, 16 key heads, 16 and 32 value heads of 128. The torch form computes in fp32, as it does in a model; ours
takes bf16 and fp32 inputs. A round is one call of each; of its ratios the median is told, and the least and greatest.
The machine is probed before and after.
"""

import statistics
from collections.abc import Callable
from time import perf_counter

import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from tilewright.bench.timing import between, probe
from tilewright.ops.gated_delta import gated_delta_rule

TOKENS, KEY_HEADS, WIDTH = 2048, 16, 128
ROUNDS = 11
MAX_DIFFERENCE = {torch.bfloat16: 0.02, torch.float32: 1e-4}  # of the largest output


def main() -> None:
    for value_heads in (16, 32):
        measure(value_heads)


def measure(value_heads: int) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(TOKENS, KEY_HEADS, WIDTH).bfloat16().float() for _ in range(2))
    v = torch.randn(TOKENS, value_heads, WIDTH).bfloat16().float()
    g, beta = -torch.rand(TOKENS, value_heads), torch.rand(TOKENS, value_heads)
    repeated = (x.repeat_interleave(value_heads // KEY_HEADS, 1)[None] for x in (q, k))
    theirs = [*(x.contiguous() for x in repeated), *(x[None].contiguous() for x in (v, g, beta))]

    def plain() -> torch.Tensor:
        return torch_chunk_gated_delta_rule(*theirs, output_final_state=True, use_qk_l2norm_in_kernel=True)[0][0]

    expected = plain()
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    for dtype in MAX_DIFFERENCE:
        calls[str(dtype).removeprefix("torch.")] = ours = our_call(q, k, v, g, beta, dtype)
        difference = ((ours() - expected).abs().max() / expected.abs().max()).item()
        assert difference < MAX_DIFFERENCE[dtype], f"{dtype}: off by {difference:.2g} of the largest output"
    before = probe()
    times_s: dict[str, list[float]] = {name: [] for name in ("plain", *calls)}
    for _ in range(ROUNDS):
        for name, call in (("plain", plain), *calls.items()):
            begin_s = perf_counter()
            call()
            times_s[name].append(perf_counter() - begin_s)
    limits = between(before, probe())
    print(f"{value_heads} value heads; read {limits.read_gb_s:.1f} GB/s, bf16 peak {limits.peak_tflops:.2f} TFLOP/s")
    print(f"  torch in fp32: {1e3 * statistics.median(times_s['plain']):.0f} ms")
    for name in calls:
        ratios = sorted(theirs_s / ours_s for theirs_s, ours_s in zip(times_s["plain"], times_s[name], strict=True))
        ours_ms = 1e3 * statistics.median(times_s[name])
        middle = statistics.median(ratios)
        print(f"  ours, {name}: {ours_ms:.1f} ms, {middle:.1f} x ({ratios[0]:.1f}-{ratios[-1]:.1f})")


def our_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, dtype: torch.dtype
) -> Callable[[], torch.Tensor]:
    """The rule from a state of zeros, which the call sees to, on inputs of this dtype."""
    states = torch.zeros(1, v.shape[1], WIDTH, WIDTH)
    starts, slots = torch.tensor([0, TOKENS], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    inputs = [x.to(dtype) for x in (q, k, v)]

    def call() -> torch.Tensor:
        return gated_delta_rule(*inputs, g, beta, states.zero_(), starts, slots)

    return call


if __name__ == "__main__":
    main()
