"""Qwen-Image: Qwen2.5-VL encodes the prompt; guidance only with a negative prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from tilewright.diffusion.components import Components
from tilewright.diffusion.params import GenerationParams, Limits
from tilewright.diffusion.pipeline import OnStep, Pipeline, denoise_loop, given_latents, noise, to_pixels
from tilewright.diffusion.prompts import TextCache, check_length
from tilewright.diffusion.schedule import euler, flow_match_schedule, linear_sigmas, shift_for
from tilewright.layers.memory import StepCache
from tilewright.models import qwen_image, registry
from tilewright.models.qwen_image import References
from tilewright.models.text_encoders import decoder_encoder

TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
NUM_TEMPLATE_TOKENS = 34  # before the prompt: not passed to the transformer
MAX_TEXT_TOKENS = 1024
PATCH = 2  # latent pixels along a side of a patch


@dataclass(frozen=True)
class QwenImageConditioning:
    texts: list[Tensor]  # [M, D] of the prompt, then of the negative one if there is guidance
    references: References | None = None  # images to edit


class QwenImage(Pipeline):
    BUILDERS: ClassVar = {
        "text_encoder": decoder_encoder.build,
        "transformer": qwen_image.build,
        "vae": registry.build_vae,
    }

    def __init__(self, components: Components) -> None:
        super().__init__(components)
        vae = components.config("vae")
        self.spatial = 2 ** len(vae.get("temperal_downsample", (False, True, True)))
        self.latent_channels = int(vae.get("z_dim", 16))
        self.scheduler = components.config("scheduler")
        self.limits = components.with_defaults(self._limits())
        self.texts = TextCache()

    def _limits(self) -> Limits:
        return Limits(
            size_multiple=self.spatial * PATCH,
            default_width=1328,
            default_height=1328,
            default_steps=50,
            default_guidance=4.0,
            max_prompt_tokens=NUM_TEMPLATE_TOKENS + MAX_TEXT_TOKENS,
        )

    def is_guided(self, params: GenerationParams) -> bool:
        return params.negative_prompt is not None and params.guidance > 1

    def encode_prompt(self, params: GenerationParams) -> QwenImageConditioning:
        prompts = [params.prompt] + ([params.negative_prompt or ""] if self.is_guided(params) else [])
        return QwenImageConditioning(self.texts.encode(prompts, self._encode))

    def _encode(self, prompts: list[str]) -> list[Tensor]:
        tokenizer = self.components.tokenizer()
        token_ids = [tokenizer.encode(TEMPLATE.format(prompt)) for prompt in prompts]
        for ids in token_ids:
            check_length(ids, self.limits.max_prompt_tokens)
        with self.components.use("text_encoder") as encoder:
            return [text[NUM_TEMPLATE_TOKENS:].clone() for text in encoder.encode(token_ids)]

    def init_latents(self, params: GenerationParams) -> Tensor:
        height, width = params.height // self.spatial, params.width // self.spatial
        if params.latents is None:
            latents = noise((1, self.latent_channels, height, width), params.seeds)
            return latents.permute(0, 1, 3, 4, 2).contiguous()
        num_patches, channels = height * width // PATCH**2, self.latent_channels * PATCH**2
        patches = given_latents(params, (num_patches, channels))
        return _unpatched(patches, (height // PATCH, width // PATCH))

    def denoise(
        self, latents: Tensor, conditioning: QwenImageConditioning, params: GenerationParams, on_step: OnStep
    ) -> Tensor:
        grid = latents.shape[2] // PATCH, latents.shape[3] // PATCH
        mu = shift_for(grid[0] * grid[1], self.scheduler)
        sigmas = linear_sigmas(params.num_steps)
        schedule = flow_match_schedule(self.scheduler, params.num_steps, mu=mu, sigmas=sigmas)
        texts, references, n = conditioning.texts, conditioning.references, len(latents)
        caches = {True: StepCache(params.step_cache), False: StepCache(params.step_cache)}
        with self.components.use("transformer") as transformer:

            def predict(index: int, latents: Tensor) -> Tensor:
                patches, timestep = patches_of(latents), schedule.timesteps[index]
                is_guided = len(texts) == 2 and params.is_guided(schedule.sigmas[index])
                if not is_guided:
                    alone = transformer(patches, timestep, texts[:1] * n, grid, caches[False], references)
                    return _unpatched(alone, grid)
                of_all = texts[:1] * n + texts[1:] * n
                both = transformer(torch.cat([patches, patches]), timestep, of_all, grid, caches[True], references)
                velocity, without = both.chunk(2)
                return _unpatched(_guided(velocity, without, params.guidance), grid)

            return denoise_loop(latents, schedule, euler(schedule), predict, on_step)

    def decode(self, latents: Tensor, params: GenerationParams) -> np.ndarray:
        with self.components.use("vae") as vae:
            return np.concatenate([to_pixels(vae.decode(image)) for image in latents.split(1)])

    def exported(self, latents: Tensor) -> Tensor:
        return patches_of(latents)


def _guided(velocity: Tensor, without: Tensor, guidance: float) -> Tensor:
    """Move away from the negative prompt, keeping the length of the prompt's own velocity in each patch."""
    guided = without + guidance * (velocity - without)
    return guided * (velocity.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))


def patches_of(latents: Tensor) -> Tensor:
    """Return [n, N, 4C] of latents [n, 1, h, w, C]: a patch's channels, each 2 x 2. diffusers' layout."""
    n, _, height, width, channels = latents.shape
    blocks = latents.view(n, height // PATCH, PATCH, width // PATCH, PATCH, channels)
    return blocks.permute(0, 1, 3, 5, 2, 4).reshape(n, -1, channels * PATCH**2)


def _unpatched(patches: Tensor, grid: tuple[int, int]) -> Tensor:
    """Invert `patches_of`."""
    blocks = patches.view(len(patches), *grid, -1, PATCH, PATCH).permute(0, 1, 4, 2, 5, 3)
    return torch.flatten(blocks.flatten(3, 4), 1, 2)[:, None].contiguous()
