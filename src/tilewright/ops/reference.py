"""The same ops in plain torch: the twin every kernel is tested against, and the path for other devices.

Each twin computes in fp32 and rounds once at the end, as the kernels do.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# ---- norm


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    weight_plus_one: bool = False,
) -> Tensor:
    if residual is not None:
        residual.copy_(residual.float() + x.float())
        x = residual
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    y = x.float() * scale * (weight.float() + (1.0 if weight_plus_one else 0.0))
    if gate is not None:
        y = y * torch.nn.functional.silu(gate.float())
    return y.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    y = torch.nn.functional.layer_norm(
        x.float(), x.shape[-1:], weight.float(), None if bias is None else bias.float(), eps
    )
    return y.to(x.dtype)


# ---- linear

ACTIVATIONS = {
    "none": lambda x: x,
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu_erf": torch.nn.functional.gelu,
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
}


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    activation: str = "none",
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    y = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = ACTIVATIONS[activation](gate) * up
    else:
        y = ACTIVATIONS[activation](y)
    if residual is not None:
        y = y + residual.float()
    return y.to(out_dtype or x.dtype)


# ---- attention


def _visible(num_queries: int, num_keys: int, causal: bool, window: int) -> Tensor:
    """[Sq, Sk] bool: the last query stands at the last key."""
    distance = (torch.arange(num_queries)[:, None] + num_keys - num_queries) - torch.arange(num_keys)[None, :]
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if causal:
        visible &= distance >= 0
    if window > 0:
        visible &= distance.abs() < window
    return visible


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int = 0,
    soft_cap: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    """One sequence: q [Sq, H, K], k and v [Sk, G, K], mask [H or 1, Sq or 1, Sk]."""
    num_queries, num_heads, width = q.shape
    num_keys, group = k.shape[0], num_heads // k.shape[1]
    k, v = (t.float().repeat_interleave(group, dim=1).transpose(0, 1) for t in (k, v))
    scores = q.float().transpose(0, 1) @ k.transpose(1, 2) * (width**-0.5 if scale is None else scale)
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    hidden = ~_visible(num_queries, num_keys, causal, window)
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    elif mask is not None:
        scores = scores + mask.float()
    scores = scores.masked_fill(hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)  # a query that sees nothing gives zeros
    return (weights @ v).transpose(0, 1).to(q.dtype)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    **options: object,
) -> Tensor:
    query_bounds = query_starts.tolist()
    key_bounds = query_bounds if key_starts is None else key_starts.tolist()
    out = torch.empty(q.shape, dtype=q.dtype)
    for b in range(len(query_bounds) - 1):
        queries, keys = slice(*query_bounds[b : b + 2]), slice(*key_bounds[b : b + 2])
        part = None
        if mask is not None:
            part = mask[b if mask.shape[0] > 1 else 0]
            part = part[:, : queries.stop - queries.start, : keys.stop - keys.start]
        out[queries] = attention(q[queries], k[keys], v[keys], mask=part, **options)  # type: ignore[arg-type]
    return out


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_size: int,
    block_table: Tensor,
    query_starts: Tensor,
    kv_lengths: Tensor,
    **options: object,
) -> Tensor:
    """keys and values as KvCache.read gives them: [pages * page_size, G, K]."""
    out = torch.empty(q.shape, dtype=q.dtype)
    bounds = query_starts.tolist()
    for b, length in enumerate(kv_lengths.tolist()):
        token = torch.arange(length)
        slots = block_table[b].long()[token // page_size] * page_size + token % page_size
        queries = slice(*bounds[b : b + 2])
        out[queries] = attention(q[queries], keys[slots], values[slots], **options)  # type: ignore[arg-type]
    return out


# ---- activation


def activate(x: Tensor, activation: str) -> Tensor:
    return ACTIVATIONS[activation](x.float()).to(x.dtype)


def activate_and_mul(x: Tensor, activation: str) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (activate(gate, activation) * up).to(x.dtype)


def add(x: Tensor, y: Tensor) -> Tensor:
    return (x.float() + y.float()).to(x.dtype)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return (x.float() * gate.float().sigmoid()).to(x.dtype)


# ---- rope


def rope_table(
    positions: Tensor, inv_freq: Tensor, axis_of_frequency: Tensor, attention_scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    angle = positions.float()[axis_of_frequency.long()].T * inv_freq
    # The angle is what fp32 makes of it; its cosine is then taken exactly.
    cos, sin = angle.double().cos(), angle.double().sin()
    return (cos * attention_scaling).float(), (sin * attention_scaling).float()


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    rotated = 2 * cos.shape[-1]
    turned, rest = x[..., :rotated].float(), x[..., rotated:]
    cos, sin = cos[:, None], sin[:, None]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def norm_rope(
    x: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *,
    weight_plus_one: bool = False,
    interleaved: bool = False,
) -> Tensor:
    """One side of qk_norm_rope."""
    normed = rms_norm(x.float(), weight, eps, weight_plus_one=weight_plus_one)
    return rope(normed, cos, sin, interleaved=interleaved).to(x.dtype)


# ---- embedding


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    return table[ids.long()]


def scatter_rows(out: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    out[rows] = values
    return out


def scatter_add_rows(out: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    out[rows] = (out[rows].float() + values.float()).to(out.dtype)
    return out


# ---- image


def _axis_weights(in_size: int, out_size: int, filter: str) -> Tensor:
    """Pillow's fixed-point weights of one axis as a dense int64 matrix [out_size, in_size]."""
    scale = in_size / out_size
    filter_scale = max(scale, 1.0)
    support = (2.0 if filter == "bicubic" else 1.0) * filter_scale
    center = (torch.arange(out_size, dtype=torch.float64)[:, None] + 0.5) * scale
    source = torch.arange(in_size, dtype=torch.float64)[None]
    x = ((source - center + 0.5) * (1.0 / filter_scale)).abs()
    if filter == "bicubic":
        near = (1.5 * x - 2.5) * x * x + 1
        far = (((x - 5) * x + 8) * x - 4) * -0.5
        weight = torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
    else:
        weight = (1 - x).clamp(min=0)
    begin = (center - support + 0.5).trunc()
    end = (center + support + 0.5).trunc()
    weight = torch.where((source >= begin) & (source < end), weight, 0.0)
    # One by one from the left, as Pillow adds them: torch's own sum may pair them up.
    weight = weight / weight.cumsum(1)[:, -1:] * 2.0**22
    return torch.where(weight < 0, weight - 0.5, weight + 0.5).trunc().to(torch.int64)


