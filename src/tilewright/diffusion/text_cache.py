"""What text encoders gave for the prompts of late: the same prompt with another seed is not encoded again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

MAX_BYTES = 256 << 20  # 512 tokens of a width of 2,560 in bf16 are 2.6 MB


class TextCache:
    """Encodings by text, those used last, within `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def encode(self, texts: Sequence[str], encode: Callable[[list[str]], Sequence[Any]]) -> list[Any]:
        """The encodings of texts: tensors, or tuples of them. Those not kept come from one call of `encode`."""
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
