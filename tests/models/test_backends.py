"""Whole models on the torch backend: the logits and answers that the native kernels give."""

import argparse
import logging
from dataclasses import replace

import pytest
import tiny
import tiny_checkpoint
import torch
from core_answers import CoreAnswers
from PIL import Image, ImageDraw
from test_parity import logits_of, prompts_for, relative

from tilewright import Engine, config
from tilewright.flags import engine as engine_flags
from tilewright.ops import backend
from tilewright.types import Constraint, RequestError, SamplingParams
from tilewright.weights import embedded

RUN = ["qwen3_vl", "qwen3_vl_moe", "mllama", "llama", "qwen2_window", "qwen3_moe"]


@pytest.mark.parametrize("name", RUN)
def test_fp32_logits_are_those_of_the_kernels(name, networks, models, make_runner):
    """All prompts in one batch, in chunks that mix prefill and decode."""
    prompts = prompts_for(name, networks(name)[0])
    found = {}
    for backend_name in backend.NAMES:
        with backend.use(backend_name):
            found[backend_name] = logits_of(make_runner(models(name, torch.float32)), prompts, 37)
    for ours, plain in zip(found["native"], found["torch"], strict=True):
        assert relative(plain, ours) < 1e-4


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "mllama", "qwen3_5", "qwen3"])
def test_greedy_answers_are_those_of_the_kernels(name, networks, models):
    """Through scheduler, sampler and drafts: pages, states and pictures of several requests side by side."""
    hf, _ = networks(name)
    prompts = prompts_for(name, hf) if name in tiny.FAMILIES else [tiny.text_prompt(n, n, num_axes=3) for n in (9, 40)]
    prompts = [tiny.in_dtype(prompt.inputs, torch.float32) for prompt in prompts]
    answers = []
    for backend_name in backend.NAMES:
        with backend.use(backend_name):
            core = CoreAnswers(models(name, torch.float32), torch.float32, page_size=32, drafts=2, replay=False)
            answers.append(core.to(prompts, SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.0)))
    assert answers[0] == answers[1]


def picture():
    image = Image.new("RGB", (96, 64), "white")
    ImageDraw.Draw(image).ellipse((24, 8, 72, 56), fill="red")
    return image


def about(image):
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]}]


@pytest.mark.skipif(not embedded.path().is_dir(), reason="the package was built without the embedded model")
def test_the_embedded_model_says_the_same_of_a_picture(caplog):
    """Resized, encoded, prefilled and sampled: greedily with a penalty, drawn by seed, held to a grammar by masks."""
    options = {"dtype": "float32", "kv_memory": "64MB", "max_context": 1024, "max_sequences": 4, "pack_cache": False}
    said = {}
    for backend_name in backend.NAMES:
        caplog.clear()
        with caplog.at_level(logging.INFO), Engine(embedded.path(), backend=backend_name, **options) as engine:
            first = engine.chat(about(picture()), max_tokens=24, temperature=0.0, repetition_penalty=1.05)
            drawn = engine.chat(about(picture()), max_tokens=8, temperature=0.9, top_p=0.9, seed=7, logprobs=2)
            three_digits = Constraint("regex", "[0-9]{3}")
            held = engine.chat(about(picture()), max_tokens=8, temperature=0.0, constraint=three_digits)
            ranks = [item.rank for item in drawn.logprobs]
            said[backend_name] = first.text, first.token_ids, drawn.token_ids, ranks, held.text
        told = [record.message for record in caplog.records if "replay" in record.message]
        assert told == (["replay is for the native backend: steps run op by op on torch"] * (backend_name == "torch"))
        assert backend.active() == "native"  # the caller's thread has what it had
    assert said["native"] == said["torch"] and said["native"][0] and said["native"][-1].isdecimal()


def test_packed_weights_of_one_backend_are_not_read_by_another(tmp_path, monkeypatch):
    """Both entries lie in the cache of one checkpoint, and each start finds its own."""
    folder = tiny_checkpoint.write_text_model(tmp_path / "model")
    settings = replace(config.current(), cache_dir=tmp_path / "cache")
    monkeypatch.setattr(config, "current", lambda: settings)
    options = {"dtype": "float32", "kv_memory": "8MB", "max_context": 128, "max_sequences": 1}
    said, paths = [], []
    for backend_name in (*backend.NAMES, *backend.NAMES):
        with Engine(folder, backend=backend_name, **options) as engine:
            paths.append(engine.loaded.report.cache_path)
            assert engine.loaded.report.from_cache == (len(said) >= 2)
            said.append(engine.generate("abc", max_tokens=6, temperature=0.0).token_ids)
    assert len(set(said)) == 1
    assert paths[0] == paths[2] != paths[1] == paths[3]


def test_a_backend_that_there_is_not(tmp_path):
    with pytest.raises(RequestError, match="backend is 'cuda', expected native or torch"):
        Engine(tmp_path, backend="cuda")


def test_the_flag(capsys):
    parser = argparse.ArgumentParser()
    engine_flags.add_arguments(parser)
    assert engine_flags.engine_options(parser.parse_args(["--backend", "torch"]))["backend"] == "torch"
    assert "backend" not in engine_flags.engine_options(parser.parse_args([]))
    with pytest.raises(SystemExit):
        parser.parse_args(["--backend", "cuda"])
    assert "invalid choice: 'cuda' (choose from" in capsys.readouterr().err
