"""Checkpoints that store a head of their own though their config says that it is the embedding table."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from tilewright.models.text_config import is_tied
from tilewright.weights.checkpoint import Checkpoint

_BLOCK_ROWS = 4096  # compared at a time: 40 MB of a model 5,120 wide

_log = logging.getLogger(__name__)


def config_as_stored(checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint's config, with an untied head where one is stored that differs from the table, as transformers
    reads it: the tensors are what was trained."""
    config = checkpoint.config
    names = [name for name in checkpoint.shapes if name.endswith(("lm_head.weight", "embed_tokens.weight"))]
    if len(names) != 2 or not is_tied(config) or _is_same(checkpoint, *names):
        return config
    _log.warning(
        "%s has tie_word_embeddings true, but %s and %s differ: both are used. Set it to false to say so",
        checkpoint.path,
        *names,
    )
    untied = {"tie_word_embeddings": False}
    text = config.get("text_config")
    return {**config, **untied, **({"text_config": {**text, **untied}} if isinstance(text, Mapping) else {})}


def _is_same(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Stops at the first difference: only a head that equals the table is read whole."""
    num_rows = checkpoint.shapes[first][0]
    if checkpoint.shapes[first] != checkpoint.shapes[second]:
        return False
    for begin in range(0, num_rows, _BLOCK_ROWS):
        end = min(begin + _BLOCK_ROWS, num_rows)
        rows = [checkpoint.rows(name, begin, end) for name in (first, second)]
        dtype = torch.promote_types(rows[0].dtype, rows[1].dtype)
        if not torch.equal(rows[0].to(dtype), rows[1].to(dtype)):
            return False
        checkpoint.release(first)
        checkpoint.release(second)
    return True
