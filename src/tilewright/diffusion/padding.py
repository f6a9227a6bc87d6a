"""Prompts brought to the length that a text encoder was trained with: padded, or cut where nothing is lost by it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tilewright.inputs.clip_tokenizer import WORD_END
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.model_files import CheckpointError

_log = logging.getLogger(__name__)


def padded(ids: Sequence[int], length: int, tokenizer: Tokenizer) -> list[int]:
    """The ids, then the tokenizer's padding up to `length`."""
    token = tokenizer.special_tokens.get("pad_token")
    padding = None if token is None else tokenizer.token_id(token)
    if padding is None:
        raise CheckpointError(f"the tokenizer has the pad_token {token!r}, expected one of its vocabulary")
    return [*ids, *[padding] * (length - len(ids))]


def cut(ids: Sequence[int], length: int, tokenizer: Tokenizer, reader: str) -> list[int]:
    """The first ids and the last one, which ends the prompt, `length` at most; a warning names what `reader` misses."""
    if len(ids) <= length:
        return list(ids)
    lost = tokenizer.decode(ids[length - 1 : -1]).replace(WORD_END, " ").strip()
    _log.warning("%s reads %d tokens of a prompt, this one has %d; it misses: %s", reader, length, len(ids), lost)
    return [*ids[: length - 1], ids[-1]]
