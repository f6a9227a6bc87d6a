import io
import re

import numpy as np
import pytest
import torch
from clips import all_frames, damages, moving_picture, rotated, write_clip
from PIL import Image

from tilewright.inputs.isolation.opener import IsolatedOpener, Opener
from tilewright.inputs.media import MediaLimits, MediaPart
from tilewright.inputs.video import open_video
from tilewright.types import RequestError


def opened(source, fps=None, **limits):
    return open_video(MediaPart("video", "video 1", source, fps), MediaLimits(**limits))


CLIPS = {
    "mp4, B-frames": ("a.mp4", {"options": {"bf": "2", "g": "12"}}),
    "mp4, key frames alone": ("b.mp4", {"options": {"g": "1"}}),
    "mp4, one key frame": ("c.mp4", {"options": {"g": "1000"}}),
    "h264, open groups": ("d.mp4", {"codec": "libx264", "options": {"g": "10", "x264-params": "open-gop=1"}}),
    "webm": ("e.webm", {"codec": "libvpx-vp9", "options": {"cpu-used": "8"}}),
    "avi": ("f.avi", {}),
    "matroska": ("g.mkv", {"options": {"bf": "2"}}),
    "transport stream": ("h.ts", {"codec": "mpeg2video", "options": {"bf": "2"}}),
}  # fmt: skip


@pytest.mark.parametrize("name", CLIPS)
def test_sampled_frames_are_those_of_a_whole_decode(name, tmp_path):
    file, options = CLIPS[name]
    data = write_clip(tmp_path / file, 60, **options)
    expected = all_frames(tmp_path / file)
    video = opened(tmp_path / file)
    assert (video.num_frames, video.height, video.width) == (60, 48, 64)
    assert video.fps == pytest.approx(25) and video.times_s is None
    assert video.digest == opened(data).digest
    for indices in ([0], [59], [0, 20, 39, 59], [11, 12, 13], [9, 10, 31], list(range(60))):
        frames = list(video.frames(indices))
        assert len(frames) == len(indices)
        assert np.array_equal(np.stack(frames), expected[indices]), indices


def test_groups_without_a_sampled_frame_are_not_decoded(tmp_path, monkeypatch):
    from tilewright.inputs import video as module

    write_clip(tmp_path / "a.mp4", 100, options={"g": "10", "bf": "0"})
    video = opened(tmp_path / "a.mp4")
    flags = []
    real = module._needed
    monkeypatch.setattr(module, "_needed", lambda *args: flags.extend(real(*args)) or real(*args))
    list(video.frames([3, 55]))
    assert flags == [index in (*range(4), *range(50, 56)) for index in range(100)]


def test_a_steady_rate_gives_times_by_index(tmp_path):
    write_clip(tmp_path / "a.mp4", 30, fps=10)
    sampled = opened(tmp_path / "a.mp4").sample([0, 10, 29])
    assert sampled.indices == (0, 10, 29) and sampled.times_s == (0.0, 1.0, 2.9)


def test_a_varying_rate_is_sampled_by_time(tmp_path):
    """40 frames in 0.8 seconds, then 40 in 8: samples spread over the time, not over the count."""
    steps = [20] * 40 + [200] * 39
    times_ms = np.cumsum([0, *steps]).tolist()
    write_clip(tmp_path / "a.mp4", 80, times_ms=times_ms)
    video = opened(tmp_path / "a.mp4")
    assert video.num_frames == 80 and video.times_s is not None
    sampled = video.sample(np.linspace(0, 79, 10).round().astype(int).tolist())
    assert sampled.indices[0] == 0 and sampled.indices[-1] == 79
    gaps = np.diff(sampled.times_s)
    assert np.allclose(gaps, times_ms[-1] / 1000 / 9, atol=0.21)
    expected = all_frames(tmp_path / "a.mp4")[list(sampled.indices)]
    assert np.array_equal(np.stack(list(video.frames(sampled.indices))), expected)


def test_a_dropped_frame_leaves_the_rate_even(tmp_path):
    times_ms = [40 * index for index in range(50) if index != 20]
    write_clip(tmp_path / "a.mp4", 49, times_ms=times_ms)
    video = opened(tmp_path / "a.mp4")
    assert video.num_frames == 49 and video.times_s is None


