"""How many questions about sounds of the test set are answered right, by kind. From the top of the repository:

python -m training.tiny_omni.evaluate --model candidate
python -m training.tiny_omni.evaluate --model candidate --set validation --count 200
python -m training.tiny_omni.evaluate --model candidate --transformers
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tilewright.flags.options import positive
from tilewright.models.qwen3_omni.config import AudioConfig
from tilewright.ops.media import SAMPLE_RATE
from tilewright.weights import embedded
from training.tiny_omni.items import Item, items
from training.tiny_omni.utterances import SETS
from training.tiny_vl.score import shares_by_kind, table

MAX_TOKENS = 64
MAX_SHOWN = 60


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    asker = of_transformers if options.transformers else of_engine
    marks, lines = [], []
    with asker(options.model, options.dtype) as ask:
        for index, item in enumerate(tqdm(items(options.set, options.count), total=options.count, file=sys.stderr)):
            got = ask(item)
            marks.append((item.kind, is_right(item, got)))
            if not marks[-1][1]:
                lines.append(f"{index:03d} {item.kind}: {item.question!r} expected {item.answer!r}, got {got!r}")
    shares = shares_by_kind(marks)
    print("\n".join([table(shares, "right"), "", *lines[:MAX_SHOWN]]))
    if options.json:
        found = {kind: [share.num_good, share.count] for kind, share in shares.items()}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.tiny_omni.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", type=Path, default=embedded.path("tiny_omni"), metavar="DIR", help="(default: the embedded one)"
    )
    parser.add_argument("--set", choices=tuple(SETS), default="test", help="(default: %(default)s)")
    parser.add_argument("--count", type=positive, default=500, metavar="N", help="sounds (default %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(default: %(default)s)")
    parser.add_argument("--transformers", action="store_true", help="ask transformers instead of the library")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the shares")
    return parser


def is_right(item: Item, got: str) -> bool:
    """Whether it is the answer word for word, as a sentence or in as few words as may be."""
    return any(is_same(answer, got) for answer in (item.answer, item.short) if answer is not None)


def is_same(one: str, other: str) -> bool:
    """But for case, spaces and punctuation."""
    return _letters(one) == _letters(other)


def _letters(text: str) -> str:
    return re.sub(r"[\W_]", "", text.lower())


def messages(item: Item) -> list[dict[str, Any]]:
    words = [{"type": "text", "text": item.question}] if item.question else []
    return [{"role": "user", "content": [{"type": "audio", "audio": item.samples}, *words]}]


Ask = Callable[[Item], str]


@contextmanager
def of_engine(model: Path, dtype: str) -> Iterator[Ask]:
    """Asks the library."""
    from tilewright import Engine

    with Engine(model, dtype=dtype, pack_cache=False) as engine:
        yield lambda item: engine.chat(messages(item), temperature=0.0, max_tokens=MAX_TOKENS).text


@contextmanager
def of_transformers(model: Path, dtype: str) -> Iterator[Ask]:
    """Asks transformers: its tokenizer, its mel frames, its network. Its processor as a whole needs torchvision."""
    import torch
    import transformers

    # Their annotations leave out what these calls take.
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
    extractor: Any = transformers.WhisperFeatureExtractor.from_pretrained(model)
    thinker = transformers.Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(
        model, dtype=getattr(torch, dtype)
    ).eval()
    sound = AudioConfig.from_dict(thinker.config.audio_config.to_dict())

    def ask(item: Item) -> str:
        prompt = tokenizer.apply_chat_template(messages(item), add_generation_prompt=True, tokenize=False)
        heard = extractor(
            [item.samples], sampling_rate=SAMPLE_RATE, padding=True, truncation=False, return_tensors="pt"
        )
        features = heard["input_features"].to(thinker.dtype)
        pads = "<|audio_pad|>" * sound.num_features(features.shape[-1])
        ids = tokenizer(prompt.replace("<|audio_pad|>", pads), return_tensors="pt")["input_ids"]
        thinker.model.rope_deltas = None
        with torch.no_grad():
            found = thinker.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                input_features=features,
                feature_attention_mask=torch.ones(1, features.shape[-1], dtype=torch.long),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
            )
        return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)

    yield ask


if __name__ == "__main__":
    sys.exit(main())
