"""The talker and its code predictor against transformers, on tiny random weights."""

import copy
from collections.abc import Mapping

import pytest
import tiny_speech
import torch
from components import on_ranks, rms

from tilewright.layers.batch import Batch
from tilewright.models.qwen3_omni.config import TalkerConfig
from tilewright.models.qwen3_omni.talker import Talker

PAGE_SIZE, NUM_PAGES = 32, 4
NUM_ROWS = 40


def config_of(network) -> Mapping[str, object]:
    return network.config.to_dict()


def filled(network, dtype=torch.float32, group=None):
    state = {f"talker.{name}": tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    config = TalkerConfig.from_dict(config_of(network), state)
    return tiny_speech.filled(lambda: Talker(config), network, "talker", dtype, group)


def rows_of(num_rows, width, seed=0):
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))


def positions_of(num_rows):
    """Positions that differ between the axes, as those of a picture's rows do."""
    positions = torch.arange(num_rows).expand(3, -1).clone()
    positions[1, 5:12] = torch.arange(7) // 3 + 5
    positions[2, 5:12] = torch.arange(7) % 3 + 5
    return positions


@torch.no_grad()
def expected(network, x_TD):
    dtype = next(network.parameters()).dtype
    out = network.model(inputs_embeds=x_TD[None].to(dtype), position_ids=positions_of(len(x_TD))[:, None])
    hidden = out.last_hidden_state
    return hidden[0].float(), network.codec_head(hidden)[0].float()


@torch.inference_mode()
def computed(ours, x_TD, sizes=(NUM_ROWS,), dtype=torch.float32):
    """Hidden states and logits of rows that come in chunks."""
    caches = ours.kv_spec.empty_caches(NUM_PAGES, PAGE_SIZE, dtype)
    positions, hidden, first = positions_of(len(x_TD)), [], 0
    for size in sizes:
        stop = min(first + size, len(x_TD))
        batch = Batch(
            token_ids_T=torch.zeros(stop - first, dtype=torch.int64),
            positions_AT=positions[:, first:stop].contiguous(),
            slots_T=torch.arange(first, stop),
            query_starts=torch.tensor([0, stop - first], dtype=torch.int32),
            kv_lengths=torch.tensor([stop], dtype=torch.int32),
            block_table=torch.arange(NUM_PAGES, dtype=torch.int32)[None],
            kv_caches=caches,
        )
        hidden.append(ours.hidden(x_TD[first:stop].to(dtype, copy=True), batch))
        first = stop
    h_TD = torch.cat(hidden)
    return h_TD.float(), ours.logits(h_TD)


def test_hidden_states_and_logits_are_those_of_transformers():
    network = tiny_speech.talker()
    x_TD = rows_of(NUM_ROWS, 48)
    for ours, theirs in zip(computed(filled(network), x_TD), expected(network, x_TD), strict=True):
        assert (ours - theirs).abs().max() < 1e-4


def test_chunks_are_as_the_whole():
    ours, x_TD = filled(tiny_speech.talker()), rows_of(NUM_ROWS, 48)
    whole, chunked = computed(ours, x_TD)[1], computed(ours, x_TD, (7, 1, 1, 20, 11))[1]
    assert (whole - chunked).abs().max() < 1e-5


def test_bf16_errs_as_little_as_theirs():
    network, x_TD = tiny_speech.talker(), rows_of(NUM_ROWS, 48).bfloat16().float()
    truth = expected(network, x_TD)[1]
    theirs = expected(copy.deepcopy(network).to(torch.bfloat16), x_TD)[1]
    ours = computed(filled(network, torch.bfloat16), x_TD, dtype=torch.bfloat16)[1]
    assert 0 < rms(ours - truth) <= 1.25 * rms(theirs - truth)


@pytest.mark.parametrize("kind", ["text_projection", "hidden_projection"])
def test_projections(kind):
    network, x_TW = tiny_speech.talker(), rows_of(9, tiny_speech.TEXT["hidden_size"])
    with torch.inference_mode():
        assert (getattr(filled(network), kind)(x_TW) - getattr(network, kind)(x_TW)).abs().max() < 1e-5


@torch.no_grad()
def frame_of(network, hidden_D, first_code):
    """Codes by transformers' greedy generation, and what it adds up for the talker's next row."""
    embedded = network.model.codec_embedding(torch.tensor([[first_code]]))
    result = network.code_predictor.generate(
        inputs_embeds=torch.cat((hidden_D[None, None], embedded), dim=1),
        max_new_tokens=tiny_speech.NUM_CODES - 1,
        do_sample=False,
    )
    tables = network.code_predictor.get_input_embeddings()
    total = embedded[0, 0] + sum(table(code) for table, code in zip(tables, result[0], strict=True))
    return [first_code, *result[0].tolist()], total


def greedy(logits, place):
    return logits.argmax(-1)


@torch.inference_mode()
def frames_of(ours, hidden_BD, first_codes):
    return ours.complete_frames(hidden_BD, torch.tensor(first_codes), greedy)


@pytest.mark.parametrize("num_voices", [1, 3])
def test_frames_are_those_of_transformers(num_voices):
    network = tiny_speech.talker()
    ours, hidden, first_codes = filled(network), rows_of(num_voices, 48), [5, 31, 0][:num_voices]
    for _ in range(2):  # nothing is left over from a frame before
        codes, embedded = frames_of(ours, hidden, first_codes)
        for b, first in enumerate(first_codes):
            theirs, total = frame_of(network, hidden[b], first)
            assert codes[b].tolist() == theirs
            assert (embedded[b] - total).abs().max() < 1e-5


def test_more_voices_than_before_have_room():
    ours, hidden = filled(tiny_speech.talker()), rows_of(5, 48)
    alone = [frames_of(ours, hidden[b : b + 1], [b])[0][0].tolist() for b in range(5)]
    assert frames_of(ours, hidden, list(range(5)))[0].tolist() == alone


def test_logits_of_each_code():
    """Not only the likeliest: each head's logits, after the codes that transformers has chosen."""
    network = tiny_speech.talker()
    ours, hidden = filled(network), rows_of(1, 48)
    seen = []

    def keep(logits, place):
        assert place == len(seen) + 1
        seen.append(logits.clone())
        return logits.argmax(-1)

    with torch.inference_mode():
        ours.complete_frames(hidden, torch.tensor([7]), keep)
    embedded = network.model.codec_embedding(torch.tensor([[7]]))
    with torch.no_grad():
        theirs = network.code_predictor.generate(
            inputs_embeds=torch.cat((hidden[None], embedded), dim=1),
            max_new_tokens=tiny_speech.NUM_CODES - 1,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        ).logits
    assert len(seen) == len(theirs) == tiny_speech.NUM_CODES - 1
    for ours_, theirs_ in zip(seen, theirs, strict=True):
        assert (ours_ - theirs_).abs().max() < 1e-4


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_the_results_of_one(size):
    network, x_TD, hidden = tiny_speech.talker(), rows_of(NUM_ROWS, 48), rows_of(2, 48, seed=1)
    one = filled(network)
    logits, (codes, embedded) = computed(one, x_TD)[1], frames_of(one, hidden, [3, 4])

    def compute(ours):
        return computed(ours, x_TD)[1], *frames_of(ours, hidden, [3, 4])

    for own in on_ranks(size, lambda group: filled(network, group=group), compute):
        assert (own[0] - logits).abs().max() < 1e-4
        assert torch.equal(own[1], codes)
        assert (own[2] - embedded).abs().max() < 1e-5
