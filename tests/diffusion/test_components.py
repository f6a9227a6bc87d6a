"""Folders of pipelines: what is in them, what is loaded when, and what they lack."""

import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
from tiny_pipelines import z_image_pipeline

from tilewright import Diffusion, config
from tilewright.diffusion.pipelines import open_pipeline
from tilewright.host import memory
from tilewright.host.files import CheckpointError
from tilewright.types import RequestError, UnsupportedConfig
from tilewright.weights import cache
from tilewright.weights.cache import DamagedEntryError
from tilewright.weights.layer_stream import AROUND_BYTES

SMALL = {"width": 16, "height": 16, "num_steps": 2, "seed": 1, "output": "latents"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("components") / "z_image"
    z_image_pipeline(path)
    return path


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def rewritten(path, **changes):
    """The JSON file with other values; None removes one."""
    table = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in table.items() if value is not None}))


def test_components_are_loaded_once(folder):
    components = open_pipeline(folder, pack_cache=False).components
    assert components.class_name == "ZImagePipeline" and not components.reports
    with components.use("transformer") as network:
        assert network.dtype == torch.float32
    with components.use("transformer") as again:
        assert again is network and components.loading_s > 0
    components.release()
    assert not components.is_loaded("transformer")


def test_in_low_memory_a_stage_holds_its_own_alone(folder):
    components = open_pipeline(folder, pack_cache=False, low_memory=True).components
    with components.use("transformer"):
        with components.use("vae"):  # a preview
            assert components.is_loaded("transformer")
        assert not components.is_loaded("vae") and components.is_loaded("transformer")
    assert not components.is_loaded("transformer")


def test_low_memory_makes_the_same_image(folder):
    def latents(**options):
        with Diffusion(folder, pack_cache=False, **options) as diffusion:
            return diffusion.generate("a cat", **SMALL).latents

    assert torch.equal(latents(low_memory=True), latents())


def test_packed_weights_come_back_from_the_cache(folder, tmp_path, monkeypatch):
    settings = replace(config.current(), cache_dir=tmp_path / "cache")
    monkeypatch.setattr(config, "current", lambda: settings)
    made = []
    for _ in range(2):
        with Diffusion(folder) as diffusion:
            made.append(diffusion.generate("a cat", **SMALL).latents)
            reports = diffusion.pipeline.components.reports
    assert all(report.from_cache for report in reports.values()) and torch.equal(*made)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it ends the server's process
def test_a_damaged_cache_is_noticed_while_it_is_used(folder, tmp_path, monkeypatch):
    settings = replace(config.current(), cache_dir=tmp_path / "cache")
    monkeypatch.setattr(config, "current", lambda: settings)
    monkeypatch.setattr(cache, "SAMPLE_BLOCKS", 0)  # a start that looks at no block
    with Diffusion(folder) as diffusion:
        diffusion.generate("a cat", **SMALL)
    for path in settings.cache_dir.glob(f"*{cache.SUFFIX}"):
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff\x01\xff\x02")
    with Diffusion(folder) as diffusion:
        components = diffusion.pipeline.components
        with components.use("transformer"):
            components._checks["transformer"].join()
        with pytest.raises(DamagedEntryError, match="was damaged after it was written"):
            diffusion.generate("a cat", **SMALL)
    assert len(list(settings.cache_dir.glob(f"*{cache.SUFFIX}"))) == 1


def test_packed_weights_larger_than_the_memory_are_read_as_they_are_used(folder, tmp_path, monkeypatch, caplog):
    settings = replace(config.current(), cache_dir=tmp_path / "cache")
    monkeypatch.setattr(config, "current", lambda: settings)
    with Diffusion(folder) as diffusion:
        expected = diffusion.generate("a cat", **SMALL).latents
    assert not caplog.text
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    with Diffusion(folder, low_memory=True) as diffusion:
        assert torch.equal(diffusion.generate("a cat", **SMALL).latents, expected)
        assert all(report.from_cache for report in diffusion.pipeline.components.reports.values())
    assert caplog.text.count("more than the memory that is free: it is read from the disk again") == 2


def test_networks_that_do_not_fit_all_at_once_are_told(folder, monkeypatch, caplog):
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    with Diffusion(folder, pack_cache=False, low_memory=True):
        assert not caplog.text
    with Diffusion(folder, pack_cache=False):
        assert "low_memory=True (--low-memory) holds one at a time" in caplog.text


def test_the_dtype_is_as_stored_or_as_asked(folder, copy):
    assert open_pipeline(folder).components.dtype("transformer") == torch.float32
    assert open_pipeline(folder, dtype="bfloat16").components.dtype("vae") == torch.bfloat16
    with pytest.raises(RequestError, match="dtype is 'int8', expected auto, bfloat16 or float32"):
        open_pipeline(folder, dtype="int8")


