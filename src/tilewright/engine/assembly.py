"""The engine put together around a model: pages, caches, scheduler, runner and sampler."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from tilewright.engine.constraint import ConstraintCompiler
from tilewright.engine.core import EngineCore
from tilewright.engine.detokenizer import Decoder
from tilewright.engine.draft_policy import DraftPolicy
from tilewright.engine.feature_cache import FeatureCache
from tilewright.engine.limits import Limits
from tilewright.engine.mtp_drafter import MtpDrafter
from tilewright.engine.pages import PagePool
from tilewright.engine.prefix_cache import PrefixCache
from tilewright.engine.runner import Runner
from tilewright.engine.sampler import Sampler
from tilewright.engine.scene_cache import SceneCache
from tilewright.engine.scheduler import Scheduler
from tilewright.engine.speculate import Speculator
from tilewright.engine.state_buffers import StateBuffers
from tilewright.engine.state_cache import StateCache
from tilewright.models.protocol import KvSpec, Model
from tilewright.ops.kv_cache import KvCache

PAGE_SIZE = 64
FEATURE_CACHE_BYTES = 512 << 20


def build_core(
    model: Model,
    dtype: torch.dtype,
    limits: Limits,
    num_pages: int,
    *,
    num_scene_pages: int = 0,
    num_state_slots: int = 0,
    make_decoder: Callable[[], Decoder],
    eos_token_ids: Collection[int] = (),
    constraints: ConstraintCompiler | None = None,
    page_size: int = PAGE_SIZE,
    speculate: int = 0,
    prefix_cache: bool = True,
    replay: bool = True,
) -> EngineCore:
    """An EngineCore for a model whose weights are loaded, with `num_pages` pages of keys and values in `dtype`.

    A model with cross-attention has `num_scene_pages` more, for those of encoder states, one with recurrent layers
    `num_state_slots` states. `speculate` tokens at most are guessed ahead, by its predictor if it has one.
    """
    scenes, cross_caches = None, []
    if model.cross_spec is not None:
        scenes = SceneCache(num_scene_pages, page_size)
        cross_caches = _caches(model.cross_spec, num_scene_pages, page_size, dtype)
    features = FeatureCache(FEATURE_CACHE_BYTES)
    pool = PagePool(num_pages, page_size)
    # Those who branch off where no state was kept compute pages again that are there.
    beginnings = PrefixCache(pool, enabled=prefix_cache, one_of_each=model.state_spec is not None)
    states = buffers = None
    if model.state_spec is not None:
        states = StateCache(num_state_slots, beginnings)
        buffers = StateBuffers(model.state_spec, num_state_slots, dtype, limits)
    runner = Runner(
        model,
        _caches(model.kv_spec, num_pages, page_size, dtype),
        features,
        limits,
        scenes=scenes,
        cross_caches=cross_caches,
        states=buffers,
        predictor=model.predictor if speculate else None,
        replay=replay,
    )
    lookup = Speculator(speculate, model.vocab_size) if speculate else None
    drafter = None
    if lookup is not None and runner.predictor is not None:
        max_in_all = states.max_drafts if states else limits.max_draft_rows
        drafter = MtpDrafter(runner, DraftPolicy(speculate, limits.max_draft_rows, max_in_all), lookup, page_size)
    return EngineCore(
        runner,
        Scheduler(pool, beginnings, features, limits, drafter or lookup, scenes, states),
        Sampler(),
        make_decoder=make_decoder,
        vocabulary_size=model.vocab_size,
        num_embeddings=model.decoder.config.num_embeddings,
        eos_token_ids=eos_token_ids,
        constraints=constraints,
        drafter=drafter,
    )


def _caches(spec: KvSpec, num_pages: int, page_size: int, dtype: torch.dtype) -> list[KvCache]:
    """One per layer."""
    return [KvCache.empty(num_pages, page_size, spec.num_heads, spec.head_width, dtype) for _ in range(spec.num_layers)]
