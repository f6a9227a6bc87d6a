"""docs/models/qwen3_vl.py, the model in plain torch, and the engine agree on the embedded checkpoint."""

import runpy

import pytest
from PIL import Image
from sources import ROOT

from tilewright import Engine
from tilewright.weights import embedded

MAX_TOKENS = 12


@pytest.fixture(scope="module")
def reference():
    return runpy.run_path(str(ROOT / "docs" / "models" / "qwen3_vl.py"), run_name="reference")


@pytest.fixture(scope="module")
def engine():
    with Engine(embedded.path("tiny_vl"), dtype="float32", pack_cache=False) as engine:
        yield engine


@pytest.mark.parametrize("question", ["How many shapes are there?", "What does it say?"])
@pytest.mark.parametrize("size", [None, (300, 190)], ids=["its own size", "resized"])
def test_the_engine_computes_what_the_page_says(reference, engine, question, size, tmp_path):
    image = embedded.demo_file("demo.png")
    if size is not None:
        Image.open(image).resize(size).save(image := tmp_path / "resized.png")
    model = reference["Checkpoint"].open(embedded.path("tiny_vl"))
    ids, log_probs = reference["answer"](model, image, question, MAX_TOKENS)
    content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    ours = engine.chat([{"role": "user", "content": content}], temperature=0, max_tokens=MAX_TOKENS, logprobs=1)
    assert tuple(ids[: len(ours.token_ids)]) == ours.token_ids
    # Resized pixels may differ by one in 255: the kernel rounds after each of its two passes.
    tolerance = 2e-4 if size is None else 0.05
    assert [token.logprob for token in ours.logprobs] == pytest.approx(log_probs[: len(ours.logprobs)], abs=tolerance)
