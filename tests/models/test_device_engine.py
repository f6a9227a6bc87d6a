"""A whole engine whose model is on a device: loop, threads, media buffer, recordings."""

import logging

import pytest
from fake_device import FakeDevice
from PIL import Image

from tilewright import Engine
from tilewright.ops import platform
from tilewright.ops.platform import Platform
from tilewright.weights import embedded

QUESTIONS = ["What is this?", "Which colours are there?", "How many shapes?"]
OPTIONS = {"max_context": 1024, "kv_memory": 64 << 20, "pack_cache": False, "speculate": 0}


def answers(engine):
    picture = Image.open(embedded.demo_file("demo.png")).convert("RGB")
    turns = [picture.rotate(angle) for angle in (0, 90, 180)]
    conversations = [
        [{"role": "user", "content": [{"type": "image", "image": turn}, {"type": "text", "text": question}]}]
        for turn, question in zip(turns, QUESTIONS, strict=True)
    ]
    together = engine.chat(conversations, max_tokens=12, temperature=0.0, ignore_eos=True)
    alone = [engine.chat(item, max_tokens=12, temperature=0.0, ignore_eos=True) for item in conversations]
    return [answer.text for answer in (*together, *alone)]


@pytest.fixture
def device(monkeypatch):
    """What "cuda" is here."""
    place = FakeDevice()
    own = Platform("cuda:0", "torch", "flash", platform.WORKER, False, lambda: 8 << 30, place)
    monkeypatch.setattr(platform, "_cuda", lambda device, backend: own)
    return place


def test_answers_are_those_of_the_host(device, caplog):
    with caplog.at_level(logging.WARNING), Engine(device="cuda", **OPTIONS) as engine:
        found = answers(engine)
        steps = engine.loop.core.runner.model_runner._captured
        assert len(steps) >= 2  # of three sequences, and of one
    with Engine(backend="torch", **OPTIONS) as engine:
        assert found == answers(engine)
    assert sum(tape.num_replays for tape in device.recordings) > 10
    assert device.num_waits == 0
    assert not [record for record in caplog.records if "recorded" in record.getMessage()]
