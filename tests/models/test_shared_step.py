"""A step is plain data: another process computes the same logits from it, bit for bit."""

import multiprocessing
import os
from contextlib import contextmanager
from multiprocessing.reduction import DupFd

import numpy as np
import pytest
import tiny
import torch
from core_answers import NoText
from step_worker import Sizes, make_runner, serve, shared_inputs

from tilewright.engine.core import EngineCore
from tilewright.engine.draft.drafter import PromptLookupDrafter
from tilewright.engine.load.assembly import build_resources, make_step_layout
from tilewright.engine.run.executor import Executor
from tilewright.engine.run.writer import StepWriter
from tilewright.engine.sample.sampler import Sampler
from tilewright.engine.schedule.scheduler import Scheduler
from tilewright.engine.schedule.step import StepLimits
from tilewright.types import ModelInputs, SamplingParams

LIMITS = StepLimits(max_context=512, max_tokens_per_step=64, max_sequences=8)
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logit_bias={5: 100.0, 9: 100.0})
TIMEOUT_S = 120


class MirroringExecutor(Executor):
    """Has a worker run each step too, from what this process has written."""

    def __init__(self, model_runner, writer, connection):
        super().__init__(model_runner, writer, tiny.media_buffer(torch.float32))
        self.connection = connection
        self.headers = []

    def run(self, step):
        logits = super().run(step)
        self.headers.append(self.model_runner.inputs.header)
        buffer = self.media_buffer
        self.connection.send([(item.region.first_row, buffer.view(item.region).numpy()) for item in step.encode])
        assert self.connection.poll(TIMEOUT_S), "the worker gives no logits"
        mirrored = self.connection.recv()
        assert mirrored.shape == tuple(logits.shape) and mirrored.tobytes() == logits.numpy().tobytes()
        return logits


@contextmanager
def worker(fd, *arguments):
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, DupFd(fd), *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield connection
        connection.send(None)
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    finally:
        process.kill()


def prompts_of(family, hf, num_axes):
    repeating = np.tile(np.arange(11), 8)
    positions = np.broadcast_to(np.arange(len(repeating)), (num_axes, len(repeating))).astype(np.int64)
    prompts = [ModelInputs(tuple(repeating.tolist()), positions, len(repeating))]
    if family in tiny.CROSS_FAMILIES:
        pictures = {4: [4, (1, 2), 9], 5: [(2, 2), 30, (1, 1), (1, 3), 5]}
        return prompts + [tiny.cross_prompt(pieces, seed).inputs for seed, pieces in pictures.items()]
    grids = {4: (1, 6, 8), 5: (1, 4, 4)}
    return prompts + [tiny.media_prompt(hf, [("image", grid)], seed).inputs for seed, grid in grids.items()]


@pytest.mark.parametrize("family", ["qwen3_vl", "mllama", "qwen3_5"])
def test_another_process_computes_the_same_from_shared_memory(family, networks, models):
    hf, folder = networks(family)
    model, dtype = models(family, torch.float32), torch.float32
    media_rows = tiny.media_buffer(dtype).rows
    num_slots = 64 if model.cross_spec else 0, 40 if model.state_spec else 0
    sizes = Sizes(LIMITS, 32, 64, *num_slots, tuple(media_rows.shape))
    resources = build_resources(
        LIMITS,
        sizes.num_pages,
        sizes.page_size,
        num_cross_pages=sizes.num_cross_pages,
        num_state_slots=sizes.num_state_slots or None,
        encoder_cache_bytes=1,  # features are dropped as soon as nobody reads them
    )
    layout = make_step_layout(resources, LIMITS, model.num_position_axes)
    fd = os.memfd_create("step")
    os.ftruncate(fd, layout.size_bytes)
    media = resources.media
    with worker(fd, str(folder), sizes, dtype) as connection:
        runner = make_runner(model, shared_inputs(layout, fd), sizes, dtype, media_rows)
        writer = StepWriter(runner.inputs, media.features, media.cross_cache, has_states=resources.states is not None)
        executor = MirroringExecutor(runner, writer, connection)
        core = EngineCore(
            executor,
            Scheduler(resources, LIMITS, PromptLookupDrafter(3)),
            Sampler(),
            make_token_decoder=NoText,
            vocabulary_size=model.vocab_size,
            num_embeddings=model.num_embeddings,
        )
        for number, prompt in enumerate(prompts_of(family, hf, model.num_position_axes)):
            core.add(str(number), tiny.in_dtype(prompt, dtype), PARAMS)
        while core.has_work:
            failures = core.step().failures
            assert not failures, failures
    os.close(fd)
    largest = np.array(executor.headers).max(0)
    seen = type(executor.headers[0])(*largest.tolist())
    assert core.scheduler.drafter.num_accepted > 0 and len(runner._recorded) > 0
    assert seen.num_encoded and seen.num_dropped
    assert bool(seen.num_feature_runs) == (family != "mllama")
    assert bool(seen.num_cross_fills) == bool(seen.num_cross_spans) == (family == "mllama")
