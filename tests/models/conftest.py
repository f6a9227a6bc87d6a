import functools
import json

import pytest
import tiny
import tiny_qwen3_5
import torch

from tilewright.engine.load.assembly import build_resources, make_executor, make_step_layout
from tilewright.engine.run.inputs import StepInputs
from tilewright.engine.run.runner import ModelRunner
from tilewright.engine.schedule.step import StepLimits
from tilewright.inputs.chat_template import ChatTemplate
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.models.registry import family_of
from tilewright.ops import backend
from tilewright.ops.packed import weight_format
from tilewright.weights.checkpoint import open_checkpoint
from tilewright.weights.load import load


@pytest.fixture(autouse=True)
def computes_alone(one_thread):
    """All tests of this folder compute on one thread."""


@pytest.fixture(scope="session")
def networks(tmp_path_factory):
    """transformers' model and its saved checkpoint, by family, made when first asked for."""

    @functools.cache
    def network(name):
        maker = tiny_qwen3_5 if name in tiny_qwen3_5.FAMILIES else tiny
        hf = maker.make_network(name)
        return hf, tiny.save(hf, tmp_path_factory.mktemp(name))

    return network


@pytest.fixture(scope="session")
def models(networks):
    """Our model of the same checkpoint, by family, dtype, backend and the layout in which the level keeps weights."""
    made = {}

    def model(name, dtype):
        key = name, dtype, backend.active(), weight_format(dtype).layout
        if key not in made:
            checkpoint = open_checkpoint(networks(name)[1])
            network = family_of(checkpoint.config).build(checkpoint.config, checkpoint.shapes)
            load(network, checkpoint, dtype=dtype, rename=network.checkpoint_name)
            made[key] = network
        return made[key]

    return model


@pytest.fixture(params=backend.NAMES)
def each_backend(request):
    """Runs the test once on each backend."""
    with backend.use(request.param):
        yield request.param


@pytest.fixture
def make_runner():
    """What runs steps, over fresh pages of 32 tokens."""

    def make(model, *, num_pages=64, replay=False, dtype=torch.float32):
        def caches(spec):
            return spec.empty_caches(num_pages, 32, dtype)

        limits = StepLimits(max_context=32 * num_pages, max_tokens_per_step=2048, max_sequences=16)
        resources = build_resources(
            limits, num_pages, 32, num_cross_pages=num_pages if model.cross_spec else 0, encoder_cache_bytes=1 << 30
        )
        buffer = tiny.media_buffer(dtype)
        runner = ModelRunner(
            model,
            caches(model.kv_spec),
            StepInputs(make_step_layout(resources, limits, model.num_position_axes)),
            limits,
            cross_caches=caches(model.cross_spec) if model.cross_spec else [],
            media_rows=buffer.rows,
            replay=replay,
        )
        return make_executor(resources, runner, buffer)

    return make


@pytest.fixture(scope="module")
def config(folder):
    """Of the checkpoint in a module's own `folder`."""
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def processor(folder, config):
    """As the engine makes it, computing in fp32."""
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    return family_of(config).make_processor(config, folder, tokenizer, template, dtype=torch.float32)
