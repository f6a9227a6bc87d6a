"""Wan 2.1 and 2.2: videos from a text, or from a text and the image that the video begins with.

Wan 2.2 TI2V keeps an image's latents as the first frame, at timestep 0. Wan 2.2 I2V reads the image as further
channels of the latents. The 14B models of 2.2 have two transformers: one for high noise, and one for low.
"""

from __future__ import annotations

import contextlib
import html
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from tilewright.diffusion.components import Components
from tilewright.diffusion.multistep import solver_of
from tilewright.diffusion.params import GenerationParams, Limits
from tilewright.diffusion.pipeline import OnStep, Pipeline, denoise_loop, given_latents, resized_image, to_pixels
from tilewright.diffusion.prompts import TextCache, check_length
from tilewright.diffusion.schedule import guided
from tilewright.layers.memory import StepCache
from tilewright.models import registry, wan
from tilewright.models.text_encoders import t5
from tilewright.models.wan import WanText, WanTransformer
from tilewright.types import UnsupportedConfig

TEXT_TOKENS = 512  # rows of any text that the transformer reads, zeros after its end


@dataclass(frozen=True)
class WanConditioning:
    texts: list[Tensor]  # [TEXT_TOKENS, D] of the prompt, then of the negative one if there is guidance
    image: Tensor | None  # latents that the video begins with, or channels with the image


