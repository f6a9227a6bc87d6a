"""An engine for strangers: its media are decoded elsewhere, within limits, with the same answers."""

import io
import os

import numpy as np
import pytest
import tiny_checkpoint
from clips import write_clip
from PIL import Image

import tilewright
from tilewright.inputs.media import MediaLimits
from tilewright.process import child
from tilewright.types import RequestError

OPTIONS = {"dtype": "float32", "kv_memory": "20MB", "max_context": 512, "pack_cache": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint.write_vision_model(tmp_path_factory.mktemp("vision"))


def png(seed=0):
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (40, 56, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def about(kind, source):
    return [{"role": "user", "content": [{"type": kind, kind: source}, {"type": "text", "text": "What is it?"}]}]


def test_answers_do_not_depend_on_who_decodes(folder, tmp_path):
    questions = [about("image", png()), about("video", write_clip(tmp_path / "a.mp4", 8, fps=4))]
    with tilewright.Engine(folder, **OPTIONS) as engine:
        expected = [engine.chat(question, max_tokens=8).token_ids for question in questions]
    with tilewright.Engine(folder, isolate_media=True, **OPTIONS) as engine:
        assert [engine.chat(question, max_tokens=8).token_ids for question in questions] == expected
        (pid,) = [process.pid for process in engine._opener.pool._idle]
        assert engine.chat(questions[0], max_tokens=8).token_ids == expected[0]
    assert not os.path.exists(f"/proc/{pid}")


def test_what_harms_a_decoder_leaves_the_engine_at_work(folder, monkeypatch):
    attack = (
        "import sys; sys.path[:] = sys.argv[2:]; import ctypes; import tilewright.inputs.isolation.main as m; "
        "from tilewright.process.child import main; "
        "real = m.read_image; "
        "m.read_image = lambda data, *rest: ctypes.string_at(0) if data == b'attack' else real(data, *rest); main()"
    )
    monkeypatch.setattr(child, "BOOT", attack)
    limits = MediaLimits(allow_paths=False, max_pixels=3000, max_items=2)
    with tilewright.Engine(folder, isolate_media=True, media_limits=limits, **OPTIONS) as engine:
        handles = [engine.submit_chat(about("image", source), max_tokens=4) for source in (png(), b"attack", png(1))]
        assert len(handles[0].result()[0].token_ids) == len(handles[2].result()[0].token_ids) == 4
        with pytest.raises(
            RequestError, match="image 1: cannot be decoded: the process that decoded it died of SIGSEGV"
        ):
            handles[1].result()
        for source, message in [
            ("/etc/hostname", "image 1: files are not read here"),
            (np.zeros((60, 60, 3), np.uint8), "image 1: 60 x 60 = 3600 pixels, the limit is 3000"),
        ]:
            with pytest.raises(RequestError, match=message):
                engine.chat(about("image", source), max_tokens=4)
        assert engine.chat(about("image", png(2)), max_tokens=4).num_prompt_tokens > 0
