"""Qwen3-VL's inputs are those of transformers' processor: ids, positions, grids and pixels of pictures exactly."""

import gc
import io
import json
import shutil
from concurrent.futures import CancelledError

import numpy as np
import pytest
import torch
from checkpoint_files import write_qwen3_vl_folder
from clips import write_clip
from media_parts import parts, patches_of
from oracle import require
from PIL import Image

from tilewright.inputs.media import MediaLimits
from tilewright.inputs.media_buffer import MediaBuffer
from tilewright.inputs.messages import TextBudget, TextLimits
from tilewright.models.qwen3_vl.preprocessing import (
    group_times,
    image_size,
    num_sampled_frames,
    read_preprocessing,
    sample_indices,
    video_size,
)
from tilewright.models.qwen3_vl.processor import Qwen3VlProcessor
from tilewright.types import RequestError

IMAGE, VIDEO, START, END = 151655, 151656, 151652, 151653


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_qwen3_vl_folder(tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="module")
def transformers():
    return require("transformers")


@pytest.fixture(scope="module")
def oracle(transformers, folder):
    """transformers' processor, with its picture half in Pillow; the video half's resize wants torchvision."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    processor = Qwen3VLProcessor.__new__(Qwen3VLProcessor)  # its __init__ asks for torchvision
    settings = json.loads((folder / "video_preprocessor_config.json").read_text())
    video_processor = Qwen3VLVideoProcessor.__new__(Qwen3VLVideoProcessor)
    for name in ("patch_size", "temporal_patch_size", "merge_size", "size"):
        setattr(video_processor, name, settings[name])
    processor.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor.image_processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder)
    processor.video_processor = video_processor
    processor.image_token, processor.video_token = "<|image_pad|>", "<|video_pad|>"
    processor.vision_start_token, processor.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    return processor


def oracle_positions(transformers, config, ids, image_grids, video_grids):
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    model = Qwen3VLModel.__new__(Qwen3VLModel)
    torch.nn.Module.__init__(model)
    model.config = transformers.Qwen3VLConfig(**config)
    ids = torch.tensor([ids])
    kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    grids = [torch.tensor(grid) if grid else None for grid in (image_grids, video_grids)]
    positions, delta = model.get_rope_index(ids, kinds, *grids)
    return positions[:, 0].numpy(), int(delta) + ids.shape[1]


def oracle_text(oracle, text, pictures, videos):
    """The text with placeholders replaced by transformers' code; videos are (frames, height, width, fps)."""
    from transformers.video_utils import VideoMetadata

    features = oracle.image_processor(images=pictures, return_tensors="pt") if pictures else {}
    images = [oracle.replace_image_token(features, index) for index in range(len(pictures))]
    video_texts, grids = [], []
    for num_frames, height, width, fps in videos:
        metadata = VideoMetadata(total_num_frames=num_frames, fps=fps)
        metadata.frames_indices = oracle.video_processor.sample_frames(metadata, fps=2)
        count = len(metadata.frames_indices)
        num_patches = oracle.video_processor.get_num_of_video_patches(count, height, width)
        size = video_size(count, height, width, read_preprocessing("video", CONFIG, None), "video")
        grid = [-(-count // 2), size[0] // 16, size[1] // 16]
        assert np.prod(grid) == num_patches
        grids.append(grid)
        inputs = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [metadata]}
        video_texts.append(oracle.replace_video_token(inputs, 0))
    (expanded,), _ = oracle.get_text_with_replacements([text], images, video_texts)
    return expanded, features, grids


CONFIG = {"vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}}


def picture(height, width, seed=0):
    return np.random.default_rng(seed + height + width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def png(array):
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()


PICTURES = [picture(300, 400), picture(77, 200), picture(640, 31), picture(32, 32)]
CLIP = np.stack([picture(60, 90, seed) for seed in range(9)])
CHATS = {
    "text alone": ["Hello!"],
    "one picture": [PICTURES[0], "What is it?"],
    "three pictures": ["a", PICTURES[1], PICTURES[2], "b", PICTURES[3]],
    "a video": ["Look:", (CLIP, 2.0), "What happens?"],
    "two videos and pictures": [PICTURES[1], (CLIP[:5], 1.0), "then 😀", (CLIP, None), PICTURES[2]],
}


def parts_of(items):
    """A message's parts for us and, without the media, for transformers; pictures and (frames, height, width, fps)."""
    parts, bare, pictures, videos = [], [], [], []
    for item in items:
        if isinstance(item, str):
            parts.append({"type": "text", "text": item})
            bare.append(parts[-1])
        elif isinstance(item, tuple):
            frames, fps = item
            parts.append({"type": "video", "video": frames, **({"fps": fps} if fps else {})})
            bare.append({"type": "video"})
            videos.append((*frames.shape[:3], fps))
        else:
            parts.append({"type": "image", "image": item})
            bare.append({"type": "image"})
            pictures.append(Image.fromarray(item))
    return parts, bare, pictures, videos


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_that_of_transformers(name, processor, oracle, transformers, config):
    parts, bare, pictures, videos = parts_of(CHATS[name])
    earlier = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    earlier.append({"role": "assistant", "content": "Yes?"})
    inputs = processor.chat([*earlier, {"role": "user", "content": parts}])
    text = oracle.tokenizer.apply_chat_template(
        [*earlier, {"role": "user", "content": bare}],
        chat_template=processor.template.sources["default"],
        add_generation_prompt=True,
        tokenize=False,
    )
    text, features, video_grids = oracle_text(oracle, text, pictures, videos)
    assert list(inputs.token_ids) == oracle.tokenizer.encode(text, add_special_tokens=False)
    image_grids = features["image_grid_thw"].tolist() if pictures else []
    assert [list(medium.grid) for medium in inputs.media if medium.kind == "image"] == image_grids
    assert [list(medium.grid) for medium in inputs.media if medium.kind == "video"] == video_grids
    positions, next_position = oracle_positions(transformers, config, inputs.token_ids, image_grids, video_grids)
    assert inputs.positions.dtype == np.int64 and np.array_equal(inputs.positions, positions)
    assert inputs.next_position == next_position
    check_spans(inputs)
    if pictures:
        actual = torch.cat([patches_of(processor, medium) for medium in inputs.media if medium.kind == "image"])
        expected = features["pixel_values"].view(-1, 3, 2, 256)
        assert torch.equal(expected[:, :, 0], expected[:, :, 1])
        # Pillow before 13 resizes in another order, at most a level apart.
        atol = 0 if int(Image.__version__.split(".")[0]) >= 13 else 1 / 127 + 1e-6
        torch.testing.assert_close(actual, expected[:, :, 0].reshape(-1, 768), rtol=0, atol=atol)


def check_spans(inputs):
    """Spans cover all placeholders, in order, and hold as many as the grids say."""
    covered = [index for medium in inputs.media for span in medium.spans
               for index in range(span.start, span.start + span.length)]  # fmt: skip
    placeholders = [index for index, token_id in enumerate(inputs.token_ids) if token_id in (IMAGE, VIDEO)]
    assert sorted(covered) == placeholders and len(set(covered)) == len(covered)
    for medium in inputs.media:
        assert medium.num_features == np.prod(medium.grid) // 4
        assert len(medium.spans) == (medium.grid[0] if medium.kind == "video" else 1)
        assert len(medium.key) == 16


def test_patches_of_a_video(processor):
    """Frames resized, the last one repeated to fill its pair, two frames to a patch."""
    from tilewright.ops import media
    from tilewright.ops.torch_backend import media as reference

    inputs = processor.prompt("<|video_pad|>", media=parts(videos=[{"video": CLIP[:5], "fps": 2}]))
    (medium,) = inputs.media
    assert medium.grid[0] == 3
    height, width = medium.grid[1] * 16, medium.grid[2] * 16
    frames = torch.from_numpy(np.concatenate([CLIP[:5], CLIP[4:5]]))
    expected = reference.patches(
        media.resize(frames, height, width), height, width, patch_size=16, merge_size=2, temporal_patch_size=2,
        mean=(0.5,) * 3, std=(0.5,) * 3, dtype=torch.float32,
    )  # fmt: skip
    assert torch.equal(patches_of(processor, medium), expected)


def test_video_frames_are_near_torchs_own_resize(processor):
    """transformers resizes frames with torch's antialiased bicubic on 8 bits, whose weights have fewer bits than ours.

    On noise, the worst case, 0.4 % of levels differ, by at most 2; on a film 0.05 %, by 1.
    """
    frames = np.stack([picture(90, 130, seed) for seed in range(4)])
    inputs = processor.prompt("<|video_pad|>", media=parts(videos=[{"video": frames, "fps": 2}]))
    (medium,) = inputs.media
    height, width = medium.grid[1] * 16, medium.grid[2] * 16
    resized = torch.nn.functional.interpolate(
        torch.from_numpy(frames).permute(0, 3, 1, 2), (height, width), mode="bicubic", antialias=True
    )
    blocks = resized.view(2, 2, 3, height // 32, 2, 16, width // 32, 2, 16).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    expected = blocks.reshape(-1, 1536).float()
    levels = (patches_of(processor, medium) * 0.5 + 0.5) * 255
    difference = (levels - expected).abs().round()
    assert difference.max() <= 2
    assert (difference > 0).float().mean() < 0.01


def test_a_video_file(processor, tmp_path):
    data = write_clip(tmp_path / "a.mp4", 75, fps=25)
    inputs = processor.chat([{"role": "user", "content": [{"type": "video", "video": tmp_path / "a.mp4"}]}])
    (medium,) = inputs.media
    assert medium.grid[0] == 3 and len(medium.spans) == 3
    text = processor.tokenizer.decode(inputs.token_ids, skip_special_tokens=False)
    # 75 frames at 25 a second: indices 0, 15, 30, 44, 59, 74.
    for time in ("0.3", "1.5", "2.7"):
        assert f"<{time} seconds><|vision_start|><|video_pad|>" in text
    assert text.count("<|vision_start|>") == 4, "one around the video, one around each pair of frames"
    check_spans(inputs)
    assert patches_of(processor, medium).shape == (np.prod(medium.grid), 1536)
    again = processor.chat([{"role": "user", "content": [{"type": "video", "video": data}]}])
    assert again.media[0].key == medium.key


def test_sizes_are_those_of_transformers(transformers, config, folder):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
    from transformers.models.qwen3_vl import video_processing_qwen3_vl as video_module

    media, video = read_preprocessing("image", config, folder), read_preprocessing("video", config, folder)
    generator = np.random.default_rng(0)
    sides = [(1, 1), (16, 16), (48, 48), (80, 80), (1, 200), (5000, 4000), (16384, 1024), (33, 6000)]
    sides += generator.integers(1, 3000, (300, 2)).tolist()
    for height, width in sides:
        if max(height, width) / min(height, width) > 200:
            continue
        expected = smart_resize(height, width, factor=32, min_pixels=65536, max_pixels=16777216)
        assert image_size(height, width, media, "image") == expected, (height, width)
        for count in (2, 3, 4, 7, 768):
            expected = video_module.smart_resize(
                count, height, width, temporal_factor=2, factor=32, min_pixels=4096, max_pixels=25165824
            )
            assert video_size(count, height, width, video, "video") == expected, (count, height, width)


def test_sampling_is_that_of_transformers(oracle, config):
    from transformers.video_utils import VideoMetadata

    video = read_preprocessing("video", config, None)
    for num_frames in (1, 2, 3, 4, 5, 11, 48, 250, 1000, 20_000):
        for fps in (0.5, 1.0, 2.0, 12.0, 23.976, 25.0, 60.0):
            metadata = VideoMetadata(total_num_frames=num_frames, fps=fps)
            expected = oracle.video_processor.sample_frames(metadata, fps=2).tolist()
            indices = sample_indices(num_frames, num_sampled_frames(num_frames, fps, video))
            assert indices == expected, (num_frames, fps)
            times = oracle._calculate_timestamps(list(expected), fps, 2)
            assert group_times([index / fps for index in indices], 2) == times


def test_settings_of_all_forms(config, folder, tmp_path):
    released = read_preprocessing("image", config, folder)
    assert released == read_preprocessing("image", config, None)
    assert read_preprocessing("video", config, folder) == read_preprocessing("video", config, None)
    settings = json.loads((folder / "preprocessor_config.json").read_text())

    def read(kind="image", file="preprocessor_config.json", **changes):
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        (tmp_path / "x").mkdir()
        content = {key: value for key, value in {**settings, **changes}.items() if value is not None}
        content = {f"{kind}_processor": content} if file == "processor_config.json" else content
        (tmp_path / "x" / file).write_text(json.dumps(content))
        return read_preprocessing(kind, config, tmp_path / "x")

    assert (read(min_pixels=4096, max_pixels=8192).min_pixels, read(max_pixels=8192).max_pixels) == (4096, 8192)
    assert read(size={"shortest_edge": 1024}).min_pixels == 1024
    assert read(file="processor_config.json", size={"shortest_edge": 7, "longest_edge": 9}).max_pixels == 9
    assert read("video", size={"shortest_edge": 7, "longest_edge": 9}).max_pixels == 9, (
        "the pictures' file, without its own"
    )
    assert read("video", "video_preprocessor_config.json", fps=4, max_frames=32).fps == 4
    assert read(do_rescale=False, do_normalize=False).std == (1.0, 1.0, 1.0)
    assert read(resample=2).filter == "bilinear"
    for changes, message in [
        ({"patch_size": 14}, "patch_size 14, config.json has patch_size 16"),
        ({"resample": 0}, "resample 0, expected 2"),
        ({"do_resize": False}, "do_resize false"),
    ]:
        with pytest.raises(ValueError, match=message):
            read(**changes)


def test_a_cap_per_frame(config):
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    settings = read_preprocessing("video", config, None)
    capped = type(settings)(**{**settings.__dict__, "max_tokens_per_frame": 768})
    oracle = Qwen3VLVideoProcessor.__new__(Qwen3VLVideoProcessor)
    oracle.max_video_tokens, oracle.cap_pixels_per_frame = 768, True
    sizes = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "cap_pixels_per_frame": True}
    sizes["size"] = {"shortest_edge": 4096, "longest_edge": 25165824}
    for count, height, width in [(4, 1080, 1920), (700, 1080, 1920), (10, 50, 60)]:
        height_, width_ = video_size(count, height, width, capped, "video")
        assert -(-count // 2) * height_ * width_ // 256 == oracle.get_num_of_video_patches(count, height, width, sizes)


def test_placeholders_in_token_ids(processor):
    """One per picture, or as many as it has features: the same inputs."""
    text = "a<|vision_start|><|image_pad|><|vision_end|>b<|vision_start|><|image_pad|><|vision_end|>"
    expected = processor.prompt(text, media=parts(PICTURES[:2]))
    ids = processor.tokenizer.encode(text)
    for given in (ids, list(expected.token_ids)):
        actual = processor.prompt(token_ids=given, media=parts(PICTURES[:2]))
        assert actual.token_ids == expected.token_ids and np.array_equal(actual.positions, expected.positions)
        assert [medium.spans for medium in actual.media] == [medium.spans for medium in expected.media]
    videos = [{"video": CLIP, "fps": 2}, {"video": CLIP[:4], "fps": 2}]
    text = "<|vision_start|><|video_pad|><|vision_end|> and <|video_pad|>"
    expected = processor.prompt(text, media=parts(videos=videos))
    assert expected.media[0].grid[0] == 5
    actual = processor.prompt(token_ids=expected.token_ids, media=parts(videos=videos))
    assert actual.token_ids == expected.token_ids and np.array_equal(actual.positions, expected.positions)
    assert [medium.spans for medium in actual.media] == [medium.spans for medium in expected.media]


def test_placeholders_in_the_text_of_a_message_are_text(processor):
    """They neither ask for a picture nor take the place of one that is given."""
    text = {"type": "text", "text": "<|vision_start|><|image_pad|><|vision_end|><|video_pad|> Hi"}
    picture = {"type": "image", "image": PICTURES[0]}
    inputs = processor.chat([{"role": "user", "content": [text, picture]}])
    (medium,) = inputs.media
    assert inputs.token_ids.count(IMAGE) == medium.spans[0].length and inputs.token_ids.count(VIDEO) == 0
    assert text["text"] in processor.tokenizer.decode(inputs.token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    "ids,images,videos,message",
    [
        ([1, IMAGE, 2], [], [], "more placeholders of images than the 0 given have use for"),
        ([1, 2], [PICTURES[0]], [], "image 1: the prompt has no placeholder left for it"),
        ([IMAGE], PICTURES[:2], [], "image 2: the prompt has no placeholder left for it"),
        ([1, IMAGE, IMAGE, IMAGE], [PICTURES[0]], [], "image 1: 3 placeholders from token 1 on, expected 1 or 108"),
        ([VIDEO, VIDEO], [], [CLIP], "video 1: 2 placeholders from token 0 on, expected 1"),
        ([VIDEO, 1, VIDEO], [], [CLIP], "video 1: 1 placeholders from token 0 on, expected 6"),
        ([1, -5], [], [], "token id -5, expected 0 or more"),
        ([IMAGE], [np.zeros((2, 900, 3), np.uint8)], [], "image 1: 900 x 2 is an aspect ratio of 450, at most 200"),
        ([IMAGE], [b"junk"], [], "image 1: not an image"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_prompts_that_cannot_be(processor, ids, images, videos, message):
    with pytest.raises(RequestError, match=message):
        processor.prompt(token_ids=ids, media=parts(images, videos))


def test_other_errors(processor, config, folder):
    with pytest.raises(RequestError, match="either a text or token ids"):
        processor.prompt()
    with pytest.raises(RequestError, match="audio 1: the model accepts text and image and video"):
        processor.chat([{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAAA"}}]}])
    bare = Qwen3VlProcessor(config, folder, processor.tokenizer, None, MediaLimits(max_items=1, max_frames=3))
    with pytest.raises(RequestError, match="no chat template"):
        bare.chat([{"role": "user", "content": "x"}])
    with pytest.raises(RequestError, match="image 2: the request has more than 1"):
        bare.prompt("x", media=parts(PICTURES[:2]))
    with pytest.raises(RequestError, match="media has an item of text, expected"):
        bare.prompt("<|image_pad|>", media=["cat.png"])
    with pytest.raises(RequestError, match="video 1: 4 frames, the limit is 3"):
        bare.prompt("<|video_pad|>", media=parts(videos=[CLIP]))


def test_keys_stand_for_content_and_preprocessing(processor, config, folder, tmp_path):
    def key(item, using=processor, kind="image"):
        text = f"<|{kind}_pad|>"
        return using.prompt(text, media=parts(**{f"{kind}s": [item]})).media[0].key

    assert key(PICTURES[0]) == key(Image.fromarray(PICTURES[0])) == key(PICTURES[0].copy())
    assert key(png(PICTURES[0])) == key(png(PICTURES[0])) != key(png(PICTURES[1]))
    changed = PICTURES[0].copy()
    changed[10, 10, 0] ^= 1
    assert key(changed) != key(PICTURES[0])
    other_folder = tmp_path / "other"
    shutil.copytree(folder, other_folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (other_folder / "preprocessor_config.json").write_text(json.dumps({**settings, "image_mean": [0.4, 0.5, 0.5]}))
    other = Qwen3VlProcessor(config, other_folder, processor.tokenizer, None)
    assert key(PICTURES[0], other) != key(PICTURES[0])
    assert key(CLIP, kind="video") != key({"video": CLIP, "fps": 2}, kind="video")


def test_known_media_are_decoded_only_when_loaded(processor):
    data = bytearray(png(PICTURES[0]))
    position = data.index(b"IDAT") + 200
    data[position : position + 8] = bytes(8)
    with pytest.raises(RequestError, match="image 1: cannot be decoded"):
        processor.prompt("<|image_pad|>", media=parts([bytes(data)]))
    asked = []
    inputs = processor.prompt("<|image_pad|>", media=parts([bytes(data)]), is_known=lambda key: not asked.append(key))
    assert asked == [inputs.media[0].key] and inputs.media[0].grid == (1, 18, 24)
    with pytest.raises(RequestError, match="image 1: cannot be decoded"):
        processor.media_buffer.load(inputs.media[0].region)


def test_a_prompt_without_a_place_for_a_picture_is_refused_before_it_is_decoded(processor):
    data = png(PICTURES[0])
    with pytest.raises(RequestError, match="image 1: the prompt has no placeholder left for it"):
        processor.prompt("x", media=parts([data[: len(data) // 2]]))


def test_a_request_waits_for_room_until_it_is_cancelled(config, folder, processor):
    small = Qwen3VlProcessor(config, folder, processor.tokenizer, None)
    small.media_buffer = MediaBuffer(768, torch.bfloat16, 500 * 768 * 2)
    inputs = small.prompt("<|image_pad|>", media=parts(PICTURES[:1]))  # 432 patches
    answers = iter([False, False, True])
    budget = TextBudget(TextLimits(1000, 10), lambda: next(answers))
    with pytest.raises(CancelledError):
        small.prompt("<|image_pad|>", media=parts(PICTURES[:1]), budget=budget)
    del inputs
    gc.collect()
    assert small.prompt("<|image_pad|>", media=parts(PICTURES[:1])).media[0].region.first_row == 0
    with pytest.raises(RequestError, match="media take 1327104 bytes once prepared, the limit is 768000"):
        small.prompt("<|image_pad|>x<|image_pad|>", media=parts([PICTURES[0], PICTURES[0]]))


def test_large_pictures_are_shrunk(processor, config):
    """To the budget of pixels; the patches are those of the fused resize."""
    from tilewright.ops import media

    small = {
        "vision_config": config["vision_config"],
        **{key: config[key] for key in config if key.endswith("token_id")},
    }
    source = picture(700, 900)
    budget = Qwen3VlProcessor(small, None, processor.tokenizer, None, dtype=torch.bfloat16)
    budget.image = type(budget.image)(**{**budget.image.__dict__, "max_pixels": 100_000})
    inputs = budget.prompt("<|image_pad|>", media=parts([source]))
    (medium,) = inputs.media
    height, width = medium.grid[1] * 16, medium.grid[2] * 16
    assert height * width <= 100_000
    expected = media.patches(
        torch.from_numpy(source), height, width, patch_size=16, merge_size=2, mean=(0.5,) * 3, std=(0.5,) * 3
    )
    assert torch.equal(patches_of(budget, medium), expected) and expected.dtype == torch.bfloat16
