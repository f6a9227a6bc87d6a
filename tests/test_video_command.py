"""`tilewright video`: a file of the kind that was asked for, its name on stdout alone, and errors in one line."""

import io
import json

import av
import pytest
import tiny_wan
from PIL import Image
from tiny_pipelines import z_image_pipeline

from tilewright import cli

FLAGS = ["--size", "32x16", "--steps", "2", "--no-pack-cache"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("video_command") / "tiny-wan"
    tiny_wan.save(folder)
    return str(folder)


def test_an_mp4_that_carries_its_settings(model, tmp_path, capsys):
    path = tmp_path / "cat.mp4"
    assert cli.main(["video", "a cat", "-m", model, "-o", str(path), "--frames", "5", "--seed", "7", *FLAGS]) == 0
    said = capsys.readouterr()
    assert said.out == f"{path}\n"
    assert "tiny-wan: 32 x 16 x 5 frames, 2 steps, seed 7" in said.err
    assert "decoding" in said.err
    with av.open(io.BytesIO(path.read_bytes())) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height, float(stream.average_rate)) == (32, 16, 16.0)
        assert len(list(container.decode(video=0))) == 5
        settings = json.loads(container.metadata["comment"])
    assert (settings["prompt"], settings["seed"], settings["num_frames"], settings["fps"]) == ("a cat", 7, 5, 16.0)


def test_seconds_and_an_animated_image(model, tmp_path, capsys):
    path = tmp_path / "cat.webp"
    arguments = ["--seconds", "1", "--fps", "8", "-q", *FLAGS]
    assert cli.main(["video", "a cat", "-m", model, "-o", str(path), *arguments]) == 0
    said = capsys.readouterr()
    assert said.out == f"{path}\n"
    assert said.err == ""
    with Image.open(path) as image:
        assert image.n_frames == 9
        image.seek(1)
        image.load()
        assert image.info["duration"] == 125


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--frames", "6"], "num_frames is 6, expected 1 more than a multiple of 4: 5, say"),
        (["--frames", "5", "--seconds", "1"], "--seconds sets the number of frames"),
        (["--seconds", "100"], "--seconds is 100, expected more than 0 and at most 15.1"),
        (["--fps", "nan"], "--fps is nan, expected 1 to 120"),
        (["-o", "cat.avi"], "cat.avi ends in .avi, expected one of .mp4"),
        (["-o", "nowhere/cat.mp4"], "--output is nowhere/cat.mp4, but there is no folder nowhere"),
        (["--size", "30x16"], "width is 30, expected a multiple of 16"),
    ],
)
def test_errors_are_one_line(model, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["video", "a cat", "-m", model, *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert len(said.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_model_of_images_is_told_apart(tmp_path, capsys):
    z_image_pipeline(tmp_path / "tiny-z")
    assert cli.main(["video", "a cat", "-m", str(tmp_path / "tiny-z")]) == 2
    assert "tiny-z makes images, not videos: tilewright image" in capsys.readouterr().err


def test_a_model_must_be_named(capsys):
    assert cli.main(["video", "a cat"]) == 2
    assert "the embedded model makes only stills" in capsys.readouterr().err
