"""Greedy answers of real checkpoints beside transformers': python benchmarks/real_weights.py MODEL [...]

MODEL is a GGUF file, or stories15M's .npz with its tokenizer.model.np beside it. In fp32, both of the same numbers, 64
tokens on 10 prompts; prints the texts and exits with 1 when one differs. Needs transformers and gguf.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

import tilewright

NUM_TOKENS = 64
PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "One day, a little girl named Lily",
    "The best way to learn a language is",
    "Tom had a red ball.",
    "Water boils at",
    "In the morning the cat",
    "A good friend is someone who",
    "The sun was shining and",
    "My favourite animal is the",
]
STORIES_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def stories_as_gguf(path: Path, folder: Path) -> Path:
    """stories15M as a GGUF file. Its q and k rows are interleaved, as that format has them for Llama."""
    stored = np.load(path)
    vocabulary = json.loads(path.with_name("tokenizer.model.np").read_text())
    tokens = [token.replace(" ", "▁") for token in vocabulary["tokens"]]
    tokens[3:259] = [f"<0x{byte:02X}>" for byte in range(256)]
    result = folder / "stories15M.gguf"
    writer = gguf.GGUFWriter(result, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(288)
    writer.add_block_count(6)
    writer.add_feed_forward_length(768)
    writer.add_head_count(6)
    writer.add_head_count_kv(6)
    writer.add_rope_dimension_count(48)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(vocabulary["scores"])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    outer = {"model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm"}
    for name in stored.files:
        part = name.removesuffix(".weight")
        if part in outer:
            new = outer[part]
        else:
            _, _, layer, *rest = part.split(".")
            new = f"blk.{layer}.{STORIES_NAMES['.'.join(rest)]}"
        writer.add_tensor(f"{new}.weight", stored[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return result


@torch.inference_mode()
def expected_tokens(network: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    network.generation_config.eos_token_id = None
    result = network.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS
    )
    return result[0, len(prompt) :].tolist()


def num_different(path: Path) -> int:
    """Prompts whose answers differ, of a GGUF file."""
    network = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    different = 0
    with tilewright.Engine(path, dtype="float32", kv_memory="200MB", pack_cache=False) as engine:
        tokenizer = engine.loaded.tokenizer
        for prompt in PROMPTS:
            ids = tokenizer.encode(prompt, add_special_tokens=True)
            ours = engine.generate(prompt_token_ids=ids, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
            theirs = expected_tokens(network, ids)
            same = list(ours.token_ids) == theirs
            different += not same
            print(f"{'same' if same else 'DIFFERENT'}  {prompt!r} -> {ours.text[:90]!r}")
            if not same:
                print(f"           {tokenizer.decode(theirs)[:90]!r}")
    return different


def main() -> int:
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or sys.exit(__doc__):
            path = Path(name)
            print(path.name)
            different += num_different(stories_as_gguf(path, Path(folder)) if path.suffix == ".npz" else path)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
