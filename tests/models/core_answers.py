"""Requests through the real scheduler, runner, sampler and drafter, asked for at once."""

from __future__ import annotations

import tiny

from tilewright.engine.load.assembly import build_core
from tilewright.engine.schedule.step import StepLimits


class NoText:
    def push(self, token_ids):
        return ""

    def flush(self):
        return ""


class CoreAnswers:
    """An engine core whose memory is NaN where nothing was written: what was never written must not be read."""

    def __init__(
        self,
        model,
        dtype,
        *,
        page_size,
        num_pages=64,
        num_cross_pages=64,
        num_state_slots=80,
        num_window_pages=None,
        tokens_per_step=1024,
        encode_patches=StepLimits.max_encode_patches,
        prefix_cache=False,
        drafts=0,
        make_token_decoder=NoText,
        **options,
    ):
        limits = StepLimits(
            max_context=512,
            max_tokens_per_step=tokens_per_step,
            max_sequences=min(16, tokens_per_step),
            max_encode_patches=encode_patches,
        )
        windows = model.kv_spec.windows(limits.max_context)
        self.core = build_core(
            model,
            dtype,
            limits,
            num_pages,
            num_window_pages=[num_window_pages or num_pages for _ in windows],
            num_cross_pages=num_cross_pages,
            num_state_slots=num_state_slots,
            make_token_decoder=make_token_decoder,
            media_buffer=tiny.media_buffer(dtype),
            page_size=page_size,
            speculate=drafts,
            prefix_cache=prefix_cache,
            **options,
        )
        self.scheduler, self.drafter = self.core.scheduler, self.core.drafter
        self.num_steps = 0
        runner = self.core.runner.model_runner
        states = [*runner.states.conv_states, *runner.states.delta_states] if runner.states else []
        # A predictor may read what it never wrote: that is zeros, and makes a draft worse, not an answer.
        own = runner.kv_caches[:-1] if model.predictor else runner.kv_caches
        for memory in [*states, *(cache.data for cache in (*own, *runner.cross_caches))]:
            memory.fill_(float("nan") if memory.is_floating_point() else 255)  # bytes: scales of NaN
        for layer, cache in zip(model.kv_spec.layers, runner.kv_caches, strict=True):
            if layer.window in windows:  # the page that stands for those behind the window stays zero
                (cache.data[-1] if cache.data.dim() == 3 else cache.data[:, -2]).zero_()

    def to(self, prompts, params):
        """The tokens of each prompt's answers."""
        sequences = [item for i, inputs in enumerate(prompts) for item in self.add(str(i), inputs, params)]
        self.run()
        return [sequence.output_token_ids for sequence in sequences]

    def add(self, name, inputs, params):
        return self.core.add(name, inputs, params, grammar=self.core.compile(inputs, params))

    def run(self):
        while self.core.has_work:
            failures = self.core.step().failures
            assert not failures, failures
            self.num_steps += 1
        assert (
            self.scheduler.resources.kv.pool.num_used == self.scheduler.resources.media.cross_cache.num_pages_used == 0
        )
        assert not any(cache.pool.num_used for cache in self.scheduler.resources.windows.values())
        assert self.scheduler.resources.states is None or self.scheduler.resources.states.num_used == 0
