"""The same checkpoint in transformers, with its own processor's parts.

AutoProcessor cannot be made without torchvision, which is not among our dependencies. What is used is transformers'
code all the same: its tokenizer, its image processor on Pillow, its sampling and cutting of frames, its
placeholders. Only a frame's resize is torch's own, which torchvision calls too; frames whose sides are whole numbers of
merged patches are not resized at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize
from transformers.video_utils import VideoMetadata

from training.tiny_vl import messages

if TYPE_CHECKING:
    from training.tiny_vl.items import Item

IMAGE_TYPE, VIDEO_TYPE = 1, 2  # of tokens, as the model's rope positions ask


class Oracle:
    """A model of transformers that answers items."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
        ).eval()
        self._processor = processor = Qwen3VLProcessor.__new__(Qwen3VLProcessor)  # its __init__ asks for torchvision
        processor.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        processor.image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
        processor.video_processor = Qwen3VLVideoProcessor.from_pretrained(folder, local_files_only=True)
        processor.image_token, processor.video_token = "<|image_pad|>", "<|video_pad|>"
        processor.vision_start_token, processor.vision_end_token = "<|vision_start|>", "<|vision_end|>"
        self._model.generation_config.pad_token_id = 0  # nothing is padded; without one generate() warns each time

    def answer(self, item: Item, max_tokens: int) -> str:
        """The greedy answer's text."""
        inputs = self.inputs(item)
        with torch.inference_mode():
            ids = self._model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens)
        return self._processor.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    def inputs(self, item: Item) -> dict[str, torch.Tensor]:
        """What the model reads."""
        processor, media = self._processor, self._media(item)
        tokenizer, config = processor.tokenizer, self._model.config
        kinds = ["image"] * len(item.images) + ["video"] * bool(item.clip)
        content = [*({"type": kind} for kind in kinds), {"type": "text", "text": item.question}]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        images = [processor.replace_image_token(media, index) for index in range(len(item.images))]
        videos = [processor.replace_video_token(media, 0)] if item.clip else []
        (text,), _ = processor.get_text_with_replacements([text], images, videos)
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        types = (ids == config.image_token_id) * IMAGE_TYPE + (ids == config.video_token_id) * VIDEO_TYPE
        media.pop("video_metadata", None)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": types.int(), **media}

    def _media(self, item: Item) -> dict[str, Any]:
        dtype = self._model.dtype
        media: dict[str, Any] = {}
        if item.images:
            media |= self._processor.image_processor(images=list(item.images), return_tensors="pt")
            media["pixel_values"] = media["pixel_values"].to(dtype)
        if item.clip:
            patches, grid, metadata = self._patches(item)
            media |= {"pixel_values_videos": patches.to(dtype), "video_grid_thw": grid, "video_metadata": [metadata]}
        return media

    def _patches(self, item: Item) -> tuple[torch.Tensor, torch.Tensor, VideoMetadata]:
        """The clip's sampled frames in patches, their grid, and which frames they are."""
        video = self._processor.video_processor
        metadata = VideoMetadata(total_num_frames=len(item.clip), fps=item.fps)
        metadata.frames_indices = video.sample_frames(metadata)
        frames = torch.from_numpy(messages.frames(item.clip)[metadata.frames_indices]).permute(0, 3, 1, 2)
        if video.cap_pixels_per_frame:
            raise NotImplementedError("the checkpoint caps the pixels of a frame, which is not done here")
        height, width = smart_resize(
            len(frames),
            frames.shape[2],
            frames.shape[3],
            temporal_factor=video.temporal_patch_size,
            factor=video.patch_size * video.merge_size,
            min_pixels=video.size["shortest_edge"],
            max_pixels=video.size["longest_edge"],
        )
        if (height, width) != frames.shape[-2:]:
            frames = torch.nn.functional.interpolate(frames, (height, width), mode="bicubic", antialias=True)
        mean, std = (torch.tensor(values).view(3, 1, 1) * 255 for values in (video.image_mean, video.image_std))
        patches, *grid = video.patchify(
            ((frames - mean) / std)[None], video.patch_size, video.merge_size, video.temporal_patch_size
        )
        return patches[0], torch.tensor([grid]), metadata
