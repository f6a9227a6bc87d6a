"""Images of Z-Image's shape on a device, with random weights, for benchmarks/accelerator.py."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerator_models import fill

from tilewright.diffusion.pipelines.z_image import ZImage
from tilewright.ops.platform import Platform
from tilewright.parallel.group import SingleGroup

QWEN3_4B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
# Shapes that a CPU draws in seconds too, to compare with.
SMALL_TEXT = {**QWEN3_4B, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
SMALL_TRANSFORMER = {"dim": 128, "n_heads": 4, "n_kv_heads": 4, "n_layers": 2, "n_refiner_layers": 1} | {
    "axes_dims": [8, 12, 12],
    "cap_feat_dim": 64,
}
SMALL_VAE = {"block_out_channels": [16, 32, 32, 32], "layers_per_block": 1, "norm_num_groups": 8}


class RandomComponents:
    """What the pipeline asks of its folder, made up."""

    def __init__(self, own: Platform, folder: Path, dtype: torch.dtype, *, is_small: bool) -> None:
        self.group, self.loading_s = SingleGroup(), 0.0
        self._own, self._dtype, self._is_small = own, dtype, is_small
        self._configs = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
        self._configs["text_encoder"] = SMALL_TEXT if is_small else QWEN3_4B
        if is_small:
            self._configs["transformer"] |= SMALL_TRANSFORMER
            self._configs["vae"] |= SMALL_VAE
        self._networks = {}

    def config(self, name):
        return self._configs[name]

    def with_defaults(self, limits):
        return limits

    def dtype(self, name):
        return self._dtype

    def tokenizer(self):
        return SimpleNamespace(chat_template="text", special_tokens={}, added_tokens={})

    def load(self):
        for name, build in ZImage.BUILDERS.items():
            network = self._networks[name] = build(self._configs[name])
            fill(network, self._dtype, None if self._is_small else self._own.place.torch_device)

    @contextlib.contextmanager
    def use(self, name):
        yield self._networks[name]


def make_pipeline(own: Platform, folder: Path, dtype: torch.dtype, *, is_small: bool = False) -> ZImage:
    """The pipeline with a prompt of 64 tokens, whatever it is asked for. Within `backend.use`."""
    components = RandomComponents(own, folder, dtype, is_small=is_small)
    pipeline = ZImage(components)
    components.load()
    pipeline.prompts = SimpleNamespace(ids=lambda text: [3 + 7 * place % 500 for place in range(64)])
    return pipeline