def test_a_long_pause_gives_the_same_frame_again(tmp_path):
    write_clip(tmp_path / "a.mp4", 5, times_ms=[0, 100, 200, 300, 5000])
    video = opened(tmp_path / "a.mp4")
    sampled = video.sample([0, 1, 2, 3, 4])
    assert sampled.indices == (0, 3, 3, 4, 4)
    assert len(list(video.frames(sampled.indices))) == 5


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_rotation(degrees, tmp_path):
    data = write_clip(tmp_path / "a.mp4", 4)
    upright = rotated(data, degrees)
    video = opened(upright)
    frames = np.stack(list(video.frames([0, 3])))
    expected = np.rot90(all_frames(tmp_path / "a.mp4")[[0, 3]], -degrees // 90, axes=(1, 2))
    assert (video.height, video.width) == expected.shape[1:3]
    assert np.array_equal(frames, expected)
    assert video.digest != opened(data).digest


def test_an_animated_gif():
    frames = [Image.fromarray(moving_picture(index * 20)) for index in range(6)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=100)
    video = opened(buffer.getvalue())
    assert (video.num_frames, video.height, video.width) == (6, 48, 64) and video.fps == pytest.approx(10)
    assert len(list(video.frames([0, 5]))) == 2


def animation(form, duration, num_frames=6, **options):
    frames = [Image.fromarray(moving_picture(index * 20)) for index in range(num_frames)]
    buffer = io.BytesIO()
    options |= {"save_all": True, "append_images": frames[1:], "duration": duration}
    frames[0].save(buffer, form, **options, **({"lossless": True} if form == "WEBP" else {}))
    return buffer.getvalue()


@pytest.mark.parametrize("isolates", [False, True])
@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
@pytest.mark.parametrize("duration", [0, 50, 200])
def test_animations_of_all_forms(form, duration, isolates):
    """A delay of 0 is taken as 0.1 s, as browsers take it."""
    opener = IsolatedOpener() if isolates else Opener()
    try:
        video = opener.open_video(MediaPart("video", "video 1", animation(form, duration)), MediaLimits())
        assert (video.num_frames, video.height, video.width) == (6, 48, 64)
        assert video.fps == pytest.approx(1000 / (duration or 100))
        frames = list(video.frames([0, 2, 2, 5]))
    finally:
        opener.close()
    for frame, index in zip(frames, [0, 2, 2, 5], strict=True):
        off = np.abs(frame.astype(int) - moving_picture(index * 20)).mean()
        assert off == 0 if form != "GIF" else off < 12  # 256 colours


def test_a_gif_that_says_its_delays_are_0():
    data = re.sub(rb"(\x21\xf9\x04.)..", rb"\1\0\0", animation("GIF", 100), flags=re.DOTALL)
    video = opened(data)
    assert video.num_frames == 6 and video.fps == pytest.approx(10) and len(list(video.frames(range(6)))) == 6


@pytest.mark.parametrize("form", ["WEBP", "PNG"])
def test_an_animation_with_delays_of_its_own(form):
    video = opened(animation(form, [100, 1000, 100, 500, 100, 200]))
    assert video.times_s == pytest.approx((0, 0.1, 1.1, 1.2, 1.7, 1.8)) and video.fps == pytest.approx(3)
    with pytest.raises(RequestError, match="limit is 1"):
        open_video(MediaPart("video", "video 1", animation(form, 1000)), MediaLimits(max_duration_s=1))
    with pytest.raises(RequestError, match="video 1"):
        data = animation(form, 100)
        list(opened(data[: len(data) // 2]).frames([0, 5]))


def test_a_webp_with_a_chunk_of_odd_length():
    """Chunks begin at even places: a byte of padding, which the length does not count, follows an odd one."""
    whole = animation("WEBP", [100, 1000, 100, 500, 100, 200])
    first_frame = whole.index(b"ANMF")
    extra = b"XTRA" + (3).to_bytes(4, "little") + b"odd" + b"\0"
    length = (len(whole) - 8 + len(extra)).to_bytes(4, "little")
    data = whole[:4] + length + whole[8:first_frame] + extra + whole[first_frame:]
    assert opened(data).times_s == opened(whole).times_s


def test_an_apng_whose_first_picture_is_not_part_of_it():
    video = opened(animation("PNG", 100, default_image=True))
    assert video.num_frames == 5
    assert np.array_equal(next(iter(video.frames([0]))), moving_picture(20))


def test_a_still_picture_is_one_frame():
    assert opened(animation("PNG", 100, num_frames=1)).num_frames == 1


def test_frames_given_as_they_are():
    frames = np.stack([moving_picture(index) for index in range(6)])
    video = opened(frames)
    assert (video.num_frames, video.fps, video.height, video.width) == (6, 24.0, 48, 64)
    assert np.array_equal(np.stack(list(video.frames([1, 4]))), frames[[1, 4]])
    assert opened(frames, fps=2).fps == 2 and opened(frames, fps=2).digest != video.digest
    tensor = torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 255
    assert np.array_equal(np.stack(list(opened(tensor).frames(range(6)))), frames)
    pictures = [Image.fromarray(frame) for frame in frames]
    assert np.array_equal(np.stack(list(opened(pictures).frames(range(6)))), frames)
    assert opened(list(frames)).digest == opened(pictures).digest


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7])
@pytest.mark.parametrize("name", ["mp4", "mp4, header first", "webm"])
def test_truncated_files_are_named(name, share, tmp_path):
    if name == "webm":
        data = write_clip(tmp_path / "a.webm", 60, codec="libvpx-vp9", options={"cpu-used": "8"})
    else:
        options = {"movflags": "faststart"} if name == "mp4, header first" else {}
        data = write_clip(tmp_path / "a.mp4", 60, container_options=options)
    with pytest.raises(RequestError, match=r"^video 1: "):
        video = opened(data[: int(len(data) * share)])
        list(video.frames([0, video.num_frames // 2, video.num_frames - 1]))


@pytest.mark.parametrize(
    "source,message",
    [
        (b"no video at all, just some text", "video 1: cannot be decoded: the file is damaged, cut short"),
        ("no/such/file.mp4", "video 1: no/such/file.mp4 cannot be read"),
        (np.zeros((4, 4, 3), np.uint8), r"video 1: its shape is \[4, 4, 3\], expected \[frames, H, W, 3\]"),
        ([], "video 1: it has no frames"),
        ([np.zeros((8, 8, 3), np.uint8), np.zeros((8, 9, 3), np.uint8)], "frame 2: 9 x 8, the first frame is 8 x 8"),
        (3.5, "video 1: it is a float, expected bytes, a path, an array of frames or a list of images"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_what_is_no_video(source, message):
    with pytest.raises(RequestError, match=message):
        opened(source)


def test_a_file_without_video(tmp_path):
    import av

    path = tmp_path / "a.mka"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(RequestError, match="video 1: the file has no video"):
        opened(path)


@pytest.mark.parametrize("kind", ["hls", "concat"])
def test_playlists_open_nothing(kind, tmp_path):
    path = tmp_path / "a.mp4"
    write_clip(path, 10)
    playlist = {
        "hls": f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile://{path}\n#EXT-X-ENDLIST\n",
        "concat": f"ffconcat version 1.0\nfile {path}\n",
    }[kind]
    with pytest.raises(RequestError, match="video 1: cannot be decoded"):
        opened(playlist.encode())


def test_limits(tmp_path):
    data = write_clip(tmp_path / "a.mp4", 50, fps=10)
    with pytest.raises(RequestError, match="video 1: 64 x 48 = 3072 pixels, the limit is 3000"):
        opened(data, max_pixels=3000)
    with pytest.raises(RequestError, match=r"video 1: 5\.0 seconds, the limit is 4"):
        opened(data, max_duration_s=4)
    with pytest.raises(RequestError, match=r"video 1: .* bytes or more, the limit is 1000"):
        opened(data, max_bytes=1000)
    with pytest.raises(RequestError, match=r"video 1: 5\.0 seconds, the limit is 4"):
        opened(np.zeros((10, 8, 8, 3), np.uint8), fps=2, max_duration_s=4)


@pytest.mark.parametrize(
    "suffix,codec", [("mp4", "mpeg4"), ("webm", "libvpx-vp9"), ("avi", "mpeg4"), ("ts", "mpeg2video")]
)
def test_any_damage_is_a_clear_error_or_none(suffix, codec, tmp_path):
    data = write_clip(tmp_path / f"a.{suffix}", 20, codec=codec)
    outcomes = set()
    for damaged in damages(data, 100):
        try:
            video = opened(damaged, max_pixels=2**20)
            assert all(
                frame.shape == (video.height, video.width, 3) for frame in video.frames([0, video.num_frames - 1])
            )
            outcomes.add("decoded")
        except RequestError as error:
            assert str(error).startswith("video 1: ")
            outcomes.add("refused")
    assert outcomes == {"decoded", "refused"}
