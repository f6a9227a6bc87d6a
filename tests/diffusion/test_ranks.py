"""A pipeline over two processes: it makes what one makes, ends runs together, and a rank that dies is told."""

import os
import signal

import numpy as np
import pytest
import torch
from tiny_pipelines import z_image_pipeline

from tilewright import Diffusion
from tilewright.diffusion.params import Cancelled
from tilewright.diffusion.ranks import DiffusionLostError
from tilewright.types import RequestError

pytestmark = pytest.mark.alone  # two processes that wait for each other
RUN = {"height": 20, "width": 24, "num_steps": 3, "guidance": 2.0, "seed": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "tiny"
    z_image_pipeline(path)
    return path


def test_two_processes(folder):
    with Diffusion(folder, pack_cache=False) as alone:
        expected = alone.generate("a cat", **RUN, output="array")
    with Diffusion(folder, pack_cache=False, tp=2) as diffusion:

        def made():
            return diffusion.generate("a cat", **RUN, output="array")

        torch.testing.assert_close(made().latents, expected.latents, atol=1e-4, rtol=1e-4)
        params, seen = diffusion.params("a cat", **RUN), []

        def show_then_stop(step, num_steps, latents):
            seen.append(diffusion.preview(latents, params))
            if step == 2:
                raise Cancelled

        with pytest.raises(Cancelled):
            diffusion.run(params, show_then_stop)
        assert [preview.shape for preview in seen] == [(1, 1, 20, 24, 3)] * 2

        def fail(step, num_steps, latents):
            raise KeyError("a caller's own error")

        with pytest.raises(KeyError, match="a caller's own error"):
            diffusion.run(params, fail)
        with pytest.raises(RequestError, match="tokens with its template, expected at most 512"):
            diffusion.generate("x" * 600, **RUN)
        again = made()
        torch.testing.assert_close(again.latents, expected.latents, atol=1e-4, rtol=1e-4)
        assert abs(again.images[0].astype(int) - expected.images[0].astype(np.int64)).max() <= 1


def test_a_rank_that_dies_is_told(folder):
    with Diffusion(folder, pack_cache=False, tp=2) as diffusion:

        def kill(step, num_steps, latents):
            for pid in diffusion._ranks.pids:
                os.kill(pid, signal.SIGKILL)

        with pytest.raises(DiffusionLostError, match="a rank is lost"):
            diffusion.generate("a cat", **RUN, on_step=kill)
        with pytest.raises(DiffusionLostError, match="rank 1"):
            diffusion.generate("a cat", **RUN)


@pytest.mark.parametrize("tp", [0, 10_000, True, "two"])
def test_impossible_numbers_of_ranks(folder, tp):
    with pytest.raises(RequestError, match=r"tp is .*, expected 1 to"):
        Diffusion(folder, tp=tp)
