"""The table of served models: which of several a request means by its name and its kind."""

import dataclasses
from types import SimpleNamespace

import pytest
from conftest import ScriptedBackend
from fake_diffusion import LIMITS

from tilewright.server.api.served import Served, ServedImageModel, ServedTextModel
from tilewright.server.http.errors import ApiError
from tilewright.server.http.settings import ServerSettings
from tilewright.types import EngineUnavailable


def text_model(name, accepts=(), voices=(), served_name=None):
    backend = ScriptedBackend(name=name, accepts=accepts)
    backend.model = dataclasses.replace(backend.model, voices=voices)
    return ServedTextModel(backend, admission=None, served_name=served_name)


def image_model(name, limits=None):
    return ServedImageModel(SimpleNamespace(name=name, limits=limits))


PLAIN, OMNI = text_model("plain"), text_model("omni", accepts=("audio",), voices=("bob",))
DRAWING = image_model("drawing", LIMITS)
SERVED = Served([PLAIN, OMNI], [DRAWING, image_model("painting")])


@pytest.mark.parametrize(
    ("name", "kind", "found"),
    [
        (None, "chat", PLAIN),
        ("", "chat", PLAIN),
        ("omni", "chat", OMNI),
        ("owner/omni", "chat", OMNI),
        (None, "speak", OMNI),
        (None, "hear", OMNI),
        ("omni", "hear", OMNI),
    ],
)
def test_the_model_that_a_request_means(name, kind, found):
    assert SERVED.find_text(name, kind) is found


def test_the_model_that_draws():
    assert SERVED.find_image(None) is SERVED.find_image("drawing") is DRAWING
    assert SERVED.find_image("painting").name == "painting" and SERVED.find("painting").name == "painting"


@pytest.mark.parametrize(
    ("find", "status", "words"),
    [
        (lambda: SERVED.find_text("other"), 404, "there is no model 'other' here, only 'plain' or 'omni'"),
        (lambda: SERVED.find_text("drawing"), 404, "'drawing' makes images only, use 'plain' or 'omni'"),
        (lambda: SERVED.find_text("plain", "speak"), 400, "plain does not speak"),
        (lambda: SERVED.find_text("plain", "hear"), 400, "plain accepts text only"),
        (lambda: SERVED.find_image("plain"), 404, "'plain' makes no images here, only 'drawing' or 'painting' does"),
        (lambda: SERVED.find("other"), 404, "there is no model 'other'"),
        (lambda: Served([], [DRAWING]).find_text(None), 404, "makes images only"),
        (lambda: Served([PLAIN]).find_image(None), 404, "without --image-model"),
    ],
)
def test_a_request_that_means_none(find, status, words):
    with pytest.raises(ApiError, match=words) as error:
        find()
    assert error.value.status == status


def test_a_served_name_is_one_more():
    model = text_model("plain", served_name="mine")
    assert all(model.is_meant_by(name) for name in ("plain", "mine")) and not model.is_meant_by("yours")
    assert Served([model]).objects(1, ServerSettings())[0]["id"] == "mine"


def test_an_engine_that_starts_keeps_nobody_from_drawing():
    class Starting(ScriptedBackend):
        @property
        def model(self):
            raise EngineUnavailable("the engine is starting")

        @model.setter
        def model(self, model):
            pass

    served = Served([ServedTextModel(Starting(), admission=None)], [DRAWING])
    assert served.find_image("drawing") is DRAWING
    with pytest.raises(EngineUnavailable):
        served.find_text("drawing")


def test_what_each_can_do():
    plain, omni, drawing, painting = SERVED.objects(7, ServerSettings())
    assert plain["input_modalities"] == plain["output_modalities"] == ["text"] and plain["created"] == 7
    assert omni["input_modalities"] == omni["output_modalities"] == ["text", "audio"] and omni["voices"] == ["bob"]
    assert drawing["output_modalities"] == ["image"] and drawing["limits"]["max_steps"] == LIMITS.max_steps
    assert painting["limits"] is None
