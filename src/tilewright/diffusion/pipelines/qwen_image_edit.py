"""Qwen-Image-Edit: Qwen2.5-VL reads the prompt with the images, whose latents are rows beside the generated one's.

The later releases (Edit-Plus) accept several images, and show smaller ones to the text encoder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tilewright.diffusion.components import Components
from tilewright.diffusion.params import GenerationParams, Limits, size_of_area
from tilewright.diffusion.pipeline import as_tensor, rgb_images
from tilewright.diffusion.pipelines.qwen_image import (
    MAX_TEXT_TOKENS,
    PATCH,
    QwenImage,
    QwenImageConditioning,
    patches_of,
)
from tilewright.diffusion.prompts import check_length
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.models import qwen2_5_vl
from tilewright.models.qwen2_5_vl import SeeingEncoder, WindowedVisionConfig
from tilewright.models.qwen3_vl.preprocessing import image_size, read_preprocessing
from tilewright.models.qwen_image import References
from tilewright.ops import backend
from tilewright.types import RequestError

TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
IMAGE_TOKENS = "<|vision_start|><|image_pad|><|vision_end|>"
NUM_TEMPLATE_TOKENS = 64  # before the first image: not passed to the transformer
AREA = 1024 * 1024  # of the generated image, and of the VAE's inputs
SEEN_AREA = 384 * 384  # of the text encoder's inputs in Edit-Plus; the first release uses AREA
MAX_IMAGES = 3  # of Edit-Plus, as in training


class QwenImageEdit(QwenImage):
    BUILDERS: ClassVar = {**QwenImage.BUILDERS, "text_encoder": qwen2_5_vl.build}

    def __init__(self, components: Components) -> None:
        self.takes_several = components.class_name == "QwenImageEditPlusPipeline"
        super().__init__(components)
        vision = WindowedVisionConfig.from_dict(components.config("text_encoder")["vision_config"])
        sizes = {
            "patch_size": vision.patch_size,
            "spatial_merge_size": vision.merge_size,
            "temporal_patch_size": vision.temporal_patch_size,
        }
        self.preprocessing = read_preprocessing("image", {"vision_config": sizes}, components.path("processor"))

    def _limits(self) -> Limits:
        return dataclasses.replace(
            super()._limits(),
            default_width=1024,
            default_height=1024,
            takes_image=True,
            needs_image=True,
            image_area=AREA,
            max_prompt_tokens=NUM_TEMPLATE_TOKENS + MAX_TEXT_TOKENS,
        )

    def encode_prompt(self, params: GenerationParams) -> QwenImageConditioning:
        given = rgb_images(params.image, MAX_IMAGES if self.takes_several else 1)
        prompts = [params.prompt] + ([params.negative_prompt or ""] if self.is_guided(params) else [])
        texts = self._encode_seeing(prompts, given)
        with self.components.use("vae") as vae:
            latents = [vae.encode(as_tensor(_resized(one, AREA))).float() for one in given]
        grids = [(one.shape[2] // PATCH, one.shape[3] // PATCH) for one in latents]
        return QwenImageConditioning(texts, References(torch.cat([patches_of(one)[0] for one in latents]), grids))

    def _encode_seeing(self, prompts: Sequence[str], given: Sequence[Image.Image]) -> list[Tensor]:
        """Return hidden states [M, D] of each prompt, with the images' features."""
        tokenizer = self.components.tokenizer()
        seen = [_resized(image, SEEN_AREA if self.takes_several else AREA) for image in given]
        sizes = [image_size(one.height, one.width, self.preprocessing, "image") for one in seen]
        rows = [self._patches(one, size) for one, size in zip(seen, sizes, strict=True)]
        patch = self.preprocessing.patch_size
        grids = [(height // patch, width // patch) for height, width in sizes]
        with self.components.use("text_encoder") as encoder:
            texts = []
            for prompt in prompts:
                ids = self._ids(prompt, grids, tokenizer, encoder)
                states = encoder.encode_seeing(ids, torch.cat(rows).to(backend.device()), grids)
                texts.append(states[NUM_TEMPLATE_TOKENS:].clone())
            return texts

    def _ids(
        self, prompt: str, grids: Sequence[tuple[int, int]], tokenizer: Tokenizer, encoder: SeeingEncoder
    ) -> list[int]:
        """Return the prompt in its template, with as many tokens for each image as it has features."""
        shown = IMAGE_TOKENS
        if self.takes_several:
            shown = "".join(f"Picture {number}: {IMAGE_TOKENS}" for number in range(1, len(grids) + 1))
        ids = tokenizer.encode(TEMPLATE.format(shown + prompt))
        check_length(ids, self.limits.max_prompt_tokens)
        if ids.count(encoder.image_token) != len(grids):
            raise RequestError("the prompt has <|image_pad|>, the token of an image, expected text", param="prompt")
        counts = iter(rows * columns // self.preprocessing.merge_size**2 for rows, columns in grids)
        expanded: list[int] = []
        for token in ids:
            expanded += [token] * next(counts) if token == encoder.image_token else [token]
        return expanded

    def _patches(self, image: Image.Image, size: tuple[int, int]) -> Tensor:
        """Return patches [N, 3 P P], fp32, of the image at that height and width."""
        return self.preprocessing.patches(torch.from_numpy(np.array(image)), size, dtype=torch.float32)


def _resized(image: Image.Image, area: int) -> Image.Image:
    return image.resize(size_of_area(area, image.size), Image.Resampling.LANCZOS)