class Wan(Pipeline):
    BUILDERS: ClassVar = {
        "text_encoder": t5.build,
        "transformer": wan.build,
        "transformer_2": wan.build,
        "vae": registry.build_vae,
    }

    def __init__(self, components: Components) -> None:
        super().__init__(components)
        if components.has("image_encoder"):
            raise UnsupportedConfig(
                f"{components.folder} has an image_encoder: Wan 2.1 image-to-video, which reads its image through "
                "CLIP, is not supported; Wan 2.2 TI2V and I2V are"
            )
        vae = components.config("vae")
        self.spatial, self.temporal = int(vae.get("scale_factor_spatial", 8)), int(vae.get("scale_factor_temporal", 4))
        self.latent_channels = int(vae.get("z_dim", 16))
        self.keeps_first_frame = bool(components.index.get("expand_timesteps"))
        self.has_image_channels = components.class_name == "WanImageToVideoPipeline" and not self.keeps_first_frame
        self.boundary = components.index.get("boundary_ratio") if components.has("transformer_2") else None
        self.scheduler = components.config("scheduler")
        self.limits = components.with_defaults(self._limits(components))
        self.texts = TextCache()

    def _limits(self, components: Components) -> Limits:
        _, rows, columns = wan.WanConfig.from_dict(components.config("transformer")).patch_size
        is_large = self.spatial == 16  # TI2V-5B: 720p at 24 frames a second
        return Limits(
            size_multiple=self.spatial * max(rows, columns),
            default_width=1280 if is_large else 832,
            default_height=704 if is_large else 480,
            default_steps=50,
            default_guidance=5.0,
            max_pixels=1 << 20,
            default_frames=121 if is_large else 81,
            max_frames=241,
            frame_multiple=self.temporal,
            fps=24.0 if is_large else 16.0,
            max_images=4,
            max_prompt_tokens=TEXT_TOKENS,
            takes_image=self.keeps_first_frame or self.has_image_channels,
            needs_image=components.class_name == "WanImageToVideoPipeline",
        )

    def encode_prompt(self, params: GenerationParams) -> WanConditioning:
        prompts = [params.prompt] + ([params.negative_prompt or ""] if self.is_guided(params) else [])
        texts = self.texts.encode(prompts, self._encode)
        return WanConditioning(texts, None if params.image is None else self._image(params))

    def _encode(self, prompts: list[str]) -> list[Tensor]:
        tokenizer = self.components.tokenizer()
        token_ids = [tokenizer.encode(_cleaned(prompt), add_special_tokens=True) for prompt in prompts]
        for ids in token_ids:
            check_length(ids, self.limits.max_prompt_tokens)
        with self.components.use("text_encoder") as encoder:
            return [_padded(text) for text in encoder.encode(token_ids)]

    def _image(self, params: GenerationParams) -> Tensor:
        image = resized_image(params.image, params.width, params.height)
        with self.components.use("vae") as vae:
            if self.keeps_first_frame:
                return vae.encode(image)
            rest = image.new_zeros(1, params.num_frames - 1, *image.shape[2:])
            latents = vae.encode(torch.cat([image, rest], dim=1)).float()
        # Whether each of a latent frame's video frames is given: those of the first latent frame are.
        is_given = latents.new_zeros(*latents.shape[:-1], self.temporal)
        is_given[:, 0] = 1
        return torch.cat([is_given, latents], dim=-1)

    def init_latents(self, params: GenerationParams) -> Tensor:
        frames = (params.num_frames - 1) // self.temporal + 1
        shape = (self.latent_channels, frames, params.height // self.spatial, params.width // self.spatial)
        return given_latents(params, shape).permute(0, 2, 3, 4, 1).contiguous()

    def denoise(
        self, latents: Tensor, conditioning: WanConditioning, params: GenerationParams, on_step: OnStep
    ) -> Tensor:
        schedule, step = solver_of(self.scheduler, params.num_steps)
        caches: defaultdict[tuple[str, bool], StepCache] = defaultdict(lambda: StepCache(params.step_cache))
        with contextlib.ExitStack() as stack:
            experts = _Experts(self.components, stack, conditioning.texts)

            def predict(index: int, latents: Tensor) -> Tensor:
                timestep = schedule.timesteps[index]
                name = self.transformer_at(timestep)
                transformer, text = experts.named(name)
                seen, timesteps = self._seen(latents, timestep, conditioning.image)
                is_guided = len(conditioning.texts) == 2 and params.is_guided(schedule.sigmas[index])
                cache = caches[name, is_guided]
                if not is_guided:
                    return transformer(seen, timesteps, text.first(), cache)
                both = transformer(torch.cat([seen, seen]), torch.cat([timesteps, timesteps]), text, cache)
                velocity, without = both.chunk(2)
                return guided(velocity, without, params.guidance - 1, params.guidance_norm)

            latents = denoise_loop(latents, schedule, step, predict, on_step)
        return self._with_first_frame(latents, conditioning.image)

    def _seen(self, latents: Tensor, timestep: float, image: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the transformer's input, and its timesteps, of each video or of each frame."""
        timesteps = torch.full(latents.shape[:1], timestep, device=latents.device)
        if image is None:
            return latents, timesteps
        if self.has_image_channels:
            return torch.cat([latents, image.expand(len(latents), -1, -1, -1, -1)], dim=-1), timesteps
        of_frames = timesteps[:, None].repeat(1, latents.shape[1])
        of_frames[:, 0] = 0
        return self._with_first_frame(latents, image), of_frames

    def _with_first_frame(self, latents: Tensor, image: Tensor | None) -> Tensor:
        if image is None or self.has_image_channels:
            return latents
        return torch.cat([image.to(latents).expand(len(latents), -1, -1, -1, -1), latents[:, 1:]], dim=1)

    def decode(self, latents: Tensor, params: GenerationParams) -> np.ndarray:
        with self.components.use("vae") as vae:
            return np.concatenate([to_pixels(vae.decode(video)) for video in latents.split(1)])

    def preview(self, latents: Tensor, params: GenerationParams) -> np.ndarray:
        """Return previews of the first frame alone, which are cheap."""
        return super().preview(latents[:, :1], params)

    def exported(self, latents: Tensor) -> Tensor:
        return latents.permute(0, 4, 1, 2, 3).contiguous()

    def transformer_at(self, timestep: float) -> str:
        """Return the component that computes a step at this timestep."""
        train = self.scheduler.get("num_train_timesteps", 1000)
        return "transformer" if self.boundary is None or timestep >= self.boundary * train else "transformer_2"


class _Experts:
    """The transformer in use, and its inputs from the texts; only one is in memory."""

    def __init__(self, components: Components, stack: contextlib.ExitStack, texts: Sequence[Tensor]) -> None:
        self._components, self._stack, self._texts = components, stack, texts
        self._name = ""
        self._current: tuple[WanTransformer, WanText] | None = None

    def named(self, name: str) -> tuple[WanTransformer, WanText]:
        if self._current is None or name != self._name:
            self._current = None
            self._stack.close()
            transformer = self._stack.enter_context(self._components.use(name))
            self._name, self._current = name, (transformer, transformer.embed_text(self._texts))
        return self._current


def _cleaned(prompt: str) -> str:
    """Normalise the prompt as in training: resolve HTML entities, also doubled ones, and collapse spaces."""
    return " ".join(html.unescape(html.unescape(prompt)).split())


def _padded(text: Tensor) -> Tensor:
    return torch.cat([text, text.new_zeros(TEXT_TOKENS - len(text), text.shape[1])])
