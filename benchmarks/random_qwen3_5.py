"""A Qwen3.5 of a released size with random weights: python benchmarks/random_qwen3_5.py 0.8B FOLDER

`--layers` makes it shallower, `--no-mtp` leaves the multi-token predictor out. Its tokens are bytes, its specials have
their real ids; benchmarks/peers.py and `tilewright serve` take the folder as any checkpoint's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch
from random_checkpoint import byte_tokenizer, write_tensors

from tilewright.models.registry import family_of
from tilewright.weights.spec import iter_weights

DATA = Path(__file__).parents[1] / "tests" / "data"
FIRST_SPECIAL = 248_044
SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
]
# transformers keeps these out of bf16, as released checkpoints do.
FP32 = ("A_log", "linear_attn.norm.weight")


def config_of(size: str, num_layers: int | None) -> dict[str, Any]:
    """The released config, cut off after so many layers."""
    config = json.loads((DATA / "qwen3_5_configs.json").read_text())[size]
    if num_layers is not None:
        text = config["text_config"]
        text["num_hidden_layers"], text["layer_types"] = num_layers, text["layer_types"][:num_layers]
    return config


def shapes_of(config: dict[str, Any], mtp: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by its name."""
    asked = {"mtp.fc.weight": ()} if mtp else {}
    model = family_of(config).build(config, asked)
    return {source.name: source.shape for weight in iter_weights(model) for source in weight.sources}


def chosen_value(name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    """What training starts from, where that is not random: answers are noise, and none is a NaN."""
    if name.endswith("A_log"):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        value = torch.empty(shape).uniform_(0.01, 16, generator=generator).log_()
    elif name.endswith(("dt_bias", "linear_attn.norm.weight")) or ("visual" in name and "norm" in name):
        value = torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
    elif len(shape) == 1:  # biases, and norms that scale by 1 + weight
        value = torch.zeros(shape)
    else:
        return None
    return value if name.endswith(FP32) else value.bfloat16()


def write_files(folder: Path, config: dict[str, Any]) -> None:
    """All but the weights."""
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    special = {token: FIRST_SPECIAL + i for i, token in enumerate(SPECIAL)}
    byte_tokenizer(special, FIRST_SPECIAL).save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    shutil.copyfile(DATA / "qwen3_5.jinja", folder / "chat_template.jinja")
    for kind in ("", "video_"):
        name = f"{kind}preprocessor_config.json"
        shutil.copyfile(DATA / f"qwen3_vl_{name}", folder / name)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [248046, 248044]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", help="0.8B, 2B, 4B, 9B, 27B or 35B-A3B")
    parser.add_argument("folder", type=Path, help="where the checkpoint goes")
    parser.add_argument("--layers", type=int, help="of the text model, a multiple of 4 (default: all)")
    parser.add_argument("--no-mtp", action="store_true", help="without the multi-token predictor")
    arguments = parser.parse_args()
    config = config_of(arguments.size, arguments.layers)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    write_files(arguments.folder, config)
    count = write_tensors(arguments.folder, shapes_of(config, not arguments.no_mtp), chosen_value)
    print(f"{arguments.folder}: {count / 1e9:.2f}B parameters")


if __name__ == "__main__":
    main()
