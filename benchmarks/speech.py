"""How fast a Qwen3-Omni hears, writes and speaks, with random weights: python benchmarks/speech.py [CONFIG.json]

Without a config: about a billion parameters. With a whole model's config.json, that shape; weights are made in memory,
in bf16, once. `--only` chooses sections:

  sound   seconds of sound that the audio tower encodes a second
  text    tokens a second that the thinker writes, of one answer
  frames  frames a second of talker and code predictor, of one voice; 12.5 are real time
  wave    real-time factor of code2wav alone, in pieces of as many frames as the engine has
  speech  an answer that is spoken: first text, first sound after it, real-time factor from the first text to the last
          sample, under 1 is faster than it is heard
  beside  the same beside transformers, in turns: an answer written alone, and one that is spoken; not for large shapes,
          whose weights would not fit twice

  python benchmarks/speech.py
  python benchmarks/speech.py Qwen3-Omni-30B-A3B-Instruct.json --only sound text frames wave speech
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from shapes import NoText, random_value

from tilewright.engine.core import EngineCore
from tilewright.engine.load.assembly import build_core
from tilewright.engine.schedule.step import StepLimits
from tilewright.engine.speech.scheduler import FRAMES_PER_PIECE
from tilewright.models.protocol import MediaBatch, MediaItem
from tilewright.models.qwen3_omni.code2wav import Code2WavState
from tilewright.models.registry import family_of
from tilewright.types import ModelInputs, SamplingParams
from tilewright.weights.conv import ConvTaps, ConvWeight, SnakeWaves, TransposedConvWeight
from tilewright.weights.spec import iter_weights

SECTIONS = ("sound", "text", "frames", "wave", "speech", "beside")
FRAMES_PER_SECOND = 12.5
_TEXT = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "moe_intermediate_size": 384,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "vocab_size": 152_064,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 1_000_000,
    "rope_scaling": {"interleaved": True, "mrope_section": [12, 10, 10], "rope_type": "default"},
    "tie_word_embeddings": False,
}
_IDS = {  # of the published vocabulary
    "audio_token_id": 151_675,
    "image_token_id": 151_655,
    "video_token_id": 151_656,
    "audio_start_token_id": 151_669,
    "audio_end_token_id": 151_670,
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
    "position_id_per_seconds": 13,
}
BILLION: dict[str, Any] = {
    "model_type": "qwen3_omni_moe",
    "thinker_config": {
        "text_config": _TEXT,
        "audio_config": {
            "d_model": 512,
            "encoder_layers": 8,
            "encoder_attention_heads": 8,
            "encoder_ffn_dim": 2048,
            "output_dim": 1024,
            "num_mel_bins": 128,
            "downsample_hidden_size": 480,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_heads": 4,
            "out_hidden_size": 1024,
            "deepstack_visual_indexes": [0],
            "patch_size": 16,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "in_channels": 3,
            "num_position_embeddings": 256,
            "hidden_act": "gelu_pytorch_tanh",
        },
        **_IDS,
    },
    "talker_config": {
        **_IDS,
        "text_config": {
            **_TEXT,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "shared_expert_intermediate_size": 384,
            "moe_intermediate_size": 192,
            "vocab_size": 3072,
        },
        "code_predictor_config": {
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "num_code_groups": 16,
            "vocab_size": 2048,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
        },
        "num_code_groups": 16,
        "thinker_hidden_size": 1024,
        "accept_hidden_layer": 8,
        "spatial_merge_size": 2,
        "codec_bos_id": 2149,
        "codec_eos_token_id": 2150,
        "codec_nothink_id": 2155,
        "codec_pad_id": 2148,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "speaker_id": {"ethan": 2302},
    },
    "code2wav_config": {
        "codebook_size": 2048,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "sliding_window": 72,
        "max_position_embeddings": 8000,
        "num_quantizers": 16,
        "decoder_dim": 768,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    },
}
# <|im_start|>user\n...<|im_end|>\n<|im_start|>assistant\n, with ids that mean nothing between.
PROMPT = (151_644, 872, 198, *range(1000, 1030), 151_645, 198, 151_644, 77_091, 198)


def fill(network: object, block: torch.Tensor) -> None:
    """Random weights; those of convolutions keep the size of what goes through."""
    for weight in iter_weights(network):
        if isinstance(weight, (ConvWeight, TransposedConvWeight, ConvTaps, SnakeWaves)):
            weight.build([_scaled(source.shape) for source in weight.sources], torch.bfloat16)
        else:
            weight.restore(random_value(weight, block))


def _scaled(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape) * (shape[1] * shape[-1]) ** -0.5 if len(shape) > 1 else torch.zeros(shape)


class Networks:
    """The thinker, and what speaks its answers."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        started, block = perf_counter(), (torch.randn(1 << 22) * 0.02).bfloat16()
        family = family_of(dict(config))
        self.model = family.build(config, {})
        assert family.build_speech is not None
        self.speech = family.build_speech(config, {}, owns_embeddings=False)
        for network in (self.model, self.speech):
            fill(network, block)
        print(f"random weights were made in {perf_counter() - started:.0f} s", flush=True)

    def core(self) -> EngineCore:
        self.model.fit_context(4096)
        return build_core(
            self.model,
            torch.bfloat16,
            StepLimits(4096),
            256,
            make_token_decoder=NoText,
            speech=self.speech,
        )


