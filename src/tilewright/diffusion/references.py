"""Pictures that a request gives to be edited, made to fit a model that reads their latents beside its own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tilewright.ops import backend
from tilewright.types import RequestError

MIN_SIDE = 64
MAX_RATIO = 8  # of the longer side to the shorter


def pictures(given: Any, most: int) -> list[Image.Image]:
    """The picture or pictures of a request as RGB, checked; none for None."""
    found = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    if len(found) > most:
        raise RequestError(f"image has {len(found)} pictures, expected at most {most}", param="image")
    for picture in found:
        if not isinstance(picture, Image.Image):
            raise RequestError(f"image is a {type(picture).__name__}, expected a PIL picture", param="image")
        size = f"image is {picture.width} x {picture.height}"
        if min(picture.size) < MIN_SIDE:
            raise RequestError(f"{size}, expected sides of at least {MIN_SIDE} pixels", param="image")
        if max(picture.size) > MAX_RATIO * min(picture.size):
            raise RequestError(f"{size}, expected sides of at most {MAX_RATIO} to 1", param="image")
    return [picture.convert("RGB") for picture in found]


def fitted(picture: Image.Image, max_pixels: int, multiple: int) -> Tensor:
    """The picture, smaller if it has more pixels, without the margins that exceed the multiple: [1, 1, H, W, 3]."""
    if picture.width * picture.height > max_pixels:
        scale = math.sqrt(max_pixels / (picture.width * picture.height))
        size = int(picture.width * scale), int(picture.height * scale)
        picture = picture.resize(size, Image.Resampling.LANCZOS)
    width, height = (side // multiple * multiple for side in picture.size)
    left, top = (picture.width - width) // 2, (picture.height - height) // 2
    return as_tensor(picture.crop((left, top, left + width, top + height)))


def as_tensor(picture: Image.Image) -> Tensor:
    """fp32 [1, 1, H, W, 3] in [-1, 1], where it is computed with."""
    return (torch.from_numpy(np.array(picture))[None, None].float() / 127.5 - 1).to(backend.device())
