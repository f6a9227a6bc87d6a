"""`tilewright demo`: plain where it is piped, colourful where a terminal shows it."""

import contextlib
import io
import re
import wave
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from tiny_checkpoint import write_text_model, write_vision_model

from tilewright import Diffusion, Engine, cli, config
from tilewright.cli import demo
from tilewright.types import RequestError
from tilewright.weights import embedded

FLAGS = ["--max-context", "512", "--kv-memory", "32MB", "--max-tokens", "6"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(autouse=True)
def in_place(model, monkeypatch):
    """The model of random weights in place of the embedded one."""
    monkeypatch.setitem(embedded._folders(), "tiny_vl", model)


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, pack_cache=False, max_context=512, max_sequences=1) as engine:
        yield engine


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def shown_on(terminal, monkeypatch, **variables):
    """What a question's demo writes to a terminal in such an environment."""
    settings = config.resolve(variables, [0])
    monkeypatch.setattr(config, "current", lambda: settings)
    with contextlib.redirect_stdout(terminal):
        assert cli.main(["demo", "Well?", *FLAGS]) == 0
    return terminal.getvalue()


def answered(engine, image, question):
    parts = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    return engine.chat([{"role": "user", "content": parts}], max_tokens=6, temperature=0.0).text


def test_three_questions_about_the_bundled_image(engine, tmp_path, monkeypatch, capsys):
    for other in ("tiny_draw", "tiny_omni"):
        monkeypatch.setitem(embedded._folders(), other, tmp_path)  # as in a package without it
    assert cli.main(["demo", *FLAGS]) == 0
    captured = capsys.readouterr()
    head, *blocks = captured.out.split("\n\n")
    name, path = head.split("\n")
    assert name.startswith(f"{embedded.MODEL_NAME} ready in ")
    assert path == f"{embedded.demo_file('demo.png')} 512x512"
    assert len(blocks) == 3
    for block, question in zip(blocks, demo.QUESTIONS, strict=True):
        text = answered(engine, embedded.demo_file("demo.png"), question)
        assert block.startswith(f"{question}\n{text}\n")
        assert re.fullmatch(
            r"6 tokens, TTFT [\d.]+ m?s, [\d.]+ tokens/s\n?", block.removeprefix(f"{question}\n{text}\n")
        )
    assert "\033" not in captured.out
    assert captured.err.count("\n") == 1 and "Another: -m" in captured.err


