"""A tiny random pipeline of Qwen-Image, as diffusers runs it and as the folder it saves."""

import json

import torch
from components import randomized
from oracle import require

TRANSFORMER = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
VISION_START, VISION_END, IMAGE = 259, 260, 261


def make_tokenizer():
    """Qwen2's, of single bytes."""
    tokenizers, transformers = require("tokenizers"), require("transformers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=SPECIAL[0], eos_token=SPECIAL[2], padding_side="right"
    )


def make_text_encoder():
    transformers = require("transformers")
    text = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 272,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 8,
        "window_size": 32,
        "fullatt_block_indexes": [1],
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=271,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    return randomized(transformers.Qwen2_5_VLForConditionalGeneration(config))


def make_vae():
    torch.manual_seed(0)
    return (
        require("diffusers")
        .AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[1.5, 0.8, 1.1, 2.0],
        )
        .eval()
    )


def make_scheduler():
    """With the published settings."""
    return require("diffusers").FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        base_shift=0.5,
        max_image_seq_len=8192,
        max_shift=0.9,
        shift=1.0,
        shift_terminal=0.02,
        time_shift_type="exponential",
        use_dynamic_shifting=True,
    )


def save(folder):
    """diffusers' pipeline, saved to the folder."""
    diffusers = require("diffusers")
    pipeline = diffusers.QwenImagePipeline(
        tokenizer=make_tokenizer(),
        text_encoder=make_text_encoder(),
        vae=make_vae(),
        scheduler=make_scheduler(),
        transformer=randomized(diffusers.QwenImageTransformer2DModel(**TRANSFORMER)),
    )
    pipeline.save_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


class Processor:
    """Qwen2VLProcessor without torchvision: Pillow resizes and the tokenizer counts a token for each feature."""

    def __init__(self):
        module = require("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
        self.images = module.Qwen2VLImageProcessorPil(patch_size=8, min_pixels=256, max_pixels=1 << 16)
        self.tokenizer = make_tokenizer()

    def __call__(self, text, images, padding, return_tensors):
        found = self.images(images=images, return_tensors="pt")
        counts = (found["image_grid_thw"].prod(dim=1) // 4).tolist()
        pad, *rest = "<|image_pad|>", *text[0].split("<|image_pad|>")
        expanded = rest[0] + "".join(pad * count + after for count, after in zip(counts, rest[1:], strict=True))
        return require("transformers").BatchFeature(
            {**self.tokenizer([expanded], return_tensors="pt"), **found}, tensor_type="pt"
        )


def save_edit(folder, class_name, **transformer):
    """diffusers' pipeline that edits, saved to the folder."""
    diffusers = require("diffusers")
    pipeline = getattr(diffusers, class_name)(
        tokenizer=make_tokenizer(),
        text_encoder=make_text_encoder(),
        processor=Processor(),
        vae=make_vae(),
        scheduler=make_scheduler(),
        transformer=randomized(diffusers.QwenImageTransformer2DModel(**TRANSFORMER, **transformer)),
    )
    pipeline.save_pretrained(folder)
    # diffusers saves no processor that is not transformers' own.
    pipeline.processor.images.save_pretrained(folder / "processor")
    index = json.loads((folder / "model_index.json").read_text())
    index["processor"] = ["transformers", "Qwen2VLProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index))
    _say_where_images_are(pipeline.text_encoder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _say_where_images_are(encoder):
    """transformers 5 gives images positions in rows and columns, as the model was trained, only if it is told which
    tokens are theirs. transformers 4 looked, and diffusers 0.42 relies on that."""
    forward = encoder.forward

    def told(input_ids, **options):
        return forward(input_ids=input_ids, mm_token_type_ids=(input_ids == IMAGE).int(), **options)

    encoder.forward = told
