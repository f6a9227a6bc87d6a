"""Every family against transformers, on tiny random checkpoints."""

import contextlib

import pytest
import tiny
import torch
from helpers import in_fp16
from torch_bf16 import quick_products

from tilewright.engine.schedule.sequence import Sequence
from tilewright.engine.schedule.step import Chunk, Step
from tilewright.types import SamplingParams

ALL_ROWS = SamplingParams(prompt_logprobs=0)


def sequence_of(inputs, first_page):
    sequence = Sequence("request", inputs, ALL_ROWS)
    sequence.pages = list(range(first_page, first_page + -(-len(inputs.token_ids) // 32)))
    return sequence


def logits_of(runner, prompts, chunk_size=10**9, dtype=torch.float32):
    """Logits [T, V] of each prompt: all in one batch, in chunks of at most chunk_size tokens."""
    sequences, first_page = [], 0
    for prompt in prompts:
        sequences.append(sequence_of(tiny.in_dtype(prompt.inputs, dtype), first_page))
        first_page += len(sequences[-1].pages)
    rows = [[] for _ in prompts]
    while any(sequence.num_uncomputed_tokens for sequence in sequences):
        chunks = [
            Chunk(sequence, sequence.num_computed_tokens, min(chunk_size, sequence.num_uncomputed_tokens))
            for sequence in sequences
            if sequence.num_uncomputed_tokens
        ]
        encode = [
            span.medium
            for chunk in chunks
            for span in chunk.sequence.feature_spans(chunk.start, chunk.stop)
            if not runner.features.has(span.medium.key)
        ]
        groups = {}
        for chunk in chunks:
            for group in chunk.sequence.cross_groups_in(chunk.start, chunk.stop):
                if not runner.cross_cache.is_filled(group.key) and group.key not in groups:
                    assert runner.cross_cache.pin(group)
                    groups[group.key] = group
        encode += [medium for group in groups.values() for medium in group.media]
        media = list({medium.key: medium for medium in encode}.values())
        logits = runner.run(Step(chunks, media, list(groups.values()))).clone()
        for chunk, part in zip(chunks, logits.split([chunk.num_logits for chunk in chunks]), strict=True):
            assert chunk.num_logits == chunk.num_tokens
            rows[sequences.index(chunk.sequence)].append(part)
            chunk.sequence.num_computed_tokens = chunk.stop
            chunk.sequence.prompt_logprobs.extend(
                [None] * (min(chunk.stop + 1, chunk.sequence.num_tokens) - len(chunk.sequence.prompt_logprobs))
            )
    return [torch.cat(parts) for parts in rows]


@torch.no_grad()
@quick_products()
def expected(hf, prompt, dtype=torch.float32):
    arguments = {
        name: value.to(dtype) if value.is_floating_point() else value for name, value in prompt.arguments.items()
    }
    with tiny.blind_before_pictures(hf) if "cross_attention_mask" in arguments else contextlib.nullcontext():
        return hf(**arguments).logits[0].float()


def relative(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def rms(error):
    return error.double().square().mean().sqrt().item()


def middle_row(error):
    """Of the rows [T, V]. Where rounding makes a token choose another expert, its row differs altogether: a few such
    rows, which every rounding has in other places, would be most of the mean."""
    return error.double().square().mean(1).sqrt().median().item()


def prompts_for(name, hf):
    """Text, and for models that see: a picture, three of different sizes, and a video with a picture."""
    if name in tiny.CROSS_FAMILIES:
        return [
            tiny.cross_prompt([40], 1),
            tiny.cross_prompt([(1, 1), 9], 2),
            tiny.cross_prompt([6, (2, 2), 11], 3),
            tiny.cross_prompt([5, (1, 2), (3, 1), 7, (1, 4), 20], 4),
            tiny.cross_prompt([3, (2, 1), 1, (1, 1), (1, 1), (1, 3)], 5),
        ]
    if name not in tiny.VISION_FAMILIES:
        return [tiny.text_prompt(75, 1), tiny.text_prompt(1, 2), tiny.text_prompt(33, 3)]
    return [
        tiny.text_prompt(40, 1, num_axes=3),
        tiny.media_prompt(hf, [("image", (1, 6, 8))], 2),
        tiny.media_prompt(hf, [("image", (1, 4, 4)), ("image", (1, 10, 6)), ("image", (1, 2, 12))], 3),
        tiny.media_prompt(hf, [("video", (3, 4, 6)), ("image", (1, 8, 4))], 4),
    ]


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_fp32_logits_are_those_of_transformers(name, networks, models, make_runner, isa):
    hf, _ = networks(name)
    for prompt in prompts_for(name, hf):
        (ours,) = logits_of(make_runner(models(name, torch.float32)), [prompt])
        assert relative(ours, expected(hf, prompt)) < 1e-4


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_bf16_is_as_close_to_the_truth_as_transformers(name, networks, models, make_runner):
    hf, folder = networks(name)
    half = type(hf).from_pretrained(folder, dtype=torch.bfloat16).eval()
    ours, theirs = [], []
    for prompt in prompts_for(name, hf):
        truth = expected(hf, prompt)
        runner = make_runner(models(name, torch.bfloat16), dtype=torch.bfloat16)
        (logits,) = logits_of(runner, [prompt], dtype=torch.bfloat16)
        ours.append(logits - truth)
        theirs.append(expected(half, prompt, torch.bfloat16) - truth)
    size = middle_row if "moe" in name and in_fp16() else rms
    assert size(torch.cat(ours)) <= 1.25 * size(torch.cat(theirs))


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_one_token_at_a_time_is_prefill(name, networks, models, make_runner, dtype):
    """Bit for bit, also in a batch with others, and recorded and replayed."""
    hf, _ = networks(name)
    model = models(name, dtype)
    prompts = prompts_for(name, hf)
    alone = [logits_of(make_runner(model, dtype=dtype), [prompt], dtype=dtype)[0] for prompt in prompts]
    for chunk_size in (1, 7):
        for replay in (False, True):
            runner = make_runner(model, replay=replay, dtype=dtype)
            together = logits_of(runner, prompts, chunk_size, dtype)
            for ours, want in zip(together, alone, strict=True):
                assert torch.equal(ours, want)
