"""`tilewright image`: files with their settings, names on stdout alone, and errors in one line."""

import json

import numpy as np
import pytest
from PIL import Image
from tiny_pipelines import z_image_pipeline

from tilewright import Diffusion, cli
from tilewright.weights import embedded

FLAGS = ["--size", "24x20", "--steps", "3", "--no-pack-cache"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image_command") / "tiny-z"
    z_image_pipeline(folder)
    return str(folder)


def test_an_image_that_carries_its_settings(model, tmp_path, capsys):
    path = tmp_path / "cat.png"
    assert cli.main(["image", "a cat", "-m", model, "-o", str(path), "--seed", "7", *FLAGS]) == 0
    said = capsys.readouterr()
    assert said.out == f"{path}\n"
    assert (
        "tiny-z: 24 x 20, 3 steps, seed 7" in said.err
        and "estimated" in said.err
        and "a step takes" in said.err
        and "decoding" in said.err
    )
    image = Image.open(path)
    settings = json.loads(image.info["parameters"])
    assert settings.pop("model") == "tiny-z" and settings["seed"] == 7
    with Diffusion(model, pack_cache=False) as diffusion:
        again = diffusion.generate(**settings).images[0]
    assert np.array_equal(np.asarray(image), np.asarray(again))


def test_several_images_have_numbers(model, tmp_path, capsys):
    path = tmp_path / "cat.webp"
    arguments = ["image", "a cat", "-m", model, "-o", str(path), "-n", "2", "--seed", "4", "-q", *FLAGS]
    assert cli.main(arguments) == 0
    said = capsys.readouterr()
    assert said.out.split() == [str(tmp_path / "cat-1.webp"), str(tmp_path / "cat-2.webp")] and said.err == ""
    assert Image.open(tmp_path / "cat-2.webp").size == (24, 20)


def test_sides_guidance_and_negative(model, tmp_path, capsys):
    path = tmp_path / "cat.png"
    arguments = ["--width", "20", "--height", "24", "--steps", "2", "--guidance", "2.5", "--negative", "a dog"]
    more = ["--guidance-interval", "0-0.5", "--step-cache", "0.1", "--low-memory", "--no-pack-cache", "-q"]
    assert cli.main(["image", "a cat", "-m", model, "-o", str(path), *arguments, *more]) == 0
    settings = json.loads(Image.open(path).info["parameters"])
    assert (settings["width"], settings["height"], settings["guidance"]) == (20, 24, 2.5)
    assert settings["negative_prompt"] == "a dog" and settings["guidance_interval"] == [0.0, 0.5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "23x20"], "width is 23, expected a multiple of 4: 20 or 24, say"),
        (["--size", "24x20", "--width", "24"], "--size sets width and height"),
        (["--steps", "1000"], "num_steps is 1000, expected an integer from 1 to 200"),
        (["--guidance", "nan"], "guidance is nan, expected a number"),
        (["--image", "nothing.png"], "--image nothing.png: there is no such file"),
        (["-o", "cat.bmp"], "--output is cat.bmp, expected a name that ends in .png"),
        (["-o", "nowhere/cat.png"], "--output is nowhere/cat.png, but there is no folder nowhere"),
        (["-m", "./nothing"], "./nothing does not exist"),
        (["-m", "."], "has no model_index.json"),
    ],
)
def test_errors_are_one_line(model, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["image", "a cat", "-m", model, *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and message in said.err and len(said.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_an_empty_prompt(model, capsys):
    assert cli.main(["image", "", "-m", model]) == 2
    assert "the prompt is empty" in capsys.readouterr().err


def test_sizes_that_are_none(capsys):
    with pytest.raises(SystemExit):
        cli.main(["image", "a cat", "--size", "large"])
    assert "'large' is not a size, expected one such as 1024x768" in capsys.readouterr().err


def test_without_a_model_the_embedded_one_draws(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(embedded._folders(), "tiny_draw", embedded.Path(model))
    path = tmp_path / "cat.jpg"
    assert cli.main(["image", "a cat", "-o", str(path), *FLAGS]) == 0
    assert "no model named: using the embedded tilewright-tiny-draw" in capsys.readouterr().err
    assert Image.open(path).format == "JPEG"


def test_without_a_model_and_without_an_embedded_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(embedded._folders(), "tiny_draw", tmp_path)
    assert cli.main(["image", "a cat"]) == 2
    told = capsys.readouterr().err
    assert "name a folder in diffusers' layout" in told and "using the embedded" not in told
