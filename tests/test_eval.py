"""`tilewright eval`: windows, perplexity, agreement and answers, and what it says of files that cannot be used."""

import json
import math

import pytest
import torch
from PIL import Image
from tiny_checkpoint import write_text_model, write_vision_model

from tilewright import Engine, cli
from tilewright.evaluate import material
from tilewright.evaluate.material import EvalVariant, parse_variants, split
from tilewright.types import RequestError

TEXT = "A tile holds two rows of a page. " * 30


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    return str(write_text_model(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory):
    return str(write_vision_model(tmp_path_factory.mktemp("vision")))


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture
def run(capsys):
    def run_command(*arguments):
        fixed = ["--no-pack-cache", "--max-context", "512", "--kv-memory", "64MB"]
        status = cli.main(["eval", *arguments, *fixed])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run_command


def image_set(folder, answer="yes"):
    for name in ("a.png", "b.png"):
        Image.new("RGB", (32, 32), "red").save(folder / name)
    lines = [
        {"image": "a.png", "question": "What?", "answer": answer, "kind": "plain"},
        {"image": ["a.png", "b.png"], "question": "Which?", "answer": ["no", answer]},
    ]
    (folder / material.FILE_NAME).write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return str(folder)


@pytest.mark.parametrize("beginning", [(), (900, 901)])
@pytest.mark.parametrize(
    ("count", "length", "stride"), [(100, 32, 16), (100, 32, 7), (31, 32, 16), (2, 8, 1), (33, 32, 31)]
)
def test_every_token_is_scored_once(count, length, stride, beginning):
    if stride >= length - len(beginning):
        stride = length - len(beginning) - 1
    windows = split(range(count), length, stride, beginning)
    scored = [token for window in windows for token in window.token_ids[window.first_scored :]]
    assert scored == list(range(0 if beginning else 1, count))
    for window in windows:
        assert len(window.token_ids) <= length and window.token_ids[: len(beginning)] == beginning
        assert window.first_scored >= 1  # something foretells it
    for window in windows[1:]:  # and as much as the stride leaves
        assert window.first_scored - len(beginning) >= length - len(beginning) - stride


def test_windows_that_cannot_be():
    with pytest.raises(RequestError, match="--stride is 32, expected 1 to 31"):
        split(range(100), 32, 32)
    with pytest.raises(RequestError, match="the text has 1 tokens, expected 2 or more"):
        split([5], 32, 16)


def test_perplexity_is_that_of_the_logits(run, text_model, text_file, tmp_path):
    """With one window over the whole text, computed again from log-probabilities that requests can ask for."""
    out = tmp_path / "eval.json"
    arguments = ("--window", "500", "--stride", "250", "--max-text-tokens", "300", "--speed-rounds", "0")
    status, table, _ = run("-m", text_model, "--text", text_file, "--json", str(out), *arguments)
    (entry,) = json.loads(out.read_text())["formats"]
    with Engine(text_model, pack_cache=False, max_context=512, kv_memory="64MB") as engine:
        ids = engine.loaded.tokenizer.encode(TEXT)[:300]
        beginning = engine.loaded.tokenizer.encode("", add_special_tokens=True)
        found = engine.generate(prompt_token_ids=[*beginning, *ids], max_tokens=1, prompt_logprobs=0)
    values = [one.logprob for one in found.prompt_logprobs if one is not None]
    assert entry["text"]["num_tokens"] == len(values)
    assert math.isclose(entry["text"]["perplexity"], math.exp(-sum(values) / len(values)), rel_tol=1e-4)
    assert status == 0 and f"{entry['text']['perplexity']:.4f}" in table and "KL" not in table


def test_a_format_is_compared_with_the_reference(run, text_model, text_file, tmp_path):
    out, plot = tmp_path / "eval.json", tmp_path / "eval.png"
    arguments = ("--quantize", "f32,none,int8,int4,f32/int8", "--window", "64", "--stride", "32", "--speed-rounds", "1")
    status, table, _ = run("-m", text_model, "--text", text_file, "--json", str(out), "--plot", str(plot), *arguments)
    assert status == 0 and "(reference)" in table and Image.open(plot).size[0] > 500
    found = {entry["format"]: entry for entry in json.loads(out.read_text())["formats"]}
    assert list(found) == ["f32", "none", "int8", "int4", "f32/int8"]
    assert found["f32"]["is_reference"] and found["f32"]["text"]["mean_kl"] is None
    same, int8, int4 = (found[name]["text"] for name in ("none", "int8", "int4"))
    assert same["mean_kl"] == 0 and same["same_top_1"] == 1  # this checkpoint is in fp32
    assert 0 < int8["mean_kl"] < int4["mean_kl"] and int4["same_top_1"] < int8["same_top_1"] <= 1
    assert 0 < found["f32/int8"]["text"]["mean_kl"] < int4["mean_kl"]
    assert found["int4"]["weight_bytes"] < found["int8"]["weight_bytes"] < found["f32"]["weight_bytes"]
    assert found["f32/int8"]["kv_bytes_per_token"] < found["f32"]["kv_bytes_per_token"] / 3
    assert all(entry["tokens_per_s"]["decode"] > 0 for entry in found.values())


def test_divergence_is_that_of_whole_distributions(text_model):
    from tilewright.evaluate.material import Window
    from tilewright.evaluate.measure import ReferenceRows, TextScore, score_window

    ids = tuple(range(40, 140))
    logits = {}
    options = {"pack_cache": False, "max_context": 512, "kv_memory": "64MB"}
    with Engine(text_model, **options) as plain, Engine(text_model, quantize="int4", **options) as other:
        for engine in (plain, other):
            rows = torch.empty(99, engine.loaded.model.vocab_size)

            def keep(first, part, rows=rows):
                rows[first - 1 : first - 1 + len(part)] = part

            engine.read_logits(ids, keep)
            logits[engine] = rows.double().log_softmax(-1)
        window, score = Window(ids, 60), TextScore()
        score_window(other, window, score, ReferenceRows().read(plain, window))
    p, q = logits[plain][59:], logits[other][59:]
    assert math.isclose(score.mean_divergence, float((p.exp() * (p - q)).sum(-1).mean()), rel_tol=1e-4)
    assert score.num_same == int((p.argmax(-1) == q.argmax(-1)).sum()) and score.num_compared == 40


def test_answers_about_images_are_counted(run, vision_model, tmp_path):
    with Engine(vision_model, pack_cache=False, max_context=512, kv_memory="64MB") as engine:
        image_set(tmp_path)
        first = material.read_questions(tmp_path)[0]
        answer = engine.chat(first.messages, temperature=0.0, max_tokens=4).text
    image_set(tmp_path, answer=answer.upper() + " .")
    out = tmp_path / "eval.json"
    more = ("--max-answer-tokens", "4", "--speed-rounds", "0", "--json", str(out))
    status, table, _ = run("-m", vision_model, "--pictures", str(tmp_path), *more)
    (entry,) = json.loads(out.read_text())["formats"]
    assert status == 0 and "/2" in table and "perplexity" not in table
    assert entry["pictures"]["by_kind"]["plain"] == {"right": 1, "of": 1}


def test_names_of_formats():
    assert EvalVariant("stored").engine_options == {}
    assert EvalVariant("bf16/fp8").engine_options == {"quantize": "none", "dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    assert [one.name for one in parse_variants("none, int8")] == ["none", "int8"]
    for text in ("none,,int8", "none,none", "int8/"):
        with pytest.raises(RequestError, match="--quantize"):
            parse_variants(text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "questions.jsonl:1 is not JSON"),
        ("[]", "is not an object"),
        ('{"image": "none.png", "question": "?", "answer": "a"}', "none.png does not exist"),
        ('{"image": "a.png", "question": "", "answer": "a"}', "question is '', expected text"),
        ('{"image": "a.png", "question": "?", "answer": [1]}', r"answer is \[1\], expected text, or a list"),
        ("", "has no questions"),
    ],
)
def test_a_set_that_cannot_be_asked(line, message, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / material.FILE_NAME).write_text(line)
    with pytest.raises(RequestError, match=message):
        material.read_questions(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to measure"),
        (("--text", "/none.txt"), "--text is /none.txt, which cannot be read"),
        (("--pictures", "/none"), "cannot be read"),
        (("--text", "{text}", "--window", "600"), "--window is 600, expected at most 511"),
        (("--text", "{text}", "--quantize", "int3"), "quantize is 'int3'"),
        (("--text", "{text}", "--quantize", "none/int3"), "kv_cache_dtype is 'int3'"),
        (("--pictures", "{set}"), "accepts no images"),
    ],
)
def test_what_cannot_be_measured_is_told(arguments, message, run, text_model, text_file, tmp_path):
    folder = image_set(tmp_path)
    filled = [argument.format(text=text_file, set=folder) for argument in arguments]
    status, _, errors = run("-m", text_model, "--speed-rounds", "0", *filled)
    assert status == 2 and message in errors
