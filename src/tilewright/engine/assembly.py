"""The engine put together around a model: pages, caches, scheduler, runner and sampler."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from tilewright.engine.constraint.compiler import ConstraintCompiler
from tilewright.engine.core import EngineCore
from tilewright.engine.cross.cache import CrossCache
from tilewright.engine.detokenizer import TokenDecoder
from tilewright.engine.draft.policy import DraftPolicy
from tilewright.engine.draft.predictor import PredictorDrafter
from tilewright.engine.draft.prompt_lookup import PromptLookupDrafter
from tilewright.engine.kv.pages import PagePool
from tilewright.engine.kv.prefix_cache import PrefixCache
from tilewright.engine.media.encoder_cache import EncoderCache
from tilewright.engine.runner import ModelRunner
from tilewright.engine.sampler import Sampler
from tilewright.engine.scheduler import Scheduler
from tilewright.engine.state.buffers import StateBuffers
from tilewright.engine.state.cache import StateCache
from tilewright.engine.step_limits import StepLimits
from tilewright.inputs.media_buffer import MediaBuffer
from tilewright.models.protocol import KvSpec, Model
from tilewright.ops.kv_cache import KvCache

PAGE_SIZE = 64
FEATURE_CACHE_BYTES = 512 << 20


def build_core(
    model: Model,
    dtype: torch.dtype,
    limits: StepLimits,
    num_pages: int,
    *,
    num_cross_pages: int = 0,
    num_state_slots: int = 0,
    make_token_decoder: Callable[[], TokenDecoder],
    eos_token_ids: Collection[int] = (),
    constraints: ConstraintCompiler | None = None,
    media_buffer: MediaBuffer | None = None,
    page_size: int = PAGE_SIZE,
    speculate: int = 0,
    prefix_cache: bool = True,
    replay: bool = True,
) -> EngineCore:
    """An EngineCore for a model whose weights are loaded, with `num_pages` pages of keys and values in `dtype`.

    A model with cross-attention has `num_cross_pages` more, for those of encoder states, one with recurrent layers
    `num_state_slots` states, one that takes media the `media_buffer` of its processor. `speculate` tokens at most are
    guessed ahead, by its predictor if it has one.
    """
    cross_cache, cross_caches = None, []
    if model.cross_spec is not None:
        cross_cache = CrossCache(num_cross_pages, page_size)
        cross_caches = _caches(model.cross_spec, num_cross_pages, page_size, dtype)
    features = EncoderCache(FEATURE_CACHE_BYTES)
    pool = PagePool(num_pages, page_size)
    # Those who branch off where no state was kept compute pages again that are there.
    beginnings = PrefixCache(pool, enabled=prefix_cache, one_of_each=model.state_spec is not None)
    states = buffers = None
    if model.state_spec is not None:
        states = StateCache(num_state_slots, beginnings)
        buffers = StateBuffers(model.state_spec, num_state_slots, dtype, limits)
    runner = ModelRunner(
        model,
        _caches(model.kv_spec, num_pages, page_size, dtype),
        features,
        limits,
        cross_cache=cross_cache,
        cross_caches=cross_caches,
        states=buffers,
        predictor=model.predictor if speculate else None,
        media_buffer=media_buffer,
        replay=replay,
    )
    lookup = PromptLookupDrafter(speculate, model.vocab_size) if speculate else None
    drafter = None
    if lookup is not None and runner.predictor is not None:
        max_in_all = states.max_drafts if states else limits.max_draft_rows
        drafter = PredictorDrafter(runner, DraftPolicy(speculate, limits.max_draft_rows, max_in_all), lookup, page_size)
    return EngineCore(
        runner,
        Scheduler(pool, beginnings, features, limits, drafter or lookup, cross_cache, states),
        Sampler(),
        make_token_decoder=make_token_decoder,
        vocabulary_size=model.vocab_size,
        num_embeddings=model.decoder.config.num_embeddings,
        eos_token_ids=eos_token_ids,
        constraints=constraints,
        drafter=drafter,
    )


def _caches(spec: KvSpec, num_pages: int, page_size: int, dtype: torch.dtype) -> list[KvCache]:
    """One per layer."""
    return [KvCache.empty(num_pages, page_size, spec.num_heads, spec.head_width, dtype) for _ in range(spec.num_layers)]
