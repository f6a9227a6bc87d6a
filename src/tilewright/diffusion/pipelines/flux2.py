"""FLUX.2 klein: Qwen3 encodes the prompt, images to edit are tokens beside the generated one."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from tilewright.diffusion.components import Components
from tilewright.diffusion.params import GenerationParams, Limits
from tilewright.diffusion.pipeline import OnStep, Pipeline, denoise_loop, fitted, given_latents, rgb_images, to_pixels
from tilewright.diffusion.prompts import ChatPrompts, TextCache, padded
from tilewright.diffusion.schedule import euler, flow_match_schedule, guided, linear_sigmas
from tilewright.layers.memory import StepCache
from tilewright.models import flux2
from tilewright.models.flux import grid_positions
from tilewright.models.flux2 import Flux2Config
from tilewright.models.registry import build_vae
from tilewright.models.text_encoders import decoder_encoder

_log = logging.getLogger(__name__)

NUM_TEXT = 512  # tokens that the transformer reads, padding included, as in training
HIDDEN_LAYERS = (9, 18, 27)
MAX_REFERENCES = 10
MAX_REFERENCE_PIXELS = 1024 * 1024
# Distance between images on their axis: the generated one is at 0, images to edit follow.
REFERENCE_STRIDE = 10


@dataclass(frozen=True)
class Flux2Conditioning:
    texts: tuple[Tensor, ...]  # [NUM_TEXT, D] of the prompt, then of the negative one if there is guidance
    references: tuple[Tensor, ...]  # latents [1, 1, h, w, C] of the images to edit


class Flux2Klein(Pipeline):
    BUILDERS: ClassVar = {
        "text_encoder": functools.partial(decoder_encoder.build, hidden_layers=HIDDEN_LAYERS),
        "transformer": flux2.build,
        "vae": build_vae,
    }

    def __init__(self, components: Components) -> None:
        super().__init__(components)
        self.scheduler = components.config("scheduler")
        self.config = Flux2Config.from_dict(components.config("transformer"))
        self.is_distilled = bool(components.index.get("is_distilled", False))
        vae = components.config("vae")
        self.vae_factor = 2 ** (len(vae["block_out_channels"]) - 1) * 2  # latents are squares of 2 x 2
        self.tokenizer = components.tokenizer()
        self.prompts = ChatPrompts(self.tokenizer, NUM_TEXT, enable_thinking=False)
        self.texts = TextCache()
        self.limits = components.with_defaults(
            Limits(
                size_multiple=self.vae_factor,
                default_width=1024,
                default_height=1024,
                default_steps=4 if self.is_distilled else 50,
                default_guidance=1.0 if self.is_distilled else 4.0,
                max_prompt_tokens=NUM_TEXT,
                takes_image=True,
                image_pixels=MAX_REFERENCE_PIXELS,
                takes_negative_prompt=not self.is_distilled,
            )
        )

    def is_guided(self, params: GenerationParams) -> bool:
        return params.guidance > 1 and not self.is_distilled

    def encode_prompt(self, params: GenerationParams) -> Flux2Conditioning:
        texts = [params.prompt] + ([params.negative_prompt or ""] if self.is_guided(params) else [])
        if params.guidance > 1 and self.is_distilled:
            _log.warning("guidance %g is ignored: this model was distilled to need none", params.guidance)
        found = rgb_images(params.image, MAX_REFERENCES)
        references: list[Tensor] = []
        if found:
            with self.components.use("vae") as vae:
                pixels = [fitted(image, MAX_REFERENCE_PIXELS, self.vae_factor) for image in found]
                references = [vae.encode(image).float() for image in pixels]
        return Flux2Conditioning(tuple(self.texts.encode(texts, self._encode)), tuple(references))

    def _encode(self, texts: list[str]) -> list[Tensor]:
        ids = [self.prompts.ids(text) for text in texts]
        lengths = [len(some) for some in ids]
        with self.components.use("text_encoder") as encoder:
            states = encoder.encode([padded(some, NUM_TEXT, self.tokenizer) for some in ids], lengths)
            return [text.clone() for text in states]

    def init_latents(self, params: GenerationParams) -> Tensor:
        shape = self.config.in_channels, params.height // self.vae_factor, params.width // self.vae_factor
        return given_latents(params, shape).permute(0, 2, 3, 1)[:, None].contiguous()

    def denoise(
        self, latents: Tensor, conditioning: Flux2Conditioning, params: GenerationParams, on_step: OnStep
    ) -> Tensor:
        n, _, height, width, _ = latents.shape
        mu = empirical_shift(height * width, params.num_steps)
        schedule = flow_match_schedule(self.scheduler, params.num_steps, mu=mu, sigmas=linear_sigmas(params.num_steps))
        # Prompt and negative prompt are one batch in steps with guidance.
        texts = torch.stack(conditioning.texts)
        sides = [len(texts) if params.is_guided(sigma) else 1 for sigma in schedule.sigmas[:-1]]
        positions = torch.cat([grid_positions(0, height, width), *_positions(conditioning.references)], dim=1)
        references = [_tokens(reference) for reference in conditioning.references]
        caches = {num_sides: StepCache(params.step_cache) for num_sides in sides}
        with self.components.use("transformer") as transformer:
            layouts = {count: transformer.layout(NUM_TEXT, positions, count * n) for count in sorted(set(sides))}

            def predict(index: int, latents: Tensor) -> Tensor:
                num_sides = sides[index]
                tokens = torch.cat([_tokens(latents), *(item.expand(n, -1, -1) for item in references)], dim=1)
                velocity = transformer(
                    tokens.repeat(num_sides, 1, 1),
                    schedule.timesteps[index],
                    texts[:num_sides].repeat_interleave(n, dim=0),
                    layouts[num_sides],
                    caches[num_sides],
                )[:, : height * width].unflatten(1, (1, height, width))
                if num_sides == 1:
                    return velocity
                return guided(velocity[:n], velocity[n:], params.guidance - 1, params.guidance_norm)

            return denoise_loop(latents, schedule, euler(schedule), predict, on_step)

    def decode(self, latents: Tensor, params: GenerationParams) -> np.ndarray:
        with self.components.use("vae") as vae:
            return np.concatenate([to_pixels(vae.decode(image)) for image in latents.split(1)])

    def exported(self, latents: Tensor) -> Tensor:
        return latents[:, 0].permute(0, 3, 1, 2).contiguous()


def empirical_shift(num_tokens: int, num_steps: int) -> float:
    """Return mu, as measured for the model: lines over the tokens of an image, one for 10 steps and one for 200.

    It is interpolated between them; large images use the line of 200 for any number of steps.
    """
    of_200 = 0.00016927 * num_tokens + 0.45666666
    if num_tokens > 4300:
        return of_200
    of_10 = 8.73809524e-05 * num_tokens + 1.89833333
    return of_200 + (of_200 - of_10) / 190 * (num_steps - 200)


def _tokens(latents: Tensor) -> Tensor:
    """Return [n, tokens, C] of latents [n, 1, h, w, C]."""
    return latents.flatten(1, 3)


def _positions(references: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the positions of the tokens of each image to edit."""
    return [grid_positions(REFERENCE_STRIDE * i, *latents.shape[2:4]) for i, latents in enumerate(references, start=1)]
