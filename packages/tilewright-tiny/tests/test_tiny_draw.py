"""The recipe of the embedded model that draws: captions are true, sets are apart, and the network is diffusers'."""

from itertools import islice
from random import Random

import torch
from oracle import require

from training.tiny_draw.captions import ASKED, SETS, drawings, random_drawing
from training.tiny_draw.checkpoint import TRANSFORMER
from training.tiny_draw.network import Transformer


def drawn(count):
    rng = Random("recipe")
    return [drawing for drawing in (random_drawing(rng, 256, 256, ASKED) for _ in range(count)) if drawing]


def test_no_two_sets_share_what_a_caption_says():
    contents = {}
    for drawing in drawn(3000):
        assert contents.setdefault(drawing.content, drawing.set_name) == drawing.set_name
    assert set(contents.values()) == {"training", *SETS}


def test_a_set_has_its_own_captions_alone():
    found = list(islice(drawings(Random("a set"), set_name="test"), 50))
    assert {drawing.set_name for drawing in found} == {"test"}


def test_what_is_asked_is_so_in_the_scene():
    for drawing in drawn(600):
        scene = drawing.scene
        for ask in drawing.asks:
            if ask.kind == "relation":
                one, other = scene.shapes
                across, down = one.x - other.x, one.y - other.y
                is_so = {"left of": across < 0, "right of": across > 0, "above": down < 0, "below": down > 0}
                assert next(so for words, so in is_so.items() if words in ask.question)
            if ask.question == "How many shapes are there?":
                assert str(len(scene.shapes)) in ask.answer
        for shape in scene.shapes:
            assert shape.colour.replace("grey", "gray") in drawing.caption.lower().replace("grey", "gray")


def test_the_network_is_that_of_diffusers():
    reference = require("diffusers").ZImageTransformer2DModel.from_config({**TRANSFORMER, "n_layers": 2}).eval()
    torch.manual_seed(0)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    network = Transformer({**TRANSFORMER, "n_layers": 2})
    network.load_state_dict(reference.state_dict())
    latents, captions = torch.randn(2, 8, 14, 12), torch.randn(2, 32, 256)
    t, length = torch.tensor([0.3, 0.7]), 20
    with torch.no_grad():
        found = network(latents, t, captions, (torch.arange(32) >= length).expand(2, 32))
        expected = reference([x[:, None] for x in latents], t, [caption[:length] for caption in captions])[0]
    torch.testing.assert_close(found, torch.stack([x[:, 0] for x in expected]), rtol=1e-4, atol=1e-4)
