"""transformers as a worker: bf16, scaled_dot_product_attention, model.generate; the requests of a call are one static
batch of equal lengths, which needs no padding. python transformers_worker.py FOLDER"""

import sys

from worker import Checkpoint, System, serve, take_stdout


class Transformers(System):
    name = "transformers"

    def __init__(self, checkpoint: Checkpoint) -> None:
        import torch
        import transformers

        self.checkpoint = checkpoint
        auto = transformers.AutoModelForCausalLM
        if checkpoint.has_vision:
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

            auto = transformers.AutoModelForImageTextToText
            self.image_processor = Qwen2VLImageProcessorPil.from_pretrained(checkpoint.folder)
        self.model = auto.from_pretrained(
            checkpoint.folder, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
        ).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def versions(self) -> dict[str, str]:
        import torch
        import transformers

        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def generate(self, prompts: list, pictures: list | None, new_tokens: int) -> int:
        import torch

        media = {}
        if pictures:
            config = self.checkpoint.config
            made = self.image_processor(images=pictures, return_tensors="pt")
            merged = config["vision_config"]["spatial_merge_size"] ** 2
            counts = [int(grid.prod()) // merged for grid in made["image_grid_thw"]]
            prompts = [self.checkpoint.around_picture(n, prompt) for n, prompt in zip(counts, prompts, strict=True)]
            media = {"pixel_values": made["pixel_values"].to(torch.bfloat16), "image_grid_thw": made["image_grid_thw"]}
        input_ids = torch.tensor(prompts)
        if pictures:
            media["mm_token_type_ids"] = (input_ids == self.checkpoint.config["image_token_id"]).int()
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                **media,
            )
        assert out.shape[1] == input_ids.shape[1] + new_tokens
        return input_ids.shape[1]


if __name__ == "__main__":
    serve(Transformers, sys.argv[1], take_stdout())