def test_then_an_image_is_made_and_looked_at_and_a_spoken_question_answered(engine, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the spoken answer goes
    assert cli.main(["demo", *FLAGS]) == 0
    made, asked, sound, heard, told = capsys.readouterr().out.split("\n\n")[4:]
    assert sound == f"{embedded.demo_file('demo.wav')}\n{embedded.OMNI_NAME}"
    assert heard.startswith("What is said?\nWhat colour is\n6 tokens")
    assert told.startswith("Answer the question.\nThe colour of the\n6 tokens")
    assert demo.SPOKEN_FILE.stat().st_size > 40_000 and str(demo.SPOKEN_FILE) in told
    assert made.startswith(f'tilewright image "{demo.DRAWN}"\n{embedded.DRAWING_NAME} 256x256, ')
    with Diffusion() as diffusion:
        [image] = diffusion.generate(demo.DRAWN, seed=demo.SEED).images
    assert asked.startswith(f"{demo.QUESTION_OF_DRAWN}\n{answered(engine, image, demo.QUESTION_OF_DRAWN)}\n")


class Speaker:
    """In place of an engine: a model that speaks where it is asked to."""

    voices = ("somebody",)
    loaded = SimpleNamespace(name="speaker")

    def __init__(self, *arguments, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit_chat(self, messages, **options):
        spoken = {"audio": np.full(12_000, 0.5, np.float32), "audio_rate": 24_000} if "modalities" in options else {}
        timings = SimpleNamespace(first_token_s=0.1, total_s=0.2)
        completion = SimpleNamespace(token_ids=(1,), timings=timings, **{"audio": None, "audio_rate": None, **spoken})
        return SpokenHandle(completion)


class SpokenHandle(list):
    def __init__(self, completion):
        super().__init__([SimpleNamespace(text="Yes.")])
        self.result = lambda: (completion,)


def test_a_model_with_a_voice_speaks_the_last_answer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tilewright.engine.engine.Engine", Speaker)
    demo._listen(6, demo.Style(False))
    assert capsys.readouterr().out.endswith(f"{demo.SPOKEN_FILE} 0.5 s of speech\n")
    with wave.open(str(tmp_path / demo.SPOKEN_FILE)) as file:
        assert (file.getnframes(), file.getframerate()) == (12_000, 24_000)
    (tmp_path / demo.SPOKEN_FILE).unlink()
    (tmp_path / demo.SPOKEN_FILE).mkdir()
    with pytest.raises(RequestError, match=r"tilewright-answer\.wav cannot be written: "):
        demo._listen(6, demo.Style(False))


def test_another_model_image_and_question(engine, model, tmp_path, capsys):
    image = tmp_path / "mine.png"
    Image.effect_noise((32, 24), 90).save(image)
    assert cli.main(["demo", "What is it?", "-m", str(model), "--image", str(image), *FLAGS]) == 0
    captured = capsys.readouterr()
    assert f"{image} 32x24\n\nWhat is it?\n{answered(engine, image, 'What is it?')}\n6 tokens" in captured.out
    assert not captured.err


def test_colours_where_a_terminal_shows_them(monkeypatch):
    shown = shown_on(Terminal(), monkeypatch)
    assert f"{demo.BOLD}Well?{demo.RESET}\n" in shown
    assert shown.count("▀") == 36 * 36 // 2, "a square image"


def test_no_color(monkeypatch):
    shown = shown_on(Terminal(), monkeypatch, NO_COLOR="1")
    assert "Well?" in shown and "\033" not in shown and "▀" not in shown


def test_a_terminal_without_blocks_gets_no_preview(monkeypatch):
    monkeypatch.setattr(Terminal, "encoding", "latin-1")
    shown = shown_on(Terminal(), monkeypatch)
    assert "▀" not in shown and demo.BOLD in shown


def test_the_preview_has_the_images_colours(monkeypatch):
    monkeypatch.setattr(demo, "PREVIEW_SIZE", (2, 2))
    image = Image.new("RGB", (2, 2))
    for place, colour in {(0, 0): (255, 0, 0), (1, 0): (0, 250, 5), (0, 1): (0, 0, 255), (1, 1): (255,) * 3}.items():
        image.putpixel(place, colour)
    assert demo.preview(image) == "\033[38;5;196;48;5;21m▀\033[38;5;46;48;5;231m▀\033[0m"


@pytest.mark.parametrize(("size", "shown"), [((400, 100), (36, 4)), ((10, 4000), (1, 18)), ((4000, 1), (36, 1))])
def test_the_preview_fits_whatever_the_shape(size, shown):
    lines = demo.preview(Image.new("RGB", size)).splitlines()
    assert (lines[0].count("▀"), len(lines)) == shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--image", "nowhere.png"], "nowhere.png cannot be read: No such file"),
        (["--image", __file__], "not an image that can be read"),
        (["-m", "./nothing/here/now"], "does not exist"),
        (["-m", "TEXT"], "accepts text only"),
    ],
)
def test_users_errors_are_a_line(arguments, words, tmp_path, capsys):
    if "TEXT" in arguments:
        arguments = ["-m", str(write_text_model(tmp_path))]
        capsys.readouterr()
    assert cli.main(["demo", "--no-pack-cache", *arguments, *FLAGS]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("tilewright: ") and words in captured.err and captured.err.count("\n") == 1
