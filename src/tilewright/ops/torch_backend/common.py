"""What several ops need: results written where the caller wants them, the sequence of each token, rows of a pool."""

import torch
from torch import Tensor


def into(out: Tensor | None, result: Tensor) -> Tensor:
    """The result, in `out` if there is one."""
    return result if out is None else out.copy_(result)


def sequence_of_each(starts: Tensor, num_tokens: int) -> Tensor:
    """int64 [T]: which of the packed sequences each token belongs to, for starts [B + 1]."""
    tokens = torch.arange(num_tokens, device=starts.device, dtype=starts.dtype)
    return torch.searchsorted(starts[1:].contiguous(), tokens, right=True)


def put_rows(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """pool[slots] = rows, but for negative slots.

    To leave rows out by a mask one would have to wait for their number. Instead each of them repeats the first that is
    kept, and where none is, writes what is there.
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
    """Tokens, and the slots that the states of a recurrent layer after them go to; negative: to none.

    Without `write_slots` those are each sequence's last token and the slot that its state was read from.
    """
    if write_slots is not None:
        return torch.arange(num_tokens, device=starts.device), write_slots
    if not num_tokens:
        return starts[:0].long(), read_slots[:0]
    has_tokens = starts[1:] > starts[:-1]
    return (starts[1:].long() - 1).clamp(min=0), torch.where(has_tokens, read_slots, -1)
