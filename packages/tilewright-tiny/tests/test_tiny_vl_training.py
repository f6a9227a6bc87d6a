"""The recipe of the embedded model: what it is shown, the network that is trained, what is kept."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from random import Random

import pytest
import torch

from training.shards import write_weights
from training.tiny_vl import items, train
from training.tiny_vl.batches import NO_TARGET, Encoder, as_pixels, attention_mask, collate, make_batch
from training.tiny_vl.checkpoint import write_configs
from training.tiny_vl.clips import clip_lesson
from training.tiny_vl.items import SHARES, shape_lesson
from training.tiny_vl.network import Network, to_patches
from training.tiny_vl.optimiser import make_optimisers, orthogonalised
from training.tiny_vl.pairs import pair_lesson
from training.tiny_vl.photos import photo_lesson
from training.tiny_vl.shapes import COLOURS
from training.tiny_vl.texts import text_lesson
from training.tiny_vl.validation import score, validation_batches

pytestmark = pytest.mark.long

DIGEST_OF_ITEMS = """
import hashlib
from training.tiny_vl import items

digest = hashlib.sha256()
for item in [*items.validation(40), *items.test(40)]:
    digest.update(f"{item.kind} {item.question} {item.answer}".encode())
    for image in item.images + item.clip:
        digest.update(image.tobytes())