def _resize_axis(image: Tensor, axis: int, out_size: int, filter: str) -> Tensor:
    if image.shape[axis] == out_size:
        return image
    weight = _axis_weights(image.shape[axis], out_size, filter)
    total = torch.tensordot(weight, image.to(torch.int64), dims=([1], [axis])).movedim(0, axis)
    return ((total + (1 << 21)) >> 22).clamp(0, 255).to(torch.uint8)


def resize(image: Tensor, height: int, width: int, filter: str = "bicubic") -> Tensor:
    rows_lost, columns_lost = image.shape[-3] - height, image.shape[-2] - width
    if rows_lost > 0 and rows_lost > 2 * columns_lost:
        return _resize_axis(_resize_axis(image, -3 % image.dim(), height, filter), -2 % image.dim(), width, filter)
    return _resize_axis(_resize_axis(image, -2 % image.dim(), width, filter), -3 % image.dim(), height, filter)


def patches(
    image: Tensor,
    height: int,
    width: int,
    *,
    patch_size: int,
    merge_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    rescale: float = 1 / 255,
    filter: str = "bicubic",
    temporal_patch_size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    frames = image if image.dim() == 4 else image[None]
    pixels = resize(frames, height, width, filter)
    # A pixel has 256 values: normalising is a table of them per channel.
    levels = (torch.arange(256, dtype=torch.float64) * rescale).float()
    table = (levels[:, None] - torch.tensor(mean)) / torch.tensor(std)
    normal = table.to(dtype)[pixels.long(), torch.arange(3)]
    grouped = normal.view(
        -1,
        temporal_patch_size,
        height // patch_size // merge_size,
        merge_size,
        patch_size,
        width // patch_size // merge_size,
        merge_size,
        patch_size,
        3,
    )
    rows = grouped.permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return rows.reshape(-1, 3 * temporal_patch_size * patch_size**2)


# ---- sample


def penalize(
    logits: Tensor,
    starts: Tensor,
    token_ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    *,
    bias_starts: Tensor | None = None,
    bias_token_ids: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    for row in range(logits.shape[0]):
        seen = slice(int(starts[row]), int(starts[row + 1]))
        ids, count = token_ids[seen], counts[seen]
        value = logits[row, ids].float()
        value = torch.where(value > 0, value / repetition[row], value * repetition[row])
        value = torch.where(count > 0, value - (frequency[row] * count + presence[row]), value)
        logits[row, ids] = value.to(logits.dtype)
        if bias is not None and bias_starts is not None and bias_token_ids is not None:
            for i in range(int(bias_starts[row]), int(bias_starts[row + 1])):
                token = bias_token_ids[i]
                logits[row, token] = (logits[row, token].float() + bias[i]).to(logits.dtype)
    return logits


def mask(logits: Tensor, rows: Tensor, words: Tensor) -> Tensor:
    allowed = (words[:, :, None] >> torch.arange(32, dtype=torch.int32) & 1).flatten(1)[:, : logits.shape[1]] == 1
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
    return logits


def _clean_logits(logits: Tensor) -> Tensor:
    """In fp64, NaN as -inf and +inf as the largest float."""
    largest = torch.finfo(torch.float32).max
    return logits.double().nan_to_num(nan=-torch.inf, posinf=largest, neginf=-torch.inf)


def softmax_probs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The filtered distribution in fp64, by sorting."""
    probabilities = torch.zeros(logits.shape, dtype=torch.float64)
    for row, x in enumerate(_clean_logits(logits)):
        best = int(x.argmax())
        if temperature[row] == 0 or x[best] == -torch.inf:
            probabilities[row, best if x[best] > -torch.inf else 0] = 1
            continue
        weight = ((x - x[best]) / temperature[row].double()).exp()
        if 0 < top_k[row] < len(x):
            weight[x < x.topk(int(top_k[row])).values[-1]] = 0
        if top_p[row] < 1:
            order = x.argsort(descending=True)
            share = weight[order].cumsum(0)
            last = int((share >= top_p[row].double() * share[-1]).int().argmax())
            weight[x < x[order[last]]] = 0
        weight[weight < min_p[row].double()] = 0
        probabilities[row] = weight / weight.sum()
    return probabilities


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    cumulative = softmax_probs(logits, temperature, top_k, top_p, min_p).cumsum(1)
    return (cumulative > uniform[:, None] * cumulative[:, -1:]).int().argmax(1)


def log_probs(logits: Tensor, token_ids: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = _clean_logits(logits)
    all_log_probs = (x - x.amax(1, keepdim=True).clamp(min=-1e300)).log_softmax(1)
    all_log_probs = all_log_probs.nan_to_num(nan=-torch.inf, neginf=-torch.inf).float()
    order = x.sort(dim=1, descending=True, stable=True).indices
    rank = (order == token_ids[:, None]).int().argmax(1) + 1
    top_ids = order[:, :top_n]
    return all_log_probs.gather(1, token_ids[:, None])[:, 0], top_ids, all_log_probs.gather(1, top_ids), rank
