"""How long images take, told before: by runs of this size, of another size, or by operations."""

import json
from dataclasses import replace

import pytest
from tiny_pipelines import z_image_pipeline

from tilewright import Diffusion, config
from tilewright.diffusion.expected import FILE, MAX_RUNS, SHARE_OF_PEAK, PastTimes, Work, estimated, sizes_in_time
from tilewright.diffusion.params import Limits, PipelineTimings

LIMITS = Limits(16, 64, 64, 4, 0.0, max_frames=33, frame_multiple=4)
WORK = Work(num_parameters=1000, attention_channels=500, size_multiple=16, frame_multiple=4)
TOOK = PipelineTimings(load_s=5.0, encode_s=1.0, denoise_s=9.0, decode_s=2.0, steps_s=[3.0, 2.0, 2.0, 2.0])


def params(**settings):
    return LIMITS.params("a cat", **settings)


def test_a_run_of_the_same_size_is_what_is_expected(tmp_path):
    times = PastTimes(tmp_path / "made" / "here", "model")
    assert times.expected(params(), WORK, False) is None
    times.note(params(), TOOK)
    for known in (times, PastTimes(tmp_path / "made" / "here", "model")):
        assert known.expected(params(), WORK, False).seconds == 5 + 1 + 4 * 2 + 2  # without the slow first step
        expected = known.expected(params(num_steps=10), WORK, True)
        assert expected.seconds == 1 + 10 * 2 + 2 and "the last one of this size" in expected.basis
    assert PastTimes(tmp_path / "made" / "here", "other").expected(params(), WORK, False) is None
    assert PastTimes(None, "model").expected(params(), WORK, False) is None


def test_loading_is_remembered_while_networks_stay_in_memory():
    times = PastTimes(None, "model")
    times.note(params(), TOOK)
    times.note(params(), replace(TOOK, load_s=0.0, encode_s=0.5))
    assert times.expected(params(), WORK, False).seconds == 5 + 0.5 + 4 * 2 + 2


def test_another_size_is_scaled_by_its_operations():
    times = PastTimes(None, "model")
    times.note(params(), TOOK)
    tokens, more = 16, 64 * 2  # 128 x 128 of 5 frames: 4 times the patches, 2 latent frames
    ratio = (2 * 1000 * more + 4 * 500 * more**2) / (2 * 1000 * tokens + 4 * 500 * tokens**2)
    expected = times.expected(params(width=128, height=128, num_frames=5), WORK, True)
    assert expected.seconds == pytest.approx(1 + 4 * 2 * ratio + 2 * 4 * 5)
    assert expected.basis == "scaled from what 64 x 64 took"
    assert times.expected(params(guidance=4.0), WORK, True) is None  # two prompts: another thing
    times.note(params(width=16, height=16), TOOK)  # later, and further from what is asked
    assert times.expected(params(width=128, height=128), WORK, True).basis == "scaled from what 64 x 64 took"


def test_without_a_run_operations_are_counted():
    expected = estimated(params(n=2), WORK, 2, 1e6)
    operations = 2 * 4 * 2 * (2 * 1000 * 16 + 4 * 500 * 16**2)
    assert expected.seconds == pytest.approx(operations / (SHARE_OF_PEAK * 1e6)) and "estimated" in expected.basis


def test_sizes_that_take_no_longer():
    def seconds(one):
        return one.width * one.height / 1024

    limits = replace(LIMITS, max_side=512, max_pixels=512 * 256)
    wide = limits.params("a cat", width=512, height=256)
    assert sizes_in_time(wide, limits, 128.0, seconds) == [(512, 256), (352, 352)]
    assert sizes_in_time(wide, limits, 32.0, seconds) == [(256, 128), (176, 176)]
    assert sizes_in_time(replace(wide, width=64, height=64), limits, 4.0, seconds) == [(64, 64)]
    assert sizes_in_time(wide, limits, 0.2, seconds) == []
    assert next(limits.sizes_like(100, 1000)) == (48, 512) and next(limits.sizes_like(1000, 100)) == (512, 48)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": 3}', '{"model": [{"width": 1}, 7, null]}'])
def test_a_file_that_is_none_is_written_anew(text, tmp_path):
    (tmp_path / FILE).write_text(text)
    times = PastTimes(tmp_path, "model")
    assert times.expected(params(), WORK, False) is None
    times.note(params(), TOOK)
    assert list(json.loads((tmp_path / FILE).read_text())) == ["model"]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    times = PastTimes(tmp_path / "file", "model")
    times.note(params(), TOOK)
    assert times.expected(params(), WORK, True).seconds == 11


def test_the_latest_runs_are_kept(tmp_path):
    times = PastTimes(tmp_path, "model")
    for n in range(1, MAX_RUNS + 3):
        times.note(replace(params(), n=n), TOOK)
    (runs,) = json.loads((tmp_path / FILE).read_text()).values()
    assert [run["n"] for run in runs] == list(range(3, MAX_RUNS + 3))


def test_a_model_remembers_what_its_images_took(tmp_path, monkeypatch):
    folder = tmp_path / "z_image"
    z_image_pipeline(folder)
    settings = replace(config.current(), cache_dir=tmp_path / "cache")
    monkeypatch.setattr(config, "current", lambda: settings)
    size = {"width": 16, "height": 16, "num_steps": 2}
    with Diffusion(folder) as diffusion:
        wanted = diffusion.params("a cat", **size)
        first = diffusion.expected(wanted)
        assert "estimated" in first.basis and first.seconds > 0
        timings = diffusion.run(wanted).timings
        assert diffusion.expected(wanted).seconds < timings.total_s  # it is loaded now
    with Diffusion(folder) as diffusion:
        expected = diffusion.expected(wanted)
        assert expected.seconds == pytest.approx(timings.total_s - timings.steps_s[0] + timings.steps_s[1], rel=0.1)
        assert "the last one of this size" in expected.basis
    with Diffusion(folder, dtype="bfloat16") as diffusion:
        assert "estimated" in diffusion.expected(wanted).basis
