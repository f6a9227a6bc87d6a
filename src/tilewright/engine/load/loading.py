"""Loads a model with its processor and tokenizer by name; chooses a weight format if the user does not."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilewright import config as settings
from tilewright.engine.options import EngineOptions
from tilewright.host import memory
from tilewright.host.files import CheckpointError, read_optional_json
from tilewright.inputs.chat_template import ChatTemplate
from tilewright.inputs.isolation.opener import Opener
from tilewright.inputs.processor import TextProcessor
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.layers import partition, precision
from tilewright.layers.partition import Partition
from tilewright.models.protocol import Family, Model, Processor
from tilewright.models.qwen3_omni.model import SpeechModel
from tilewright.models.registry import family_of
from tilewright.models.text_config import config_as_stored
from tilewright.ops.linear import linear, pack_weight
from tilewright.ops.packed import weight_format
from tilewright.parallel.group import Group, SingleGroup
from tilewright.types import RequestError, SamplingParams
from tilewright.weights import embedded
from tilewright.weights.checkpoint import Checkpoint, open_checkpoint
from tilewright.weights.load import DTYPES, LoadReport, load

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Network:
    """A rank's part of a model with packed weights, and the checkpoint they come from."""

    model: Model
    dtype: torch.dtype
    checkpoint: Checkpoint
    config: Mapping[str, Any]
    family: Family
    report: LoadReport


@dataclass(frozen=True)
class LoadedModel:
    name: str
    model: Model
    processor: Processor
    tokenizer: Tokenizer
    dtype: torch.dtype
    sampling_defaults: Mapping[str, Any]  # recommended by the checkpoint's authors
    report: LoadReport
    speech: SpeechModel | None = None  # on this rank alone


def load_network(name: str | Path, options: EngineOptions, group: Group | None = None, *, block: int = 1) -> Network:
    """Load this rank's part of the model in a folder, a GGUF file or behind a hub id.

    A multi-token predictor is loaded only if tokens are drafted. `block`: entries that must not be split because they
    share a scale.
    """
    formats = precision.named(options.quantize)
    checkpoint = open_checkpoint(name, options.mmproj)
    config = config_as_stored(checkpoint)
    family = family_of(config)
    shapes = checkpoint.shapes
    if not options.is_drafting and (prefix := family.predictor_prefix) is not None:
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith(prefix)}
    if formats.keeps_quants:
        stored = [format for name in shapes if (format := checkpoint.quantized_as(name)) is not None]
        block = max([block, *(group_size for _, group_size in stored)])
    with partition.use(Partition(group or SingleGroup(), max(block, formats.block))) as parts, precision.use(formats):
        model = family.build(config, shapes)
    parts.warn()
    weight_dtype = _dtype(options.dtype, config)
    # The embedded model packs in 80 ms (10 from a cache), not worth evicting a large model's entry.
    is_cached = options.pack_cache and not embedded.is_embedded(name)
    report = load(
        model,
        checkpoint,
        dtype=weight_dtype,
        rename=model.checkpoint_name,
        cache_dir=settings.current().cache_dir if is_cached else None,
        progress=options.progress,
        keep_quants=formats.keeps_quants,
    )
    if len(report.bytes_by_format) > 1:
        _log.info("%s: %s", checkpoint.path, report.packed_as)
    return Network(model, weight_dtype, checkpoint, config, family, report)


def load_model(
    name: str | Path, options: EngineOptions, *, opener: Opener | None = None, group: Group | None = None
) -> LoadedModel:
    """Load a model as `load_network` does, with its processor and tokenizer."""
    network = load_network(name, options, group)
    checkpoint, family = network.checkpoint, network.family
    own_name = embedded.name_of(name)
    tokenizer = _tokenizer(checkpoint)
    sources = tokenizer.chat_template
    template = None
    if sources:
        template = ChatTemplate(sources, tokenizer.special_tokens, allow_special_tokens=options.allow_special_tokens)
    processor: Processor
    if family.make_processor is None:
        processor = TextProcessor(own_name, tokenizer, template, checkpoint.missing)
    else:
        processor = family.make_processor(
            network.config,
            checkpoint.files,
            tokenizer,
            template,
            options.media_limits,
            dtype=network.dtype,
            opener=opener,
        )
    defaults = sampling_defaults(checkpoint.files)
    speech = load_speech(network, options, is_split=group is not None)
    return LoadedModel(own_name, network.model, processor, tokenizer, network.dtype, defaults, network.report, speech)


def load_speech(network: Network, options: EngineOptions, *, is_split: bool = False) -> SpeechModel | None:
    """Load the networks that speak a model's answers, whole on this rank; None if its checkpoint has no voice.

    `is_split`: the model is split over ranks, and its table of token embeddings with it.
    """
    if network.family.build_speech is None:
        return None
    formats = precision.named(options.quantize)
    with partition.use(Partition(SingleGroup(), formats.block)), precision.use(formats):
        speech = network.family.build_speech(network.config, network.checkpoint.shapes, owns_embeddings=is_split)
    if speech is not None:
        load(
            speech,
            network.checkpoint,
            dtype=network.dtype,
            rename=speech.checkpoint_name,
            cache_dir=settings.current().cache_dir if options.pack_cache else None,
            keep_quants=formats.keeps_quants,
        )
    return speech


