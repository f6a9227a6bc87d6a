"""Assembles the engine around a model: pages, caches, scheduler, runner and sampler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

import torch

from tilewright.engine.constraint.compiler import ConstraintCompiler
from tilewright.engine.core import EngineCore
from tilewright.engine.draft.drafter import PromptLookupDrafter
from tilewright.engine.draft.policy import DraftPolicy
from tilewright.engine.draft.predictor import PredictorDrafter
from tilewright.engine.kv.cross import CrossCache
from tilewright.engine.kv.pages import PAGE_SIZE, PagePool
from tilewright.engine.kv.prefix_cache import KvCacheManager, PrefixCache, WindowCache
from tilewright.engine.kv.state import StateCache
from tilewright.engine.media.encoder_cache import EncoderCache
from tilewright.engine.media.scheduler import MediaScheduler
from tilewright.engine.ranks.ranks import EngineRanks
from tilewright.engine.run.executor import Executor
from tilewright.engine.run.inputs import StepInputs, StepLayout
from tilewright.engine.run.runner import ModelRunner, RunnerSettings, build_runner
from tilewright.engine.run.writer import StepWriter
from tilewright.engine.sample.detokenizer import TokenDecoder
from tilewright.engine.sample.sampler import Sampler
from tilewright.engine.schedule.resources import SequenceResources
from tilewright.engine.schedule.scheduler import Scheduler
from tilewright.engine.schedule.step import StepLimits
from tilewright.engine.speech.runner import SpeechRunner
from tilewright.engine.speech.scheduler import SpeechScheduler
from tilewright.inputs.media_buffer import MediaBuffer
from tilewright.models.protocol import Model
from tilewright.models.qwen3_omni.model import SpeechModel
from tilewright.models.text import DecoderModel

ENCODER_CACHE_BYTES = 512 << 20
# Keys and values of the talker: eight answers with prompts of 2,000 tokens, as long as they may be. Memory is
# taken as it is used; 1 GB for all rows of Qwen3-Omni-30B-A3B.
NUM_TALKER_ROWS = 8 * 6144


def build_core(
    model: Model,
    dtype: torch.dtype,
    limits: StepLimits,
    num_pages: int,
    *,
    num_cross_pages: int = 0,
    num_state_slots: int = 0,
    num_window_pages: Sequence[int] = (),
    make_token_decoder: Callable[[], TokenDecoder],
    eos_token_ids: Collection[int] = (),
    constraints: ConstraintCompiler | None = None,
    media_buffer: MediaBuffer | None = None,
    page_size: int = PAGE_SIZE,
    speculate: int = 0,
    prefix_cache: bool = True,
    replay: bool = True,
    kv_cache_dtype: str = "auto",
    ranks: EngineRanks | None = None,
    speech: SpeechModel | None = None,
) -> EngineCore:
    """Return the EngineCore of a loaded model, with `num_pages` pages of keys and values.

    They are in `dtype`, or in the type that `kv_cache_dtype` names. A model with cross-attention has `num_cross_pages`
    more for encoder states, one with sliding windows `num_window_pages` for each window, one with recurrent layers
    `num_state_slots` states, one with media the `media_buffer` of its processor. At most `speculate` tokens are drafted
    ahead, by the model's predictor if it has one. `ranks` are the other ranks, each with its part of the model.
    `speech` speaks its answers.
    """
    settings = RunnerSettings(
        limits,
        num_pages,
        num_cross_pages if model.cross_spec else 0,
        num_state_slots if model.state_spec else 0,
        tuple(num_window_pages),
        page_size,
        drafting=speculate > 0,
        kv_cache_dtype=kv_cache_dtype,
        replay=replay,
    )
    resources = build_resources(
        limits,
        num_pages,
        page_size,
        num_cross_pages=settings.num_cross_pages,
        num_state_slots=settings.num_state_slots if model.state_spec else None,
        window_pages=settings.window_pages(model),
        prefix_cache=prefix_cache,
    )
    runner = _first_runner(model, dtype, settings, media_buffer, ranks)
    executor = make_executor(resources, runner, media_buffer, ranks)
    lookup = PromptLookupDrafter(speculate, model.vocab_size) if speculate else None
    drafter = None
    if lookup is not None and runner.predictor is not None:
        policy = DraftPolicy(speculate, limits.max_draft_rows, resources.max_drafts_per_step)
        drafter = PredictorDrafter(executor, policy, lookup, page_size)
    return EngineCore(
        executor,
        Scheduler(resources, limits, drafter or lookup),
        Sampler(),
        make_token_decoder=make_token_decoder,
        vocabulary_size=model.vocab_size,
        num_embeddings=model.num_embeddings,
        eos_token_ids=eos_token_ids,
        constraints=constraints,
        drafter=drafter,
        sends_ahead=executor.sends_ahead,
        speech=None if speech is None else _speech_scheduler(speech, model, dtype, replay and runner.device.is_host),
    )


def _speech_scheduler(speech: SpeechModel, model: Model, dtype: torch.dtype, replay: bool) -> SpeechScheduler:
    """Return a scheduler of speech with pages of its own."""
    num_pages = -(-NUM_TALKER_ROWS // PAGE_SIZE)
    runner = SpeechRunner(
        speech,
        speech.thinker_embeddings(cast(DecoderModel, model)),
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        dtype=dtype,
        replay=replay,
    )
    return SpeechScheduler(runner)


def _first_runner(
    model: Model,
    dtype: torch.dtype,
    settings: RunnerSettings,
    media_buffer: MediaBuffer | None,
    ranks: EngineRanks | None,
) -> ModelRunner:
    """Return the runner of this process. Other ranks make their own over the same inputs."""
    layout = settings.layout(model)
    if ranks is None:
        inputs, draft_inputs = StepInputs(layout), StepInputs(layout)
    else:
        memory = ranks.start_steps(settings, layout, media_buffer)
        inputs, draft_inputs = memory.inputs, memory.draft_inputs
    media_rows = None if media_buffer is None else media_buffer.rows
    return build_runner(model, dtype, settings, inputs, draft_inputs, media_rows)


def build_resources(
    limits: StepLimits,
    num_pages: int,
    page_size: int = PAGE_SIZE,
    *,
    num_cross_pages: int = 0,
    num_state_slots: int | None = None,
    window_pages: Mapping[int, int] | None = None,
    prefix_cache: bool = True,
    encoder_cache_bytes: int = ENCODER_CACHE_BYTES,
) -> SequenceResources:
    """Return the memory that sequences share.

    `num_state_slots` is None for models without recurrent layers; `window_pages` are those of layers with a sliding
    window, by window.
    """
    pool = PagePool(num_pages, page_size)
    # A sequence that starts from a snapshot may compute pages that other sequences have too: one of each is kept.
    prefixes = PrefixCache(pool, enabled=prefix_cache, one_of_each=num_state_slots is not None)
    media = MediaScheduler(EncoderCache(encoder_cache_bytes), CrossCache(num_cross_pages, page_size), limits)
    states = None if num_state_slots is None else StateCache(num_state_slots, prefixes)
    windows = [
        WindowCache(window, PagePool(count, page_size), prefixes) for window, count in (window_pages or {}).items()
    ]
    return SequenceResources(KvCacheManager(pool, prefixes), media, states, windows)


def make_step_layout(resources: SequenceResources, limits: StepLimits, num_axes: int) -> StepLayout:
    """Return the layout of steps over these resources in a buffer."""
    pool, cross_cache = resources.kv.pool, resources.media.cross_cache
    return StepLayout(
        limits,
        num_axes=num_axes,
        page_size=pool.page_size,
        num_pages=pool.num_pages,
        num_cross_pages=cross_cache.num_pages,
        window_pages={window: cache.pool.num_pages for window, cache in resources.windows.items()},
    )


def make_executor(
    resources: SequenceResources,
    runner: ModelRunner,
    media_buffer: MediaBuffer | None = None,
    ranks: EngineRanks | None = None,
) -> Executor:
    """Return the executor that runs steps over these resources, in this process and on the other ranks."""
    media = resources.media
    writer = StepWriter(runner.inputs, media.features, media.cross_cache, has_states=resources.states is not None)
    return Executor(runner, writer, media_buffer, ranks)
