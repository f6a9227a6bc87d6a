"""FLUX.1 schnell, dev and Kontext: T5 encodes the prompt, CLIP pools it, text and image are one sequence."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tilewright.diffusion.components import Components
from tilewright.diffusion.params import GenerationParams, Limits
from tilewright.diffusion.pipeline import (
    OnStep,
    Pipeline,
    as_tensor,
    denoise_loop,
    given_latents,
    noise,
    rgb_images,
    to_pixels,
)
from tilewright.diffusion.prompts import TextCache, check_length, cut, padded
from tilewright.diffusion.schedule import euler, flow_match_schedule, linear_sigmas, shift_for
from tilewright.layers.memory import StepCache
from tilewright.models import flux
from tilewright.models.autoencoder_kl import patchify, unpatchify
from tilewright.models.flux import FluxConfig, grid_positions
from tilewright.models.registry import build_vae
from tilewright.models.text_encoders import clip, t5

_log = logging.getLogger(__name__)

NUM_TEXT = 512  # tokens that the transformer reads, padding included, as in training
PATCH = 2  # latent pixels along a side of a token
# Sizes of the images that Kontext was trained to edit: the one of the nearest shape is used.
KONTEXT_SIZES = (
    *((672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104)),
    (1024, 1024),
    *((1104, 944), (1184, 880), (1248, 832), (1328, 800), (1392, 752), (1456, 720), (1504, 688), (1568, 672)),
)


@dataclass(frozen=True)
class FluxConditioning:
    states: Tensor  # [NUM_TEXT, D] of T5
    pooled: Tensor  # [D] of CLIP
    reference: Tensor | None  # latents [1, 1, h, w, C] of the image to edit


class Flux(Pipeline):
    BUILDERS: ClassVar = {
        "text_encoder": clip.build,
        "text_encoder_2": t5.build,
        "transformer": flux.build,
        "vae": build_vae,
    }

    def __init__(self, components: Components) -> None:
        super().__init__(components)
        self.scheduler = components.config("scheduler")
        self.config = FluxConfig.from_dict(components.config("transformer"))
        self.vae_factor = 2 ** (len(components.config("vae")["block_out_channels"]) - 1)
        self.max_clip_tokens = int(components.config("text_encoder").get("max_position_embeddings", 77))
        self.clip_tokenizer = components.tokenizer("tokenizer")
        self.t5_tokenizer = components.tokenizer("tokenizer_2")
        self.texts = TextCache()
        is_told = self.config.is_told_guidance
        self.limits = components.with_defaults(
            Limits(
                size_multiple=self.vae_factor * PATCH,
                default_width=1024,
                default_height=1024,
                default_steps=28 if is_told else 4,
                default_guidance=3.5 if is_told else 0.0,
                max_prompt_tokens=NUM_TEXT,
                takes_image=components.class_name == "FluxKontextPipeline",
                takes_negative_prompt=False,
            )
        )

    def is_guided(self, params: GenerationParams) -> bool:
        return False  # guidance is an input of the transformer, which computes once

    def encode_prompt(self, params: GenerationParams) -> FluxConditioning:
        if params.guidance and not self.config.is_told_guidance:
            _log.warning("guidance %g is ignored: this model was distilled to need none", params.guidance)
        reference = self._reference(params.image)
        ((states, pooled),) = self.texts.encode([params.prompt], self._encode)
        return FluxConditioning(states, pooled, reference)

    def _encode(self, texts: list[str]) -> list[tuple[Tensor, Tensor]]:
        t5_ids = [self.t5_tokenizer.encode(text, add_special_tokens=True) for text in texts]
        for ids in t5_ids:
            check_length(ids, NUM_TEXT)
        clip_ids = [self.clip_tokenizer.encode(text, add_special_tokens=True) for text in texts]
        # CLIP's input ends at the first end token: padding after it would change nothing.
        clip_ids = [cut(ids, self.max_clip_tokens, self.clip_tokenizer, "CLIP") for ids in clip_ids]
        with self.components.use("text_encoder") as encoder:
            pooled = encoder.pool(clip_ids)
        with self.components.use("text_encoder_2") as encoder:
            states = encoder.encode([padded(ids, NUM_TEXT, self.t5_tokenizer) for ids in t5_ids])
        return list(zip(states, pooled, strict=True))

    def _reference(self, given: Any) -> Tensor | None:
        found = rgb_images(given, most=1)
        if not found:
            return None
        image = found[0]
        multiple = self.vae_factor * PATCH
        ratio = image.width / image.height
        width, height = min(KONTEXT_SIZES, key=lambda size: abs(ratio - size[0] / size[1]))
        size = width // multiple * multiple, height // multiple * multiple
        with self.components.use("vae") as vae:
            return vae.encode(as_tensor(image.resize(size, Image.Resampling.LANCZOS))).float()

    def init_latents(self, params: GenerationParams) -> Tensor:
        height, width = params.height // self.vae_factor, params.width // self.vae_factor
        grid, channels = (height // PATCH, width // PATCH), self.config.out_channels
        if params.latents is not None:
            return _latents(given_latents(params, (grid[0] * grid[1], channels)), grid)
        return noise((channels // PATCH**2, height, width), params.seeds).permute(0, 2, 3, 1)[:, None].contiguous()

    def denoise(
        self, latents: Tensor, conditioning: FluxConditioning, params: GenerationParams, on_step: OnStep
    ) -> Tensor:
        n, grid = len(latents), (latents.shape[2] // PATCH, latents.shape[3] // PATCH)
        num_tokens = grid[0] * grid[1]
        mu = shift_for(num_tokens, self.scheduler)
        schedule = flow_match_schedule(self.scheduler, params.num_steps, mu=mu, sigmas=linear_sigmas(params.num_steps))
        text = flux.FluxText(conditioning.states.expand(n, -1, -1), conditioning.pooled.expand(n, -1))
        positions, reference = grid_positions(0, *grid), None
        if conditioning.reference is not None:
            _, _, rows, columns, _ = conditioning.reference.shape
            positions = torch.cat([positions, grid_positions(1, rows // PATCH, columns // PATCH)], dim=1)
            reference = _tokens(conditioning.reference).expand(n, -1, -1)
        guidance = params.guidance if self.config.is_told_guidance else None
        cache = StepCache(params.step_cache)
        with self.components.use("transformer") as transformer:
            layout = transformer.layout(NUM_TEXT, positions, n)

            def predict(index: int, latents: Tensor) -> Tensor:
                tokens = _tokens(latents)
                inputs = tokens if reference is None else torch.cat([tokens, reference], dim=1)
                velocity = transformer(inputs, schedule.timesteps[index], text, layout, guidance, cache)
                return _latents(velocity[:, :num_tokens], grid)

            return denoise_loop(latents, schedule, euler(schedule), predict, on_step)

    def decode(self, latents: Tensor, params: GenerationParams) -> np.ndarray:
        with self.components.use("vae") as vae:
            return np.concatenate([to_pixels(vae.decode(image)) for image in latents.split(1)])

    def exported(self, latents: Tensor) -> Tensor:
        return _tokens(latents)


def _tokens(latents: Tensor) -> Tensor:
    """Return [n, tokens, 4 C] of latents [n, 1, h, w, C], row by row: diffusers' layout."""
    return patchify(latents[:, 0], PATCH).flatten(1, 2)


def _latents(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """Invert `_tokens`."""
    return unpatchify(tokens.unflatten(1, grid), PATCH)[:, None].contiguous()
