"""Z-Image and Z-Image-Turbo: Qwen3 encodes the prompt, one stream of image and caption, FLUX's VAE."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from tilewright.diffusion.components import Components
from tilewright.diffusion.params import GenerationParams, Limits
from tilewright.diffusion.pipeline import OnStep, Pipeline, denoise_loop, given_latents, to_pixels
from tilewright.diffusion.prompts import ChatPrompts, TextCache
from tilewright.diffusion.schedule import euler, flow_match_schedule, guided, linear_sigmas, shift_for
from tilewright.layers.memory import StepCache
from tilewright.models import z_image
from tilewright.models.registry import build_vae
from tilewright.models.text_encoders import decoder_encoder
from tilewright.models.z_image import LENGTH_MULTIPLE, ZImageConfig

MAX_PROMPT_TOKENS = 512
# The distilled model is published with this shift, and needs few steps and no guidance.
TURBO_SHIFT = 3.0


@dataclass(frozen=True)
class ZImageConditioning:
    captions: tuple[Tensor, ...]  # [L, D] of the prompt, then of the negative one if there is guidance


class ZImage(Pipeline):
    BUILDERS: ClassVar = {
        "text_encoder": functools.partial(decoder_encoder.build, hidden_layers=(-2,)),
        "transformer": z_image.build,
        "vae": build_vae,
    }

    def __init__(self, components: Components) -> None:
        super().__init__(components)
        self.scheduler = components.config("scheduler")
        self.config = ZImageConfig.from_dict(components.config("transformer"))
        self.vae_factor = 2 ** (len(components.config("vae")["block_out_channels"]) - 1)
        self.limits = components.with_defaults(_limits(self.config, self.vae_factor, self.scheduler))
        self.prompts = ChatPrompts(components.tokenizer(), self.limits.max_prompt_tokens, enable_thinking=True)
        self.texts = TextCache()

    def is_guided(self, params: GenerationParams) -> bool:
        return params.guidance > 0

    def encode_prompt(self, params: GenerationParams) -> ZImageConditioning:
        texts = [params.prompt] + ([params.negative_prompt or ""] if self.is_guided(params) else [])
        return ZImageConditioning(tuple(self.texts.encode(texts, self._encode)))

    def _encode(self, texts: list[str]) -> list[Tensor]:
        ids = [self.prompts.ids(text) for text in texts]
        with self.components.use("text_encoder") as encoder:
            return [states.clone() for states in encoder.encode(ids)]

    def init_latents(self, params: GenerationParams) -> Tensor:
        shape = self.config.channels, params.height // self.vae_factor, params.width // self.vae_factor
        return given_latents(params, shape).permute(0, 2, 3, 1)[:, None].contiguous()

    def denoise(
        self, latents: Tensor, conditioning: ZImageConditioning, params: GenerationParams, on_step: OnStep
    ) -> Tensor:
        n, _, height, width, _ = latents.shape
        mu = shift_for(height * width // self.config.patch_size**2, self.scheduler)
        sigmas = linear_sigmas(params.num_steps)
        schedule = flow_match_schedule(self.scheduler, params.num_steps, mu=mu, sigmas=sigmas)
        captions = conditioning.captions
        # Prompt and negative prompt are one batch in steps with guidance.
        sides = [len(captions) if params.is_guided(sigma) else 1 for sigma in schedule.sigmas[:-1]]
        caches = {num_sides: StepCache(params.step_cache) for num_sides in sides}
        with self.components.use("transformer") as transformer:
            prepared = {
                num_sides: transformer.prepare(captions[:num_sides], np.arange(num_sides).repeat(n), height, width)
                for num_sides in sorted(set(sides))
            }

            def predict(index: int, latents: Tensor) -> Tensor:
                time, num_sides = 1.0 - schedule.sigmas[index], sides[index]
                inputs = latents.repeat(num_sides, 1, 1, 1, 1)
                out = transformer(inputs, time, prepared[num_sides], caches[num_sides]).float()
                if num_sides == 1:
                    return -out
                positive, negative = out.split(n)
                return -guided(positive, negative, params.guidance, params.guidance_norm)

            return denoise_loop(latents, schedule, euler(schedule), predict, on_step)

    def decode(self, latents: Tensor, params: GenerationParams) -> np.ndarray:
        with self.components.use("vae") as vae:
            return to_pixels(vae.decode(latents.to(self.components.dtype("vae"))))

    def exported(self, latents: Tensor) -> Tensor:
        return latents[:, 0].permute(0, 3, 1, 2).contiguous()


def _limits(config: ZImageConfig, vae_factor: int, scheduler: Mapping[str, Any]) -> Limits:
    is_turbo = scheduler.get("shift", 1.0) == TURBO_SHIFT
    frames, rows, columns = config.rope_lengths
    multiple = vae_factor * config.patch_size
    max_side = min(rows, columns) * multiple
    return Limits(
        size_multiple=multiple,
        default_width=min(1024, max_side),
        default_height=min(1024, max_side),
        default_steps=8 if is_turbo else 50,
        default_guidance=0.0 if is_turbo else 5.0,
        max_side=max_side,
        # On its axis the image comes after its padded caption.
        max_prompt_tokens=min(MAX_PROMPT_TOKENS, (frames - 2) // LENGTH_MULTIPLE * LENGTH_MULTIPLE),
    )