print(digest.hexdigest())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny_vl")
    write_configs(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(folder):
    return Encoder(folder / "tokenizer.json")


def small_network(folder, seed=0):
    """All parts of the real one, narrower."""
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= {"hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 64, "num_heads": 2}
    config["vision_config"] |= {"depth": 4, "deepstack_visual_indexes": [1, 2]}
    config["text_config"] |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    torch.manual_seed(seed)
    network = Network(config)
    with torch.no_grad():  # so that no part is too faint to be noticed
        for parameter in network.parameters():
            parameter.mul_(4) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.2)
    return network


def run(network, batch):
    mask = attention_mask(batch.segments)
    with torch.no_grad():
        return network.logits(
            network(batch.ids, batch.positions, mask, as_pixels(batch.frames, batch.is_clip), batch.slots)
        )


def lesson_of(kind, rng):
    if kind == "clip":
        return clip_lesson(rng, 96, 64, 6, 1)
    return pair_lesson(rng, 64, 96, 1) if kind == "pair" else shape_lesson(rng, 64, 96, 1)


@pytest.mark.parametrize("kind", ["picture", "pair", "clip"])
def test_the_network_is_a_qwen3_vl(kind, folder, encoder, tmp_path):
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    network = small_network(folder)
    for parameter in network.parameters():
        parameter.data = parameter.data.bfloat16().float()
    (tmp_path / "config.json").write_text(json.dumps(network.config))
    write_weights(tmp_path, network.state_dict())
    config = Qwen3VLConfig.from_pretrained(tmp_path)
    theirs = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path, config=config, dtype=torch.float32)
    batch = collate(Quiet(), encoder, [lesson_of(kind, Random(3))])
    length = int((batch.segments[0] >= 0).sum())
    ids = batch.ids[:, :length]
    frames = as_pixels(batch.frames, batch.is_clip)[0]
    grid = torch.tensor([[1, frames.shape[-2] // 16, frames.shape[-1] // 16]])
    patches = to_patches(frames, 16, 2).flatten(0, 1)
    kinds = torch.zeros_like(ids)
    if kind == "clip":
        kinds[ids == network.config["video_token_id"]] = 2
        media = {"pixel_values_videos": patches, "video_grid_thw": grid * torch.tensor([[len(frames), 1, 1]])}
    else:
        kinds[ids == network.config["image_token_id"]] = 1
        media = {"pixel_values": patches, "image_grid_thw": grid.repeat(len(frames), 1)}
    with torch.no_grad():
        expected = theirs(input_ids=ids, mm_token_type_ids=kinds, **media).logits[0]
    torch.testing.assert_close(run(network, batch)[0, :length], expected, rtol=1e-3, atol=1e-3)


class Quiet(Random):
    """Draws neither talk nor a conversation."""

    def random(self):
        return 0.99


def test_questions_about_an_image_do_not_see_each_other(folder, encoder):
    network = small_network(folder)
    lesson = shape_lesson(Random(5), 64, 96, 4)
    both = collate(Quiet(), encoder, [lesson])
    alone = collate(Quiet(), encoder, [type(lesson)(lesson.images, lesson.asks[1:2])])
    second = both.segments[0] == 2
    answer = alone.segments[0] == 1
    assert both.ids[0][second].tolist() == alone.ids[0][answer].tolist()
    torch.testing.assert_close(run(network, both)[0][second], run(network, alone)[0][answer])


def test_items_are_the_same_on_every_run():
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST_OF_ITEMS],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


@pytest.mark.parametrize("name", items.SETS)
def test_the_items_of_a_set_have_their_shares(name):
    kinds = Counter(item.kind for item in items.SETS[name](sum(SHARES.values()) // 10))
    assert set(kinds) == set(SHARES)
    for item in items.SETS[name](20):
        assert bool(item.images) + bool(item.clip) == (item.kind != "text")
        assert item.answer


def test_what_is_read_is_spelled_out(encoder):
    """Words of ours are a token each where they follow a space; what an image shows is single letters."""
    assert len(encoder.ids_of(" circle")) == 1
    assert len(encoder.ids_of('"circle"')) == len('"circle"')
    assert len(encoder.ids_of("<|im_start|>assistant\n")) == 3


@pytest.mark.parametrize("size", [(256, 256), (160, 384), (384, 160)])
def test_images_have_the_size_that_was_asked_for(size):
    for seed, make in enumerate((shape_lesson, text_lesson, photo_lesson, pair_lesson)):
        lesson = make(Random(seed), *size, 5)
        assert all(image.size == size and image.mode == "RGB" for image in lesson.images)
        assert lesson.asks


def test_scattered_labels_are_all_asked_for_by_their_names():
    everything, num_read_by_colour = 99, 0
    lessons = [text_lesson(Random(seed), 256, 256, everything) for seed in range(60)]
    of_labels = [lesson for lesson in lessons if sum(ask.kind == "find" for ask in lesson.asks) > 2]
    assert len(of_labels) >= 8  # a quarter of those that are of texts alone
    for lesson in of_labels:
        told = {ask.question.split('"')[1]: ask.answer for ask in lesson.asks if ask.answer.startswith("The text is")}
        assert f"There are {len(told)}." in [ask.answer for ask in lesson.asks]
        for ask in lesson.asks:
            colours = set(re.findall(r"\w+", ask.question)) & set(COLOURS)
            if ask.kind == "read" and colours:
                assert told[ask.answer.split('"')[1]] == f"The text is {colours.pop()}."
                num_read_by_colour += 1
    assert num_read_by_colour > len(of_labels)


def test_a_batch_is_learned_by_heart(folder, encoder):
    network = Network(small_network(folder).config)
    optimisers = make_optimisers(network, "muon", 3e-3, 0.0, False)
    lessons = [shape_lesson(Random(seed), 64, 96, 2) for seed in range(2)]
    batch = collate(Random(1), encoder, lessons)
    losses = [train.train_step(network, optimisers, batch, "cpu").item() for _ in range(15)]
    assert losses[-1] < 0.5 * losses[0]


def test_every_kind_of_batch_fits(encoder):
    rng, seen = Random(7), set()
    while len(seen) < 3:
        batch = make_batch(rng, encoder, 2)
        seen.add("clip" if batch.is_clip else batch.frames.shape[1])
        assert batch.ids.shape == batch.targets.shape == batch.segments.shape
        assert (batch.targets != NO_TARGET).any(1).all()
        assert as_pixels(batch.frames, batch.is_clip).shape[1] * batch.frames.shape[2] > 0


def test_orthogonalised_matrices_have_equal_singular_values():
    matrices = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalised(matrices).float())
    assert values.min() > 0.5 and values.max() < 1.4


def test_a_perfect_network_would_score_one(folder, encoder):
    """Whoever gives the right token at every place is right; one wrong token makes one answer wrong."""

    class Oracle:
        def __init__(self, miss):
            self.miss = miss

        def __call__(self, ids, positions, mask, frames, slots):
            return ids

        def logits(self, ids):
            following = torch.nn.functional.one_hot(ids.roll(-1, 1), 2048)
            if self.miss:
                following[0] = following[0].roll(1, -1)
            return following

    batches = validation_batches(encoder, 30)
    assert set(score(Oracle(miss=False), batches, "cpu").values()) == {1.0}
    assert min(score(Oracle(miss=True), batches, "cpu").values()) < 1.0


def test_training_scores_itself_on_the_validation_set_alone(folder, tmp_path, monkeypatch):
    seeds = []
    made = items._items
    monkeypatch.setattr(items, "_items", lambda seed, count: seeds.append(seed) or made(seed, count))
    monkeypatch.setattr(train, "NUM_VALIDATION_ITEMS", 20)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    options = train.parse(["--device=cpu", "--workers=0", "--batch-size=2", "--minutes=0", "--no-compile"])
    train.run(options, small_network(folder), tmp_path)
    assert (tmp_path / train.SCORES).exists()
    assert seeds == [items.VALIDATION_SEED]


def test_weights_that_score_higher_are_kept(folder, tmp_path):
    network, other = small_network(folder), small_network(folder, seed=1)
    result = {"validation": {"count": 0.9, "read": 0.8}}
    assert train.keep(tmp_path, network, result)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert not train.keep(tmp_path, other, {"validation": {"count": 0.95, "read": 0.7}})
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert train.keep(tmp_path, other, {"validation": {"count": 0.95, "read": 0.8}})
    assert before != {file.name: file.read_bytes() for file in tmp_path.iterdir()}