def test_defaults_that_a_folder_recommends(copy):
    (copy / "generation_config.json").write_text('{"width": 32, "height": 16, "num_steps": 3, "guidance": 1.5}')
    limits = open_pipeline(copy).limits
    params = limits.params("a cat")
    assert (params.width, params.height, params.num_steps, params.guidance) == (32, 16, 3, 1.5)
    (copy / "generation_config.json").write_text('{"width": 33}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: width is 33, expected a multiple of 4"):
        open_pipeline(copy)
    (copy / "generation_config.json").write_text('{"steps": 3}')
    with pytest.raises(CheckpointError, match="has steps, expected some of guidance, height"):
        open_pipeline(copy)


def test_sizes_that_a_folder_allows(copy):
    file = copy / "generation_config.json"
    file.write_text('{"width": 32, "height": 16, "max_side": 32, "max_pixels": 512}')
    limits = open_pipeline(copy).limits
    assert (limits.max_side, limits.max_pixels) == (32, 512)
    with pytest.raises(RequestError, match="1024 pixels, expected at most 512: 20 x 20, say"):
        limits.params("a cat", width=32, height=32)
    for text, message in (
        ('{"max_side": 100000}', "max_side is 100000, expected an integer from 16 to"),
        ('{"max_pixels": "1"}', "max_pixels is '1'"),
    ):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            open_pipeline(copy)


def test_what_is_no_pipeline(folder, tmp_path, copy):
    with pytest.raises(CheckpointError, match=r"has no model_index\.json: expected a pipeline in diffusers' layout"):
        open_pipeline(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist: expected a folder or a hub id"):
        open_pipeline(tmp_path / "nothing" / "here")
    rewritten(copy / "model_index.json", _class_name="SomePipeline")
    with pytest.raises(UnsupportedConfig, match=r"is of a SomePipeline, expected one of .*ZImagePipeline"):
        open_pipeline(copy)


def test_a_component_that_is_missing_is_named(copy):
    shutil.rmtree(copy / "vae")
    with pytest.raises(CheckpointError, match="has no vae, which a ZImagePipeline needs"):
        open_pipeline(copy)


def test_a_component_of_another_kind_is_named(copy):
    rewritten(copy / "text_encoder" / "config.json", model_type="gpt2")
    message = "text_encoder: model_type is 'gpt2', expected one of"
    with Diffusion(copy, pack_cache=False) as diffusion, pytest.raises(UnsupportedConfig, match=message):
        diffusion.generate("a cat", **SMALL)


def test_sharded_weights_under_diffusers_names(folder, copy):
    from safetensors.torch import load_file, save_file

    path = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = sorted(load_file(path).items())
    path.unlink()
    names = {}
    for i, part in enumerate((tensors[::2], tensors[1::2])):
        file = f"diffusion_pytorch_model-0000{i + 1}-of-00002.safetensors"
        save_file(dict(part), copy / "transformer" / file)
        names |= dict.fromkeys(dict(part), file)
    index = copy / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    with Diffusion(folder, pack_cache=False) as whole, Diffusion(copy, pack_cache=False) as sharded:
        made = [diffusion.generate("a cat", **SMALL).latents for diffusion in (whole, sharded)]
    assert torch.equal(*made)


def test_a_hub_id_is_found_in_the_hubs_cache(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="org/tiny-z is not on this machine, and the hub cannot be reached"):
        Diffusion("org/tiny-z")
    repository, commit = tmp_path / "models--org--tiny-z", "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(folder, repository / "snapshots" / commit)
    with Diffusion("org/tiny-z", pack_cache=False) as diffusion:
        assert diffusion.generate("a cat", **SMALL).settings["model"] == "tiny-z"


def resident_by_file(folder):
    """Bytes that are resident of the entries of a pack cache."""
    sizes, name = Counter(), None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            name = line.split(maxsplit=5)[5] if str(folder) in line else None
        elif name and line.startswith("Rss:"):
            sizes[name] += int(line.split()[1]) * 1024
    return sizes


def test_streamed_layers_take_the_memory_they_are_given(tmp_path, monkeypatch):
    """Layers of 9 MB at most: two at a time, and one that stays."""
    z_image_pipeline(tmp_path / "model", dim=384, n_heads=16, n_kv_heads=16, n_layers=6)
    settings = replace(config.current(), cache_dir=tmp_path / "cache")
    monkeypatch.setattr(config, "current", lambda: settings)
    size = {"width": 16, "height": 16, "num_steps": 2, "seed": 1, "output": "latents"}
    with Diffusion(tmp_path / "model") as diffusion:
        expected = diffusion.generate("a cat", **size).latents
    seen = []

    def note(step, num_steps, latents):
        seen.append(max(resident_by_file(settings.cache_dir).values()))

    with Diffusion(tmp_path / "model", stream_layers="30MB") as diffusion:
        assert torch.equal(diffusion.generate("a cat", **size, on_step=note).latents, expected)
        stream = diffusion.pipeline.components._networks["transformer"].layers[0]._stream
        assert diffusion.platform.streams_layers and 0 < stream.num_kept < len(stream.ranges)
    layers = sum(one.size_bytes for one in stream.ranges)
    others = max(path.stat().st_size for path in settings.cache_dir.glob(f"*{cache.SUFFIX}")) - layers
    assert layers > 60e6 and len(seen) == 2
    assert 7e6 < max(seen) <= 30e6 + others + 2 * AROUND_BYTES
    with (
        Diffusion(tmp_path / "model", stream_layers=1_000_000) as diffusion,
        pytest.raises(RequestError, match="stream_layers is 1000000 bytes, expected"),
    ):
        diffusion.generate("a cat", **size)


@pytest.mark.parametrize("options", [{"pack_cache": False}, {"backend": "torch"}], ids=str)
def test_layers_are_streamed_from_the_pack_cache(folder, options):
    with pytest.raises(RequestError, match="stream_layers reads layers from the pack cache"):
        Diffusion(folder, stream_layers="1GB", **options)
