"""Models on a device of their own: one copy of a step's media, one of its other inputs, one back, and no waits."""

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from core_answers import CoreAnswers
from fake_device import FakeDevice, NoValues, Upload
from test_parity import prompts_for

from tilewright.engine.media.transfer import MediaTransfer
from tilewright.layers.attention import KvLayer
from tilewright.models.protocol import KvSpec, MediaItem
from tilewright.ops import backend
from tilewright.ops.device import HOST
from tilewright.types import Medium, ModelInputs, SamplingParams, Span

FAMILIES = ["qwen3_vl", "qwen3_vl_moe", "mllama", "qwen3_5", "qwen3_5_moe", "qwen3", "qwen3_window"]
TEXT_ALONE = ("qwen3", "qwen3_window")
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0)
LONGER = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.0)
OTHERS = {
    "drawn": SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.8, top_p=0.9, seed=3),
    "penalized": SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0, repetition_penalty=1.3, min_tokens=2),
    "told": SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0, logprobs=2, prompt_logprobs=1),
}


class ReadsAll(FakeDevice):
    """Reads the media buffer of all tests too, which was made without it."""

    def can_read(self, tensor):
        return True


def prompts_of(name, hf):
    found = prompts_for(name, hf) if name in tiny.FAMILIES else None
    if found is None:
        found = [tiny.text_prompt(n, n, num_axes=3) for n in (9, 40)]
        found += [tiny.media_prompt(hf, [("image", (1, 6, 8))], 2)] if name not in TEXT_ALONE else []
    return [tiny.in_dtype(prompt.inputs, torch.float32) for prompt in found]


def load(name, networks):
    from tilewright.models.registry import family_of
    from tilewright.weights import load as loading
    from tilewright.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(networks(name)[1])
    model = family_of(checkpoint.config).build(checkpoint.config, checkpoint.shapes)
    loading.load(model, checkpoint, dtype=torch.float32, rename=model.checkpoint_name)
    return model


def answers_on(device, name, networks, params=GREEDY, drafts=0, replay=False):
    """The answers, and how many steps it took."""
    with backend.use("torch", device):
        core = CoreAnswers(load(name, networks), torch.float32, page_size=32, drafts=drafts, replay=replay)
        return core.to(prompts_of(name, networks(name)[0]), params), core.num_steps


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_and_copies(name, networks):
    device = FakeDevice()
    answers, num_steps = answers_on(device, name, networks)
    assert answers == answers_on(HOST, name, networks)[0]
    of_media = [upload for upload in device.uploads if upload.beside]
    assert len(device.uploads) - len(of_media) == device.num_fetches == num_steps  # one there, one back
    assert len(of_media) == (name not in TEXT_ALONE)  # all media of the prompts, which are encoded in the first step
    assert device.num_waits == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_that_decode_are_recorded(name, networks):
    """Replays read what the step's one copy brought; rows of nobody's change no answer."""
    device = FakeDevice()
    answers, num_steps = answers_on(device, name, networks, LONGER, replay=True)
    assert answers == answers_on(HOST, name, networks, LONGER)[0]
    assert sum(tape.num_replays for tape in device.recordings) >= LONGER.max_tokens // 2
    assert len([upload for upload in device.uploads if not upload.beside]) == device.num_fetches == num_steps
    assert device.num_waits == 0


def pictures_of(name, hf):
    """Four requests with a picture of one size each, and one of another."""
    if name == "mllama":
        found = [tiny.cross_prompt([4, (1, 2), 9], seed) for seed in range(4)] + [tiny.cross_prompt([(2, 2), 3], 9)]
    else:
        found = [tiny.media_prompt(hf, [("image", (1, 6, 8))], seed) for seed in range(4)]
        found.append(tiny.media_prompt(hf, [("image", (1, 4, 4))], 9))
    return [tiny.in_dtype(prompt.inputs, torch.float32) for prompt in found]


@pytest.mark.parametrize("name", ["qwen3_vl", "mllama", "qwen3_5"])
def test_passes_of_encoders_are_recorded(name, networks):
    """By the grids of their media, which reach the same place in every step: by the one copy, or from ahead."""

    def answers(device):
        with backend.use("torch", device):
            core = CoreAnswers(load(name, networks), torch.float32, page_size=32, replay=not device.is_host)
            runner = core.core.runner.model_runner
            prompts = pictures_of(name, networks(name)[0])
            found = [core.to([prompt], GREEDY) for prompt in prompts]
            return found, len(runner._captured_passes)

    device = ReadsAll()
    found, num_recordings = answers(device)
    assert found == answers(HOST)[0]
    assert num_recordings == 1
    assert [upload.beside for upload in device.uploads].count(True) == 5


def test_what_cannot_be_recorded_runs_op_by_op(networks, caplog):
    class Unable(FakeDevice):
        def record(self, compute):
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    answers, _ = answers_on(Unable(), "qwen3", networks, replay=True)
    assert answers == answers_on(HOST, "qwen3", networks)[0]
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert record.getMessage() == (
        "steps cannot be recorded on cpu and run op by op, slower: operation not permitted when stream is capturing"
    )


