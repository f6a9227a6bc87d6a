"""The evaluation of the embedded model, with random weights: what it counts, and that all three ways see the same."""

import json
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw
from tiny_checkpoint import write_vision_model

from tilewright.inputs.media import MediaLimits
from tilewright.inputs.video import read_video
from tilewright.ops.native import kernels
from training.tiny_vl import askers, evaluate, messages
from training.tiny_vl.score import Answer, Share, is_same, plain, shares_by_kind, table


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    kernels.set_num_threads(1)
    yield
    kernels.set_num_threads(0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Random weights stored in bf16, as the embedded model's are."""
    folder = write_vision_model(tmp_path_factory.mktemp("vision"))
    network = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16)
    network.save_pretrained(folder)
    return folder


def image(seed, size=(64, 64)):
    draw = random.Random(seed)
    image = Image.new("RGB", size, (draw.randrange(256), draw.randrange(256), 40))
    for _ in range(4):
        x, y = draw.randrange(size[0]), draw.randrange(size[1])
        ImageDraw.Draw(image).ellipse((x, y, x + 20, y + 14), fill=tuple(draw.randrange(256) for _ in range(3)))
    return image


def item(kind, images=(), clip=(), fps=2.0, answer="Two."):
    return SimpleNamespace(
        kind=kind, images=tuple(images), clip=tuple(clip), fps=fps, question=f"A question of {kind}?", answer=answer
    )


ITEMS = [
    item("text"),
    item("count", [image(1)]),
    item("size", [image(2, (100, 70))]),
    item("two_pictures", [image(3), image(4, (48, 96))]),
    item("clip", clip=[image(seed) for seed in range(7)]),
    item("clip", clip=[image(seed, (32, 32)) for seed in range(9)], fps=3.0),
    item("both", [image(5)], [image(seed) for seed in range(4)], fps=1.5),
]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Two.", "two", True),
        ("  A red  circle.\n", "a red circle", True),
        ("two", "three", False),
        ("two..", "two", False),
        ("", ".", True),
        ("a.b", "ab", False),
    ],
)
def test_what_is_the_same(one, other, same):
    assert is_same(one, other) is same


@given(st.text())
def test_plain_text_stays_or_loses_a_stop(text):
    once = plain(text)
    assert once == once.strip() == " ".join(once.split())
    assert plain(once) in (once, once.removesuffix(".").rstrip())


def test_shares_and_their_table():
    shares = shares_by_kind([("read", True), ("count", True), ("read", False), ("read", True)])
    assert shares == {"count": Share(1, 1), "read": Share(2, 3)}
    assert table(shares, "right").splitlines() == [
        "kind      right   count",
        "count    100.0%       1",
        "read      66.7%       3",
        "all       75.0%       4",
    ]


@pytest.mark.parametrize("fps", [1.0, 1.5, 2.0, 3.0, 24.0, 29.97])
@pytest.mark.parametrize("size", [(64, 64), (33, 47)])
def test_clips_lose_nothing_on_their_way(size, fps):
    clip = [image(seed, size) for seed in range(6)]
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    clip[3] = Image.fromarray(noise)
    video = read_video(messages.mp4(tuple(clip), fps), "video 1", MediaLimits())
    assert video.num_frames == 6 and video.fps == pytest.approx(fps) and video.times_s is None
    decoded = np.stack(list(video.frames(range(6))))
    assert np.array_equal(decoded, messages.frames(tuple(clip)))


def test_images_come_first_then_the_clip_then_the_question():
    (message,) = messages.for_server(ITEMS[-1])
    assert [part["type"] for part in message["content"]] == ["image_url", "video_url", "text"]
    (message,) = messages.for_engine(ITEMS[3])
    first, second, text = message["content"]
    assert (first["image"], second["image"], text["text"]) == (*ITEMS[3].images, ITEMS[3].question)


def test_server_library_and_transformers_answer_the_same(model, monkeypatch):
    """In fp32, token for token: random weights answer noise, which other frames or positions would change."""
    monkeypatch.setenv("TILEWRIGHT_NUM_THREADS", "1")
    monkeypatch.setattr(askers, "MAX_TOKENS", 24)
    got = []
    for make in (askers.of_own_server, askers.of_engine, askers.of_transformers):
        with make(model, "float32") as ask:
            got.append([answer.got for answer in evaluate.ask_all(ITEMS, len(ITEMS), ask, 3)])
    assert got[0] == got[1] == got[2]
    assert len(set(got[0])) == len(ITEMS), "all are different, so the media are seen"


def test_a_server_that_refuses_is_told(model, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_NUM_THREADS", "1")
    with (
        pytest.raises(RuntimeError, match=r"ended before it answered[\s\S]*does not exist"),
        askers.of_own_server(model / "nothing", "float32"),
    ):
        pass


def test_answers_are_in_order_and_few_are_under_way():
    most, under_way, lock = 0, 0, threading.Lock()
    gates = [threading.Event() for _ in range(20)]

    def ask(asked):
        nonlocal most, under_way
        with lock:
            under_way += 1
            most = max(most, under_way)
        number = int(asked.answer)
        if number % 2 == 0:  # the odd ones overtake
            gates[number].wait(1)
        else:
            gates[number - 1].set()
        with lock:
            under_way -= 1
        return asked.answer

    answers = evaluate.ask_all((item("x", answer=str(number)) for number in range(20)), 20, ask, 4)
    assert [answer.index for answer in answers] == list(range(20))
    assert all(answer.is_right and answer.got == str(answer.index) for answer in answers)
    assert 2 <= most <= 4


def test_an_error_of_one_ends_it():
    def ask(asked):
        raise RuntimeError("it broke")

    with pytest.raises(RuntimeError, match="it broke"):
        evaluate.ask_all(ITEMS, len(ITEMS), ask, 2)


def test_report_and_comparison(tmp_path, capsys):
    ours = [Answer(0, "count", "How many?", "Two.", "two"), Answer(1, "read", "What?", "HELLO", "HALLO")]
    theirs = [ours[0], Answer(1, "read", "What?", "HELLO", "HELLO")]
    assert "read: 'What?' expected 'HELLO', got 'HALLO'" in evaluate.report(ours)
    assert "wrong" not in evaluate.report(theirs)
    paths = [tmp_path / "ours.json", tmp_path / "theirs.json"]
    for path, answers in zip(paths, (ours, theirs), strict=True):
        path.write_text("".join(json.dumps(answer.__dict__) + "\n" for answer in answers))
    assert evaluate.main(["--compare", *map(str, paths)]) == 0
    out = capsys.readouterr().out
    assert "all       50.0%       2" in out
    assert "read: 'What?' expected 'HELLO', got 'HALLO' and 'HELLO'" in out
    paths[1].write_text(json.dumps(ours[0].__dict__))
    with pytest.raises(SystemExit, match="different questions"):
        evaluate.main(["--compare", *map(str, paths)])


def test_many_wrong_ones_are_cut():
    answers = [Answer(number, "x", "?", "right", "wrong") for number in range(evaluate.MAX_SHOWN + 7)]
    assert evaluate.report(answers).endswith("... and 7 more")