def inputs_of(token_ids: tuple[int, ...]) -> ModelInputs:
    positions = np.broadcast_to(np.arange(len(token_ids)), (3, len(token_ids)))
    return ModelInputs(token_ids, np.ascontiguousarray(positions), len(token_ids))


def measure_sound(networks: Networks, seconds: int) -> None:
    tower = networks.model.audio
    config = tower.config
    num_frames = 100 * seconds
    buffer = torch.randn(num_frames, config.num_mel_bins).bfloat16()
    grid = (config.frames_per_chunk, num_frames, config.num_mel_bins)
    item = MediaItem("audio", grid, (1, 1), 0, num_frames, config.num_features(num_frames))
    times = []
    with torch.inference_mode():
        for _ in range(3):
            started = perf_counter()
            networks.model.encode(MediaBatch(buffer, (item,)))
            times.append(perf_counter() - started)
    print(f"sound   {seconds / min(times):.1f} seconds of sound encoded a second", flush=True)


def answer(
    core: EngineCore, num_tokens: int, num_frames: int = 0, name: str = "answer"
) -> tuple[float, float, float | None, float, int]:
    """When the first and last token were there, the first and last sound, in seconds; and how many samples."""
    voice = core.speech.model.voices[0] if num_frames and core.speech else None
    params = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=1, ignore_eos=True, voice=voice)
    started = perf_counter()
    (sequence,) = core.add(name, inputs_of(PROMPT), params)
    if voice is not None:
        spoken = core.speech._by_answer[sequence]
        spoken.params = replace(spoken.params, max_frames=num_frames)
    texts: list[float] = []
    sounds: list[float] = []
    num_samples = 0
    while core.has_work:
        result = core.step()
        for _, delta in result.deltas:
            now = perf_counter() - started
            if delta.token_ids:
                texts.append(now)
            if delta.audio is not None and len(delta.audio):
                sounds.append(now)
                num_samples += len(delta.audio)
        if result.failures:
            raise next(iter(result.failures.values()))
    core.completion(sequence)
    return texts[0], texts[-1], sounds[0] if sounds else None, sounds[-1] if sounds else 0.0, num_samples


def measure_text(core: EngineCore, num_tokens: int) -> None:
    answer(core, 4)
    first, last, _, _, _ = answer(core, num_tokens)
    print(f"text    {(num_tokens - 1) / (last - first):.1f} tokens a second", flush=True)


def measure_frames(core: EngineCore, num_frames: int) -> None:
    """The voice speaks a text that is written already."""
    assert core.speech is not None
    runner = core.speech.runner
    decode, runner.decode = runner.decode, lambda pieces: [torch.zeros(1) for _ in pieces]
    try:
        answer(core, 2, 4)
        _, last, _, done, _ = answer(core, 2, num_frames)
    finally:
        runner.decode = decode
    speed = (num_frames - 1) / (done - last)
    print(f"frames  {speed:.1f} frames a second, {speed / FRAMES_PER_SECOND:.2f} of real time", flush=True)


