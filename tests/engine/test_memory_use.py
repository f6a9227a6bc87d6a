"""What a process holds for a model: the packed weights once, keys and values that were written, and little else."""

import json
import subprocess
import sys

import pytest
import tiny_checkpoint
import torch
import transformers

from tilewright.engine.kv.pages import PagePool
from tilewright.engine.measure.memory import MemoryUse

MIB = 2**20
# Huge pages of keys and values that are partly used, plans, the tokenizer; a second copy of any weights is far more.
SLACK_BYTES = 32 * MIB
pytestmark = pytest.mark.slow

# Loads a tiny model first: what Python, torch and the engine's threads take is there before the other one comes.
CHILD = """
import json, sys
from tilewright import Engine
from tilewright.engine.measure.memory import read_resident
tiny, large, quantize, caches = sys.argv[1:]
options = {"kv_memory": "64MB", "max_context": 1024, "dtype": "bfloat16", "speculate": 0}
def answer(model, quantize, **more):
    engine = Engine(model, quantize=quantize, **options, **more)
    engine.generate(prompt_token_ids=[7] * 600, max_tokens=3, temperature=0, ignore_eos=True)
    return engine
answer(tiny, None, pack_cache=False).close()
before = read_resident()
with answer(large, quantize, pack_cache=caches == "yes") as engine:
    memory = engine.memory()
    now = read_resident()
    found = vars(memory) | {"other_bytes": memory.other_bytes, "from_cache": engine.loaded.report.from_cache}
print(json.dumps(found | {"grown": now.total - before.total, "grown_file": now.file - before.file}))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny model, and one of 48M weights."""
    tiny = tiny_checkpoint.write_text_model(tmp_path_factory.mktemp("tiny"))
    large = tmp_path_factory.mktemp("large")
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 4,
        "vocab_size": tiny_checkpoint.VOCAB,
    }
    config = transformers.Qwen3Config(**{**tiny_checkpoint.TEXT, **sizes}, head_dim=32, tie_word_embeddings=True)
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).bfloat16().save_pretrained(large)
    tiny_checkpoint.write_tokenizer(large)
    return tiny, large


def measured(models, quantize, caches, monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    arguments = [str(models[0]), str(models[1]), quantize, "yes" if caches else "no"]
    done = subprocess.run([sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("quantize, caches", [("none", False), ("int8", True)])
def test_a_process_holds_the_packed_weights_once(models, quantize, caches, monkeypatch, tmp_path):
    """Packed now and not kept; packed now and kept, then mapped from what was kept."""
    for from_cache in (False, True)[: 1 + caches]:
        found = measured(models, quantize, caches, monkeypatch, tmp_path)
        assert found["from_cache"] is from_cache
        weights = found["weight_bytes"]
        assert weights > (1.5 if quantize == "none" else 0.8) * SLACK_BYTES, "a second copy must show"
        known = weights + found["kv_bytes_touched"] + found["scratch_bytes"]
        assert weights < found["grown"] < 1.1 * known + SLACK_BYTES
        assert found["mapped_weight_bytes"] == (weights if from_cache else 0)
        if from_cache:
            assert found["grown_file"] > 0.95 * weights
        else:
            assert found["grown_file"] < SLACK_BYTES, "the checkpoint's pages are let go"


def test_pages_that_were_never_handed_out_are_not_counted():
    pool = PagePool(8)
    first, second = pool.allocate(), pool.allocate()
    assert pool.num_touched == 2
    pool.release([first, second])
    pool.allocate()
    assert pool.num_touched == 2 and pool.num_used == 1


def test_what_is_resident_is_told_by_kind():
    """In a process of its own, where nothing that tests before left behind is freed meanwhile."""
    imports = "from tilewright.engine.measure.memory import read_resident;"
    code = f"{imports} a = read_resident(); held = b'1' * {64 * MIB}; b = read_resident(); print(*a, *b)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    total, file, total_then, file_then = map(int, done.stdout.split())
    # Pages of files may be taken back by the system at any time, and are no part of what was allocated.
    assert 60 * MIB < (total_then - file_then) - (total - file) < 80 * MIB
    assert 0 < file_then < total_then


def test_other_bytes_are_what_is_left():
    use = MemoryUse(100, 0, 50, 10, 20, 5, 1, 200, 60)
    assert use.other_bytes == 200 - 100 - 20 - 5 - 1
    assert "resident in all" in use.as_text()
