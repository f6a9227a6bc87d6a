"""The gated delta rule of one sequence as torch does it best, in chunks of tokens: what ours is timed against."""

import torch
from torch import Tensor

CHUNK_TOKENS = 64


def chunked_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """out and the state after the last token, of q, k and v as `ops.gated_delta_rule` takes them.

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
