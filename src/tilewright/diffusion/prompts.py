"""Prompts as token ids within a pipeline's limit, padded to an encoder's length; a cache of their encodings."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tilewright.host.files import CheckpointError
from tilewright.inputs.chat_ids import ChatEncoder
from tilewright.inputs.chat_template import ChatTemplate
from tilewright.inputs.folder_tokenizer import WORD_END
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.types import RequestError

_log = logging.getLogger(__name__)


def padded(ids: Sequence[int], length: int, tokenizer: Tokenizer) -> list[int]:
    """Return the ids, padded to `length` with the tokenizer's padding token."""
    token = tokenizer.special_tokens.get("pad_token")
    padding = None if token is None else tokenizer.token_id(token)
    if padding is None:
        raise CheckpointError(f"the tokenizer has the pad_token {token!r}, expected one of its vocabulary")
    return [*ids, *[padding] * (length - len(ids))]


def cut(ids: Sequence[int], length: int, tokenizer: Tokenizer, reader: str) -> list[int]:
    """Return at most `length` ids, keeping the last one, which ends the prompt; warn of what `reader` misses."""
    if len(ids) <= length:
        return list(ids)
    lost = tokenizer.decode(ids[length - 1 : -1]).replace(WORD_END, " ").strip()
    _log.warning("%s reads %d tokens of a prompt, this one has %d; it misses: %s", reader, length, len(ids), lost)
    return [*ids[: length - 1], ids[-1]]


class ChatPrompts:
    """Prompts as a user's message in the tokenizer's chat template. Special tokens in a prompt are plain text."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, **template_args: Any) -> None:
        if not tokenizer.chat_template:
            raise CheckpointError("the tokenizer has no chat template, which this pipeline writes prompts with")
        self._encoder = ChatEncoder(ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens), tokenizer)
        self._max_tokens, self._template_args = max_tokens, template_args

    def ids(self, prompt: str) -> list[int]:
        ids, _ = self._encoder.encode([{"role": "user", "content": prompt}], **self._template_args)
        check_length(ids, self._max_tokens)
        return ids


def check_length(ids: Sequence[int], max_tokens: int) -> None:
    """Raise RequestError for a prompt of more tokens than the pipeline's text encoder is given."""
    if len(ids) > max_tokens:
        raise RequestError(
            f"the prompt has {len(ids)} tokens with its template, expected at most {max_tokens}", param="prompt"
        )


MAX_BYTES = 256 << 20  # 512 tokens of a width of 2,560 in bf16 are 2.6 MB


class TextCache:
    """Encodings by text, the most recently used within `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def encode(self, texts: Sequence[str], encode: Callable[[list[str]], Sequence[Any]]) -> list[Any]:
        """Return the encodings of texts: tensors, or tuples of them.

        Those not cached come from one call of `encode`.
        """
        missing = [text for text in dict.fromkeys(texts) if text not in self._kept]
        found = dict(zip(missing, encode(missing), strict=True)) if missing else {}
        for text in texts:
            if text in self._kept:
                found[text] = self._kept[text]
                self._kept.move_to_end(text)
        for text in missing:
            self._keep(text, found[text])
        return [found[text] for text in texts]

    def _keep(self, text: str, encoded: Any) -> None:
        self._kept[text] = encoded
        self.size_bytes += _size_bytes(encoded)
        while self.size_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.size_bytes -= _size_bytes(oldest)


def _size_bytes(encoded: Any) -> int:
    tensors = (encoded,) if isinstance(encoded, Tensor) else encoded
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