@pytest.mark.parametrize("params", OTHERS.values(), ids=OTHERS)
def test_other_ways_to_sample(params, networks):
    device = FakeDevice()
    answers, num_steps = answers_on(device, "qwen3_vl", networks, params)
    assert answers == answers_on(HOST, "qwen3_vl", networks, params)[0]
    assert len([upload for upload in device.uploads if not upload.beside]) <= 4 * num_steps
    assert device.num_waits == 0


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_vl"])
def test_drafts(name, networks):
    """Of a predictor, and by look-up."""
    device = FakeDevice()
    assert answers_on(device, name, networks, drafts=3)[0] == answers_on(HOST, name, networks)[0]
    assert device.num_waits == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_asks_for_a_value(name, networks):
    """From the schedule to the sampled tokens, which are the first of the vocabulary here."""
    answers, _ = answers_on(NoValues(), name, networks)
    assert {token for answer in answers for token in answer} == {0}


class Stranger:
    """A model of no family: tokens are sums of the rows of all media that were put in their batch."""

    vocab_size = num_embeddings = tiny.VOCAB
    num_position_axes = 1
    kv_spec = KvSpec((KvLayer(num_heads=1, head_width=16),))
    cross_spec = state_spec = predictor = None

    def encode(self, batch):
        return [batch.rows([item])[: item.num_features] for item in batch.items]

    def split_features(self, features):
        return features, ()

    def forward(self, batch):
        sums = (
            sum(run.embeddings_MD.sum() for run in batch.feature_runs)
            if batch.feature_runs
            else batch.token_ids_T.sum()
        )
        rows = len(batch.token_ids_T) if batch.logit_rows is None else len(batch.logit_rows)
        places = torch.arange(self.vocab_size, device=batch.token_ids_T.device)
        return torch.sin(sums * 7.0 + places).expand(rows, -1).contiguous()


def stranger_prompts():
    """Three pictures of 24 patches, each in a request of its own."""
    for number in range(3):
        rows = torch.randn(24, tiny.ROW_WIDTH, generator=torch.Generator().manual_seed(number))
        medium = Medium("image", b"%16d" % number, (1, 4, 6), (Span(2, 6),), tiny.UNWRITTEN, 24)
        inputs = ModelInputs((1, 2, *[tiny.IMAGE] * 6, 3), np.arange(9)[None], 9, (medium,), tiny.DrawnPatches([rows]))
        yield tiny.in_dtype(inputs, torch.float32)


def test_a_model_that_nobody_knows_has_one_copy_too():
    def answers(device):
        with backend.use("torch", device):
            core = CoreAnswers(Stranger(), torch.float32, page_size=32, replay=False)
            return core.to(list(stranger_prompts()), GREEDY)

    device = FakeDevice()
    assert answers(device) == answers(HOST)
    (of_media,) = [upload for upload in device.uploads if upload.beside]
    assert of_media.num_bytes == 3 * 24 * tiny.ROW_WIDTH * 4


def test_media_of_the_next_step_go_ahead():
    """While a step is computed: one copy for the pictures that the next one encodes, and none with that step."""

    def answers(device):
        with backend.use("torch", device):
            core = CoreAnswers(Stranger(), torch.float32, page_size=32, replay=False, encode_patches=30)
            return core.to(list(stranger_prompts()), GREEDY)

    device = ReadsAll()
    assert answers(device) == answers(HOST)
    assert [upload.num_bytes for upload in device.uploads if upload.beside] == [24 * tiny.ROW_WIDTH * 4] * 3
    first, second = ["inputs", "media"], ["inputs"]  # a step's copies, up to its tokens
    assert device.order[:8] == [*first, "media", "fetch", *second, "media", "fetch", "inputs"]
    assert device.num_waits == 0


def test_what_went_ahead_for_a_request_that_ended():
    """Its rows are another's by then: nothing of it is taken for that one's, though it has the same place."""

    class Slow(ReadsAll):
        def fetch(self, tensor):
            return tensor.clone()  # copies beside it go on

    def answers(device):
        with backend.use("torch", device):
            core = CoreAnswers(Stranger(), torch.float32, page_size=32, replay=False, encode_patches=30)
            prompts = list(stranger_prompts())
            sequences = [*core.add("0", prompts[0], GREEDY), *core.add("1", prompts[1], GREEDY)]
            core.core.step()
            core.core.abort("1")
            buffer = core.core.runner.media_buffer
            buffer.view(prompts[1].media[0].region).copy_(buffer.view(prompts[2].media[0].region))
            moved = replace(prompts[2], media=(replace(prompts[2].media[0], region=prompts[1].media[0].region),))
            sequences += core.add("2", moved, GREEDY)
            core.run()
            return [sequence.output_token_ids for sequence in sequences]

    device = Slow()
    assert answers(device) == answers(HOST)
    assert device.num_waits >= 1  # before the rows could be written again


@pytest.mark.parametrize(("first_rows", "num_bytes"), [((8, 12), 8 * 12), ((8, 13), 9 * 12), ((0, 40), 8 * 12)])
def test_media_are_copied_from_where_they_are(first_rows, num_bytes):
    """With the rows between them where these are few; media that lie far apart are gathered."""
    device = FakeDevice()
    rows = device.host_bytes(64 * 12).view(torch.float32).view(64, 3)
    rows.copy_(torch.arange(192).view(64, 3))
    items = [MediaItem("image", (1, 2, 2), (1, 1), first, 4, 1) for first in first_rows]
    transfer = MediaTransfer(rows, device)
    batch = transfer.send(items)
    assert device.uploads == [Upload(num_bytes, beside=True)]
    for item, first in zip(batch.items, first_rows, strict=True):
        assert batch.rows([item]).equal(rows[first : first + 4])
    transfer.recycle()
