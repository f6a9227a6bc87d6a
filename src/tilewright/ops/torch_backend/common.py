"""Helpers shared by several ops: outputs written in place, the sequence of each token, rows of a pool."""

import torch
from torch import Tensor


def into(out: Tensor | None, result: Tensor) -> Tensor:
    """Return the result, in `out` if there is one."""
    return result if out is None else out.copy_(result)


def sequence_of_each(starts: Tensor, num_tokens: int) -> Tensor:
    """Return the packed sequence of each token, int64 [T], for starts [B + 1]."""
    tokens = torch.arange(num_tokens, device=starts.device, dtype=starts.dtype)
    return torch.searchsorted(starts[1:].contiguous(), tokens, right=True)


def put_rows(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Set pool[slots] = rows, except for negative slots.

    Dropping rows by a mask would wait for their number. Instead each of them repeats the first kept one, or if none is
    kept, writes back what is there.
    """
    if not len(slots):
        return
    is_kept = slots >= 0
    first = is_kept.int().argmax()
    source = torch.where(is_kept, torch.arange(len(slots), device=slots.device), first)
    target = slots[source].clamp(min=0).long()
    pool[target] = torch.where(is_kept.any(), rows[source].to(pool.dtype), pool[target])


def kept_states(
    num_tokens: int, starts: Tensor, read_slots: Tensor, write_slots: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return tokens and the slots for a recurrent layer's states after them; negative: not stored.

    Without `write_slots` these are each sequence's last token and the slot that its state was read from.
    """
    if write_slots is not None:
        return torch.arange(num_tokens, device=starts.device), write_slots
    if not num_tokens:
        return starts[:0].long(), read_slots[:0]
    has_tokens = starts[1:] > starts[:-1]
    return (starts[1:].long() - 1).clamp(min=0), torch.where(has_tokens, read_slots, -1)
