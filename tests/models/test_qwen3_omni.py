"""The thinker against transformers on a tiny random checkpoint: sounds, pictures, videos with and without sound."""

import pytest
import tiny
import tiny_omni
import torch
from rank_threads import RankThreads
from test_parity import logits_of, relative, rms
from test_tensor_parallel import Recorded
from torch_bf16 import quick_products

from tilewright.models.registry import family_of
from tilewright.types import SamplingParams
from tilewright.weights.checkpoint import open_checkpoint
from tilewright.weights.load import load

PROMPTS = {
    "text": [],
    "short sound": [("audio", 57)],
    "one chunk": [("audio", 100)],
    "windows": [("audio", 477)],
    "sounds in order": [("audio", 140), ("audio", 203), ("audio", 400)],
    "picture": [("image", (1, 6, 8))],
    "video": [("video", (3, 4, 6), 1)],
    "video with its sound": [("joined", (3, 4, 6), 1, 290)],
    "a video that ends before its sound": [("joined", (2, 4, 4), 1, 350)],
    "a sound that ends before its video": [("joined", (4, 8, 4), 2, 120)],
    "a video larger than its sound is long": [("joined", (1, 40, 4), 1, 60)],
    "two with their sounds and a sound": [("joined", (2, 4, 4), 1, 160), ("audio", 150), ("joined", (2, 6, 4), 1, 200)],
    "mixed": [("audio", 150), ("image", (1, 4, 4)), ("video", (2, 4, 6), 1), ("audio", 331), ("image", (1, 10, 6))],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    network = tiny_omni.make_network()
    return network, tiny.save(network, tmp_path_factory.mktemp("omni"))


@pytest.fixture(scope="module")
def thinkers(whole):
    made = {}

    def thinker(dtype):
        if dtype not in made:
            checkpoint = open_checkpoint(whole[1])
            made[dtype] = family_of(checkpoint.config).build(checkpoint.config, checkpoint.shapes)
            load(made[dtype], checkpoint, dtype=dtype, rename=made[dtype].checkpoint_name)
        return made[dtype]

    return thinker


@pytest.fixture(scope="module")
def prompts(whole):
    return [tiny_omni.prompt(whole[0].thinker, media, seed) for seed, media in enumerate(PROMPTS.values())]


@pytest.fixture(scope="module")
def truths(whole, prompts):
    return [expected(whole[0].thinker, prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def error_of_transformers(whole, prompts, truths):
    """In bf16."""
    half = type(whole[0]).from_pretrained(whole[1], dtype=torch.bfloat16).eval().thinker
    results = [expected(half, prompt, torch.bfloat16) for prompt in prompts]
    return rms(torch.cat([result - truth for result, truth in zip(results, truths, strict=True)]))


@torch.no_grad()
@quick_products()
def expected(hf, prompt, dtype=torch.float32):
    arguments = {
        name: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in prompt.arguments.items()
    }
    hf.model.rope_deltas = None
    return hf(**arguments).logits[0].float()


@pytest.mark.parametrize("name", PROMPTS)
def test_positions_are_those_of_transformers(whole, name):
    hf = whole[0].thinker
    prompt = tiny_omni.prompt(hf, PROMPTS[name], 7)
    arguments = prompt.arguments
    lengths = arguments["feature_attention_mask"].sum(1) if "feature_attention_mask" in arguments else None
    positions, deltas = hf.model.get_rope_index(
        arguments["input_ids"],
        arguments.get("image_grid_thw"),
        arguments.get("video_grid_thw"),
        arguments["attention_mask"],
        arguments.get("use_audio_in_video", False),
        lengths,
        arguments.get("video_second_per_grid"),
    )
    assert torch.equal(torch.from_numpy(prompt.inputs.positions), positions[:, 0].long())
    assert prompt.inputs.next_position == len(prompt.inputs.token_ids) + int(deltas[0])


def test_fp32_logits_are_those_of_transformers(thinkers, prompts, truths, make_runner):
    for name, prompt, truth in zip(PROMPTS, prompts, truths, strict=True):
        (ours,) = logits_of(make_runner(thinkers(torch.float32)), [prompt])
        assert relative(ours, truth) < 1e-4, name


def test_bf16_is_as_close_to_the_truth_as_transformers(thinkers, prompts, truths, error_of_transformers, make_runner):
    errors = []
    for prompt, truth in zip(prompts, truths, strict=True):
        runner = make_runner(thinkers(torch.bfloat16), dtype=torch.bfloat16)
        (logits,) = logits_of(runner, [prompt], dtype=torch.bfloat16)
        errors.append(logits - truth)
    assert rms(torch.cat(errors)) <= 1.25 * error_of_transformers


def test_together_and_in_chunks_as_alone(thinkers, prompts, make_runner, dtype):
    """Bit for bit, recorded and replayed too."""
    model = thinkers(dtype)
    alone = [logits_of(make_runner(model, dtype=dtype), [prompt], dtype=dtype)[0] for prompt in prompts]
    for chunk_size, replay in ((1000, False), (7, True)):
        runner = make_runner(model, replay=replay, dtype=dtype)
        for ours, want in zip(logits_of(runner, prompts, chunk_size, dtype), alone, strict=True):
            assert torch.equal(ours, want)


@pytest.fixture(scope="module")
def of_ranks(whole, prompts):
    """Answers and logits of a number of ranks."""
    some = [tiny.in_dtype(prompts[list(PROMPTS).index(name)].inputs, torch.float32) for name in SPLIT]
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

    def computed(size):
        ranks = RankThreads(whole[1], torch.float32, size)
        try:
            core = Recorded(ranks.model, torch.float32, ranks=ranks.session())
            return core.to(some, greedy), core.logits
        finally:
            ranks.close()

    return computed


SPLIT = ("short sound", "windows", "two with their sounds and a sound", "mixed")


def test_ranks_compute_what_one_does(of_ranks):
    """Two and three of them: of five heads they have three and two, or two, two and one."""
    expected_tokens, expected_logits = of_ranks(1)
    for size in (2, 3):
        tokens, logits = of_ranks(size)
        assert tokens == expected_tokens
        for ours, theirs in zip(logits, expected_logits, strict=True):
            assert (ours - theirs).norm() <= 2e-5 * theirs.norm()


def test_greedy_answers_are_those_of_transformers(whole, prompts, of_ranks):
    tokens, _ = of_ranks(1)
    for name, ours in zip(SPLIT, tokens, strict=True):
        arguments = dict(prompts[list(PROMPTS).index(name)].arguments)
        hf = whole[0].thinker
        hf.model.rope_deltas = None
        with torch.no_grad():
            theirs = hf.generate(**arguments, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert theirs[0, arguments["input_ids"].shape[1] :].tolist() == ours, name
