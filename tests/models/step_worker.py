"""A process that runs the steps which another one writes into shared memory. Without transformers, to start soon."""

import mmap
from dataclasses import dataclass

import torch

from tilewright.engine.kv.state import StateMemory
from tilewright.engine.run.inputs import StepInputs, StepLayout
from tilewright.engine.run.runner import ModelRunner
from tilewright.engine.schedule.step import StepLimits
from tilewright.models.registry import family_of
from tilewright.ops.native import kernels
from tilewright.weights.checkpoint import open_checkpoint
from tilewright.weights.load import load


@dataclass(frozen=True)
class Sizes:
    limits: StepLimits
    page_size: int
    num_pages: int
    num_cross_pages: int
    num_state_slots: int
    media_shape: tuple[int, int]  # of the rows that an encoder reads


def shared_inputs(layout: StepLayout, fd: int) -> StepInputs:
    """The arrays of a layout in the memory behind a file descriptor."""
    return StepInputs(layout, torch.frombuffer(mmap.mmap(fd, layout.size_bytes), dtype=torch.uint8))


def make_runner(model, inputs: StepInputs, sizes: Sizes, dtype: torch.dtype, media_rows: torch.Tensor) -> ModelRunner:
    """A runner over fresh memory, which is NaN where nothing was written."""

    def caches(spec, num_pages):
        return spec.empty_caches(num_pages, sizes.page_size, dtype)

    kv_caches = caches(model.kv_spec, sizes.num_pages)
    cross_caches = caches(model.cross_spec, sizes.num_cross_pages) if model.cross_spec else []
    states = StateMemory(model.state_spec, sizes.num_state_slots, dtype) if model.state_spec else None
    memory = [cache.data for cache in (*kv_caches, *cross_caches)]
    for tensor in [*memory, *((*states.conv_states, *states.delta_states) if states else ())]:
        tensor.fill_(float("nan"))
    return ModelRunner(
        model, kv_caches, inputs, sizes.limits, cross_caches=cross_caches, states=states, media_rows=media_rows
    )


def serve(connection, shared, folder: str, sizes: Sizes, dtype: torch.dtype) -> None:
    """Answers the rows of media with the logits of the step that is in the shared memory then; ends with None.

    Rows are (first row, values): what this process would map of the media buffer.
    """
    torch.set_num_threads(1)
    kernels.set_num_threads(1)
    checkpoint = open_checkpoint(folder)
    model = family_of(checkpoint.config).build(checkpoint.config, checkpoint.shapes)
    load(model, checkpoint, dtype=dtype, rename=model.checkpoint_name)
    layout = StepLayout(
        sizes.limits,
        num_axes=model.num_position_axes,
        page_size=sizes.page_size,
        num_pages=sizes.num_pages,
        num_cross_pages=sizes.num_cross_pages,
    )
    media_rows = torch.full(sizes.media_shape, float("nan"), dtype=dtype)
    runner = make_runner(model, shared_inputs(layout, shared.detach()), sizes, dtype, media_rows)
    while (rows := connection.recv()) is not None:
        for first_row, values in rows:
            media_rows[first_row : first_row + len(values)] = torch.from_numpy(values)
        connection.send(runner.run().numpy())
