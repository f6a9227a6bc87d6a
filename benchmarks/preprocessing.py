"""A picture to patches beside transformers' processors, call by call: python benchmarks/preprocessing.py [WxH ...]

The processor on Pillow always; the one on torchvision where it can be imported. All get the decoded picture and the
settings of Qwen3-VL; theirs start from a PIL image, as a server has it after decoding.
"""

import statistics
import sys
from time import perf_counter

import numpy as np
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tilewright.ops.media import patches

SETTINGS = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
}
ROUNDS = 15


def photo(width: int, height: int) -> Image.Image:
    """Waves and noise: neither flat nor sharp everywhere."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    waves = [127 + 90 * np.sin(x / width * 7 + c) * np.cos(y / height * 5 + 2 * c) for c in range(3)]
    picture = np.stack(waves, -1) + rng.normal(0, 8, (height, width, 3))
    return Image.fromarray(np.clip(picture, 0, 255).astype(np.uint8))


def main() -> None:
    rivals = {"Pillow": Qwen2VLImageProcessorPil(**SETTINGS)}
    try:
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

        rivals["torchvision"] = Qwen2VLImageProcessor(**SETTINGS)
    except ImportError:
        print("torchvision cannot be imported: its row is left out", file=sys.stderr)
    for size in sys.argv[1:] or ["1920x1080", "4032x3024"]:
        width, height = (int(number) for number in size.split("x"))
        picture = photo(width, height)
        grid = rivals["Pillow"](picture, return_tensors="pt")["image_grid_thw"][0].tolist()
        target = (grid[1] * 16, grid[2] * 16)
        out = torch.empty(grid[1] * grid[2], 768, dtype=torch.bfloat16)

        def ours(picture=picture, target=target, out=out) -> None:
            pixels = torch.from_numpy(np.array(picture))
            patches(pixels, *target, patch_size=16, merge_size=2, mean=[0.5] * 3, std=[0.5] * 3, out=out)

        calls = {"ours": ours}
        for name, processor in rivals.items():
            calls[name] = lambda processor=processor, picture=picture: processor(picture, return_tensors="pt")
        times: dict[str, list[float]] = {name: [] for name in calls}
        for round_number in range(ROUNDS + 1):
            for name, call in calls.items():
                begin = perf_counter()
                call()
                if round_number:  # the first one warms up
                    times[name].append(perf_counter() - begin)
        medians = {name: statistics.median(values) for name, values in times.items()}
        line = f"{size} to {target[1]}x{target[0]}: ours {medians['ours'] * 1e3:.2f} ms"
        for name in rivals:
            line += f"; {name} {medians[name] * 1e3:.1f} ms, {medians[name] / medians['ours']:.1f} x"
        print(line)


if __name__ == "__main__":
    main()
