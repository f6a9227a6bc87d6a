"""GroupNorm of pictures and clips, channels last."""

from torch import Tensor
from torch.nn import functional

from tilewright.ops.torch_backend.activation import ACTIVATIONS
from tilewright.ops.torch_backend.common import into


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    activation: str = "none",
    out: Tensor | None = None,
) -> Tensor:
    wide_weight, wide_bias = (None if t is None else t.float() for t in (weight, bias))
    y = functional.group_norm(x.float().movedim(-1, 1), num_groups, wide_weight, wide_bias, eps).movedim(1, -1)
    return into(out, ACTIVATIONS[activation](y).to(x.dtype))