def _dtype(name: str, config: Mapping[str, Any]) -> torch.dtype:
    """Return the type of weights, keys and values; "auto": fp32 if the checkpoint's is, else bf16."""
    if name == "auto":
        text = config.get("text_config") or {}
        stored = next(
            (table[key] for table in (config, text) for key in ("dtype", "torch_dtype") if key in table), None
        )
        name = "float32" if stored == "float32" else "bfloat16"
    if name not in DTYPES:
        raise RequestError(f"dtype is {name!r}, expected auto, {' or '.join(DTYPES)}")
    return DTYPES[name]


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.files is None:
        try:
            return Tokenizer.from_gguf(checkpoint.tokenizer_metadata or {})
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint.path}: {error}") from error
    return Tokenizer.from_folder(checkpoint.files)


def sampling_defaults(folder: Path | None) -> dict[str, Any]:
    """Return the sampling of generation_config.json: greedy if do_sample is false, empty if there is no file.

    Invalid values are left out with a warning, since every request with them would be refused.
    """
    stored = read_optional_json(folder / "generation_config.json") if folder else {}
    if stored.get("do_sample") is False:
        return {"temperature": 0.0}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: stored[name] for name in names if stored.get(name) is not None}
    if given.get("top_k") == -1:  # -1 means all tokens, as 0 does here
        given["top_k"] = 0
    for name, value in list(given.items()):
        try:
            SamplingParams(**{name: value})
        except (RequestError, TypeError) as error:
            _log.warning("%s of generation_config.json is not used: %s", name, error)
            del given[name]
    return given


AUTO = "auto"

# Share of the free memory for weights: the rest is for keys and values, and for the results of a step.
_SHARE = 0.7
# Gain in speed that a format must have over one that rounds less.
_LEAST_GAIN = 1.2
# The product that is timed: of one token, as in decoding. Several weights in turn, so that none stays in the caches: 8
# in bf16 take 64 MiB.
_ROWS, _COLUMNS, _NUM_WEIGHTS, _ROUNDS = 2048, 2048, 8, 3


def choose_format(model: str | Path, mmproj: str | None = None) -> str | None:
    """Choose `quantize` for a model, a name for `layers.precision.named`; the reason is logged in one line."""
    checkpoint = open_checkpoint(model, mmproj)
    chosen, reason = _choice(checkpoint, memory.available_bytes())
    # A warning, since commands show those: users who leave the choice to us should see it.
    _log.warning("quantize auto: %s, because %s", chosen or "as the checkpoint is", reason)
    return chosen


def _choice(checkpoint: Checkpoint, available_bytes: int) -> tuple[str | None, str]:
    if any(checkpoint.quantized_as(name) for name in checkpoint.shapes):
        return None, "it is quantised already"
    limit = _SHARE * available_bytes
    plain = sum(checkpoint.size_bytes(name) for name in checkpoint.shapes)
    num_values = sum(math.prod(shape) for shape in checkpoint.shapes.values())
    sizes = {"int8": num_values * 1.0, "fp8": num_values * (1 + 4 / 128)}
    room = f"of {available_bytes / 1e9:.1f} GB free"
    if sizes["int8"] > limit:
        return "int4", f"int8 would take {sizes['int8'] / 1e9:.1f} GB {room}"
    seconds = {name: _seconds(name) for name in (None, "fp8", "int8")}
    # fp8 quantises weights alone: int8 must be clearly faster to be preferred.
    best = "int8" if seconds["fp8"] > _LEAST_GAIN * seconds["int8"] or sizes["fp8"] > limit else "fp8"
    gain = seconds[None] / seconds[best]
    if plain <= limit and gain < _LEAST_GAIN:
        return None, f"{best} would be {gain:.2f} x as fast here, and {plain / 1e9:.1f} GB fit {room}"
    return best, f"a product is {gain:.2f} x as fast as in bf16 here, and {sizes[best] / 1e9:.1f} GB fit {room}"


def _seconds(name: str | None) -> float:
    """Return the time of a product of one token with weights in the named format, or in bf16 for None."""
    products = precision.named(name).products
    format = torch.bfloat16 if products is None else weight_format(*products)
    weight = torch.zeros(_ROWS, _COLUMNS, dtype=torch.bfloat16)
    weights = [pack_weight(weight, dtype=format) for _ in range(_NUM_WEIGHTS)]
    x = torch.ones(1, _COLUMNS, dtype=torch.bfloat16)

    def once() -> float:
        start_s = time.perf_counter()
        for packed in weights:
            linear(x, packed)
        return time.perf_counter() - start_s

    return min(once() for _ in range(_ROUNDS + 1))
