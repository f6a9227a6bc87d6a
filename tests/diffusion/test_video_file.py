"""Videos written to files come back as they were, as players read them."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from tilewright.inputs.media import MediaLimits
from tilewright.inputs.video import read_video
from tilewright.outputs import video
from tilewright.outputs.video import check_video_name, encode_video
from tilewright.types import RequestError

HEIGHT, WIDTH = 48, 64


def clip(num_frames=9):
    """A bright block that moves over strong colours."""
    frames = np.zeros((num_frames, HEIGHT, WIDTH, 3), np.uint8)
    frames[:, :24], frames[:, 24:] = (200, 30, 40), (20, 60, 180)
    for i in range(num_frames):
        frames[i, 16:32, 4 * i : 4 * i + 16] = (30, 220, 60)
    return frames


def decoded(data):
    found = read_video(data, "video", MediaLimits())
    return found, np.stack(list(found.frames(range(found.num_frames))))


@pytest.mark.parametrize("fps", [16, 24, 23.976])
@pytest.mark.parametrize("num_frames", [1, 9])
def test_an_mp4_has_the_frames_and_the_rate(num_frames, fps):
    frames = clip(num_frames)
    found, pixels = decoded(encode_video(frames, fps))
    assert (found.num_frames, found.height, found.width) == (num_frames, HEIGHT, WIDTH)
    if num_frames > 1:
        assert found.fps == pytest.approx(fps, rel=1e-3)
    errors = np.abs(pixels.astype(int) - frames)
    assert errors.mean() < 5  # colours have half the size: edges between strong ones are not as sharp
    for i in range(num_frames):
        assert errors[i, [4, 44, 24], [60, 60, 4 * i + 8]].max() <= 4  # within each colour


def test_colours_are_said_to_be_what_they_are():
    import av

    with av.open(io.BytesIO(encode_video(clip(3), 16))) as container:
        frame = next(container.decode(video=0))
        assert (frame.colorspace, frame.color_range) == (video.BT709, video.LIMITED_RANGE)
        assert container.streams.video[0].codec_context.name == "h264"
        red = frame.to_ndarray(format="yuv420p")[8, 32]
    # Luma of (200, 30, 40) by BT.709 in 16 to 235; by BT.601 it would be 83.
    assert abs(int(red) - 73) <= 2


def test_settings_are_in_the_comment():
    import av

    settings = {"prompt": "a red circle, rot wie Öl", "seed": 7}
    with av.open(io.BytesIO(encode_video(clip(2), 16, settings=settings))) as container:
        assert json.loads(container.metadata["comment"]) == settings


@pytest.mark.parametrize("suffix", [".webp", ".png", ".gif"])
def test_animated_images_have_every_frame(suffix):
    frames = clip()
    with Image.open(io.BytesIO(encode_video(frames, 16, suffix))) as image:
        assert image.n_frames == len(frames)
        image.seek(4)
        error = np.abs(np.asarray(image.convert("RGB")).astype(int) - frames[4]).max()
        assert error <= (3 if suffix == ".gif" else 0)


def test_another_name_is_refused():
    with pytest.raises(RequestError, match=r"clip.mov ends in .mov, expected one of .mp4"):
        check_video_name("clip.mov")
    with pytest.raises(RequestError, match="ends in nothing"):
        check_video_name("clip")


def test_odd_sides_lose_a_row_or_a_column():
    found, _ = decoded(encode_video(clip()[:, :47, :63], 16))
    assert (found.height, found.width) == (46, 62)


def test_without_an_encoder_for_h264_the_other_is_named(monkeypatch, caplog):
    monkeypatch.setattr(video, "MP4_ENCODERS", ("no_such_encoder", "mpeg4"))
    found, _ = decoded(encode_video(clip(), 16))
    assert found.num_frames == 9
    assert "MPEG-4 part 2" in caplog.text
    monkeypatch.setattr(video, "MP4_ENCODERS", ("no_such_encoder",))
    with pytest.raises(RequestError, match="no encoder for MP4"):
        encode_video(clip(), 16)