def measure_wave(networks: Networks, num_frames: int) -> None:
    decoder, times = networks.speech.code2wav, []
    state = Code2WavState()
    codes = torch.randint(0, decoder.config.codebook_size, (num_frames, decoder.config.num_quantizers))
    with torch.inference_mode():
        for piece in codes.split(FRAMES_PER_PIECE):
            started = perf_counter()
            decoder.decode([piece], [state])
            times.append((perf_counter() - started) * FRAMES_PER_SECOND / len(piece))
    print(f"wave    real-time factor {statistics.median(times[1:]):.2f}, {FRAMES_PER_PIECE} frames a piece", flush=True)


def measure_speech(core: EngineCore, num_tokens: int, num_frames: int) -> None:
    answer(core, 4, 6)
    first, last, sound, done, num_samples = answer(core, num_tokens, num_frames)
    assert core.speech is not None and sound is not None
    seconds = num_samples / core.speech.model.samples_per_second
    print(
        f"speech  first text {first:.2f} s, first sound {sound - first:.2f} s after it, {seconds:.1f} s of sound, "
        f"real-time factor {(done - first) / seconds:.2f}; text beside it {(num_tokens - 1) / (last - first):.1f} "
        "tokens a second",
        flush=True,
    )


def measure_beside(
    networks: Networks,
    config: Mapping[str, Any],
    num_tokens: int,
    num_frames: int,
    rounds: int,
    their_dtype: torch.dtype,
) -> None:
    import transformers

    theirs_config = transformers.Qwen3OmniMoeConfig(**copy.deepcopy({**config, "enable_audio_output": True}))
    with torch.no_grad():
        theirs = transformers.Qwen3OmniMoeForConditionalGeneration(theirs_config).to(their_dtype).eval()
    ids = torch.tensor([PROMPT])

    def generate(frames: int) -> tuple[float, int]:
        started = perf_counter()
        options = {"speaker": "Ethan", "talker_max_new_tokens": frames} if frames else {}
        with torch.inference_mode():
            result = theirs.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                return_audio=bool(frames),
                thinker_max_new_tokens=num_tokens,
                thinker_eos_token_id=-1,
                **options,
            )
        return perf_counter() - started, result[1].numel() if frames else 0

    core = networks.core()
    answer(core, 4, 6)
    texts, speeches, firsts = [], [], []
    for _ in range(rounds):
        _, last, _, _, _ = answer(core, num_tokens)
        their_text, _ = generate(0)
        texts.append(their_text / last)
        _, _, sound, done, num_samples = answer(core, num_tokens, num_frames)
        their_speech, their_samples = generate(num_frames)
        ours, other = done / num_samples, their_speech / max(their_samples, 1)
        speeches.append(other / ours)
        assert sound is not None
        firsts.append(their_speech / sound)
        print(
            f"beside  text {last:.2f} s, theirs {their_text:.2f}; spoken: first sound {sound:.2f} s, theirs "
            f"{their_speech:.2f}; real-time factor {ours * 24_000:.2f}, theirs {other * 24_000:.2f}",
            flush=True,
        )
    for what, ratios in (("text", texts), ("speech", speeches), ("first sound", firsts)):
        print(f"beside  {what} {statistics.median(ratios):.1f} times as fast ({min(ratios):.1f} to {max(ratios):.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path, help="a whole model's config.json (default: about a billion)")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="sections (default: all)")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer (default: %(default)s)")
    parser.add_argument("--frames", type=int, default=100, help="that are spoken of it (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=64, help="of sound to encode (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="beside transformers (default: %(default)s)")
    text = "of transformers' model, where its bf16 is slow (default: %(default)s)"
    parser.add_argument("--their-dtype", choices=("bfloat16", "float32"), default="bfloat16", help=text)
    args = parser.parse_args()
    config = BILLION if args.config is None else json.loads(args.config.read_text())
    networks = Networks(config)
    if "sound" in args.only:
        measure_sound(networks, args.seconds)
    core = networks.core()
    if "text" in args.only:
        measure_text(core, args.tokens)
    if "frames" in args.only:
        measure_frames(core, args.frames)
    if "wave" in args.only:
        measure_wave(networks, max(args.frames // 2, 2 * FRAMES_PER_PIECE))
    if "speech" in args.only:
        measure_speech(core, args.tokens, args.frames)
    if "beside" in args.only:
        measure_beside(networks, config, args.tokens, args.frames, args.rounds, getattr(torch, args.their_dtype))


if __name__ == "__main__":
    main()
