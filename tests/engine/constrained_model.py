"""Models of random logits over real vocabularies, for answers that are held to a grammar.

The logits of a position are a hash of all tokens up to it, so what comes out depends on nothing but them: neither on
pages, nor on batches or drafts, which tests/engine/mock_model.py is for.
"""

import gzip
import hashlib
from functools import cache
from pathlib import Path

import numpy as np
import tokenizers
import torch
from mock_model import make_core
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tilewright.engine.constraint.compiler import ConstraintCompiler
from tilewright.engine.core import EngineCore
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.types import ModelInputs, SamplingParams

DATA = Path(__file__).parent.parent / "data"
BYTES_END = 256
BYTES_SIZE = 272  # rows more than there are tokens, as real heads have
QWEN_SIZE = 151_936


@cache
def byte_tokenizer() -> Tokenizer:
    """Single bytes, and <|end|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Tokenizer(backend, special_tokens={"eos_token": "<|end|>"}, stop_token_ids=[BYTES_END])


@cache
def qwen_tokenizer() -> Tokenizer:
    text = gzip.decompress((DATA / "qwen3-tokenizer.json.gz").read_bytes()).decode()
    return Tokenizer(tokenizers.Tokenizer.from_str(text), special_tokens={}, stop_token_ids=[151_645, 151_643])


@cache
def compiler_of(tokenizer: Tokenizer, size: int) -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer, size)


class RandomRunner:
    """Noise that is drawn to the tokens in `favoured`."""

    def __init__(self, size: int, favoured: dict[int, float], scale: float = 3.0) -> None:
        self.size = size
        self.bias = np.zeros(size, np.float32)
        for token_id, bias in favoured.items():
            self.bias[token_id] = bias
        self.scale = scale
        self.steps: list[list[tuple[str, int]]] = []

    def run(self, step):
        self.steps.append([(chunk.sequence.request_id, chunk.num_tokens) for chunk in step.chunks])
        rows = []
        for chunk in step.chunks:
            known = [*chunk.sequence.token_ids, *chunk.draft_token_ids]
            rows += [self.logits(known[:stop]) for stop in range(chunk.stop - chunk.num_logits + 1, chunk.stop + 1)]
        return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, self.size)

    def encode(self, media):
        assert not media

    def logits(self, token_ids: list[int]) -> np.ndarray:
        seed = int.from_bytes(hashlib.blake2b(np.array(token_ids).tobytes(), digest_size=8).digest(), "little")
        noise = np.random.default_rng(seed).standard_normal(self.size, np.float32)
        return self.scale * noise + self.bias


def constrained_core(
    tokenizer: Tokenizer,
    size: int,
    *,
    scale: float = 3.0,
    favour: str = '"}],: \n0123456789',
    favoured: float = 4.0,
    **options: int,
) -> EngineCore:
    ids = {token_id for character in favour for token_id in tokenizer.encode(character)}
    runner = RandomRunner(size, dict.fromkeys([*ids, *tokenizer.stop_token_ids], favoured), scale)
    return make_core(
        make_runner=lambda resources, limits: runner,
        vocabulary_size=size,
        make_token_decoder=tokenizer.stream,
        eos_token_ids=tokenizer.stop_token_ids,
        constraints=compiler_of(tokenizer, size),
        **{"num_pages": 400, "page_size": 16, "max_context": 4000, **options},
    )


def prompt(tokenizer: Tokenizer, text: str = "Question", *, opens_reasoning: bool = False) -> ModelInputs:
    ids = tuple(tokenizer.encode(text))
    positions = np.arange(len(ids), dtype=np.int64)[None]
    return ModelInputs(ids, positions, len(ids), opens_reasoning=opens_reasoning)


def add(core: EngineCore, name: str, inputs: ModelInputs, params: SamplingParams):
    """The sequences of a request, as the loop adds one."""
    return core.add(name, inputs, params, grammar=core.compile(inputs, params))


def run_all(core: EngineCore, max_steps: int = 20_000) -> None:
    for _ in range(max_steps):
        if not core.has_work:
            return
        failures = core.step().failures
        assert not failures, failures
    raise AssertionError(f"not done after {max_steps} steps")
