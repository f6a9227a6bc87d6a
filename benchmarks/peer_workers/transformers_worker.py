"""transformers as a worker: scaled_dot_product_attention, model.generate; the requests of a call are one static batch
of equal lengths, which needs no padding. python transformers_worker.py FOLDER auto|bfloat16|float32"""

import runpy
import sys
from pathlib import Path
from time import perf_counter

from worker import Checkpoint, System, serve, take_stdout

# By its path: this environment has another torch, and nothing of ours.
TORCH_DTYPE = Path(__file__).parents[2] / "src/tilewright/bench/torch_dtype.py"
PREFILL_ROWS = 1024  # fp32 and bf16 differ most where many rows are multiplied, and that takes longest


class Transformers(System):
    name = "transformers"

    def __init__(self, checkpoint: Checkpoint, dtype: str) -> None:
        import torch
        import transformers

        self.checkpoint = checkpoint
        if dtype == "auto":
            self.dtype = runpy.run_path(str(TORCH_DTYPE))["fastest_dtype"](PREFILL_ROWS)
        else:
            self.dtype = getattr(torch, dtype)
        self.is_cross = checkpoint.config["model_type"] == "mllama"
        auto = transformers.AutoModelForCausalLM
        if checkpoint.has_vision:
            auto = transformers.AutoModelForImageTextToText
            # The halves in Pillow: the others want torchvision.
            if self.is_cross:
                from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil as Pil
            else:
                from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Pil
            self.image_processor = Pil.from_pretrained(checkpoint.folder)
        self.model = auto.from_pretrained(
            checkpoint.folder, dtype=self.dtype, attn_implementation="sdpa", local_files_only=True
        ).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def versions(self) -> dict[str, str]:
        import torch
        import transformers

        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def details(self) -> dict[str, object]:
        return {"dtype": str(self.dtype).removeprefix("torch.")}

    def generate(self, prompts: list, images: list | None, new_tokens: int) -> int:
        import torch

        begin, self.first_token_s = perf_counter(), None
        media = {}
        if images and self.is_cross:
            prompts, media = self._to_look_at(prompts, images)
        elif images:
            prompts, media = self._in_place(prompts, images)
        input_ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                stopping_criteria=[lambda ids, scores: self._note_token(ids, begin)],
                **media,
            )
        assert out.shape[1] == input_ids.shape[1] + new_tokens
        return input_ids.shape[1]

    def _note_token(self, ids, begin: float):
        """Called after every token: notes when the first one came, and stops none."""
        import torch

        if self.first_token_s is None:
            self.first_token_s = perf_counter() - begin
        return torch.zeros(len(ids), dtype=torch.bool)

    def _in_place(self, prompts: list, images: list) -> tuple[list, dict]:
        """Prompts with images in the place of tokens, as Qwen3-VL has them."""
        import torch

        config = self.checkpoint.config
        made = self.image_processor(images=images, return_tensors="pt")
        merged = config["vision_config"]["spatial_merge_size"] ** 2
        counts = [int(grid.prod()) // merged for grid in made["image_grid_thw"]]
        prompts = [self.checkpoint.around_image(n, prompt) for n, prompt in zip(counts, prompts, strict=True)]
        media = {"pixel_values": made["pixel_values"].to(self.dtype), "image_grid_thw": made["image_grid_thw"]}
        media["mm_token_type_ids"] = (torch.tensor(prompts) == config["image_token_id"]).int()
        return prompts, media

    def _to_look_at(self, prompts: list, images: list) -> tuple[list, dict]:
        """Prompts with an image each that all their tokens attend to, as Llama-3.2-Vision has them."""
        prompts = [self.checkpoint.around_image(1, prompt) for prompt in prompts]
        made = dict(self.image_processor(images=[[image] for image in images], return_tensors="pt"))
        made.pop("num_tiles")
        made["pixel_values"] = made["pixel_values"].to(self.dtype)
        seen = made["aspect_ratio_mask"][:, None]  # [B, 1, images, tiles]
        made["cross_attention_mask"] = seen.expand(-1, len(prompts[0]), -1, -1).contiguous()
        return prompts, made


if __name__ == "__main__":
    folder, dtype = sys.argv[1:]
    serve(lambda checkpoint: Transformers(checkpoint, dtype), folder, take_stdout())
