"""The config of Qwen3-Omni, with the released models' values as defaults.

The thinker reads text, images, videos and sound; the talker, a code predictor and code2wav speak its answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.layers.decoder import DecoderConfig
from tilewright.layers.mlp import MlpConfig, activation_named
from tilewright.layers.rope import rope_parameters
from tilewright.models.qwen3_vl.vision import VisionConfig
from tilewright.models.text_config import (
    Config,
    Shapes,
    decoder_config,
    has_separate_experts,
    head_width,
    integer,
    model_width,
    moe_config,
    number,
    table,
)
from tilewright.types import UnsupportedConfig
from tilewright.weights.linear import ExpertStorage

THINKER, TALKER, CODE2WAV = "thinker", "talker", "code2wav"  # prefixes of the names of their tensors
MODEL_TYPE = "qwen3_omni_moe"

_ROPE_THETA = 1_000_000.0
_HEAD_WIDTH = 128
_MROPE = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
# Each of the tower's three convolutions halves the mel frames and the mel bins.
NUM_HALVINGS = 3


@dataclass(frozen=True)
class AudioConfig:
    """The audio tower. Chunks of mel frames are convolved separately; attention sees a window of chunks."""

    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    output_width: int
    num_mel_bins: int
    conv_channels: int
    frames_per_chunk: int  # of mel frames, 100 a second
    chunks_per_window: int  # chunks that attend to each other
    num_positions: int
    activation: str

    @classmethod
    def from_dict(cls, config: Config) -> AudioConfig:
        width, num_heads = model_width(config), integer(config, "encoder_attention_heads")
        if num_heads < 1 or width % num_heads or width % 2:
            raise UnsupportedConfig(
                f"audio_config has {num_heads} heads and d_model {width}, expected an even multiple of the heads"
            )
        if config.get("scale_embedding"):
            raise UnsupportedConfig("audio_config has scale_embedding true, expected false")
        frames, window = 2 * integer(config, "n_window", 50), integer(config, "n_window_infer", 800)
        if frames < 2 or window < frames or window % frames:
            raise UnsupportedConfig(
                f"audio_config has n_window_infer {window}, expected a multiple of twice n_window, {frames}"
            )
        return cls(
            width=width,
            mlp_width=integer(config, "encoder_ffn_dim"),
            num_layers=integer(config, "encoder_layers"),
            num_heads=num_heads,
            output_width=integer(config, "output_dim"),
            num_mel_bins=integer(config, "num_mel_bins", 128),
            conv_channels=integer(config, "downsample_hidden_size", 480),
            frames_per_chunk=frames,
            chunks_per_window=window // frames,
            num_positions=integer(config, "max_source_positions", 1500),
            activation=activation_named(str(config.get("activation_function", "gelu"))),
        )

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads

    @property
    def bins_after_convs(self) -> int:
        return halved(self.num_mel_bins)

    @property
    def features_per_chunk(self) -> int:
        """Features of a whole chunk."""
        return halved(self.frames_per_chunk)

    @property
    def features_per_window(self) -> int:
        return self.chunks_per_window * self.features_per_chunk

    def num_features(self, num_frames: int) -> int:
        """Return the tokens of a sound of `num_frames` mel frames in a prompt."""
        chunks, rest = divmod(num_frames, self.frames_per_chunk)
        return chunks * self.features_per_chunk + halved(rest)


def halved(length: int) -> int:
    """Return the length of an axis after the three convolutions of stride 2."""
    for _ in range(NUM_HALVINGS):
        length = (length + 1) // 2
    return length


@dataclass(frozen=True)
class MediaTokens:
    """Ids of the tokens that stand for media in a prompt, and of those around them."""

    audio: int
    audio_start: int
    audio_end: int
    image: int
    video: int
    vision_start: int
    vision_end: int

    @classmethod
    def from_dict(cls, config: Config) -> MediaTokens:
        return cls(
            audio=integer(config, "audio_token_id"),
            audio_start=integer(config, "audio_start_token_id", 151_669),
            audio_end=integer(config, "audio_end_token_id", 151_670),
            image=integer(config, "image_token_id"),
            video=integer(config, "video_token_id"),
            vision_start=integer(config, "vision_start_token_id", 151_652),
            vision_end=integer(config, "vision_end_token_id", 151_653),
        )


@dataclass(frozen=True)
class ThinkerConfig:
    text: DecoderConfig
    vision: VisionConfig
    audio: AudioConfig
    tokens: MediaTokens
    positions_per_second: int  # on rope's time axis, for the frames of a video

    @classmethod
    def from_dict(cls, config: Config, shapes: Shapes) -> ThinkerConfig:
        text = _sparse_decoder(table(config, "text_config"), shapes, is_talker=False)
        vision_config = table(config, "vision_config")
        if not vision_config.get("apply_vit_abs_pos_embed", True):
            raise UnsupportedConfig("vision_config has apply_vit_abs_pos_embed false, expected true")
        vision = VisionConfig.from_dict(vision_config)
        audio = AudioConfig.from_dict(table(config, "audio_config"))
        for what, width in (
            ("vision_config's out_hidden_size", vision.output_width),
            ("output_dim", audio.output_width),
        ):
            if width != text.width:
                raise UnsupportedConfig(f"{what} is {width}, expected the width of the text model, {text.width}")
        if len(vision.deepstack_layers) >= text.num_layers:
            raise UnsupportedConfig(
                f"deepstack_visual_indexes has {len(vision.deepstack_layers)} entries, expected fewer than the "
                f"{text.num_layers} layers of the text model"
            )
        return cls(text, vision, audio, MediaTokens.from_dict(config), integer(config, "position_id_per_seconds", 13))


@dataclass(frozen=True)
class CodePredictorConfig:
    """The small decoder of a frame's codes after the first; it has a head and a table for each."""

    decoder: DecoderConfig
    num_code_groups: int  # codes of a frame, including the talker's own

    @classmethod
    def from_dict(cls, config: Config) -> CodePredictorConfig:
        decoder = decoder_config(
            {"rope_theta": _ROPE_THETA, **config}, qk_norm=True, tied=False, default_head_width=_HEAD_WIDTH
        )
        return cls(decoder, integer(config, "num_code_groups", 16))


@dataclass(frozen=True)
class CodecTokens:
    """Ids of the talker's own vocabulary that are not codes of sound."""

    bos: int
    eos: int
    pad: int
    nothink: int
    think_bos: int
    think_eos: int

    @classmethod
    def from_dict(cls, config: Config) -> CodecTokens:
        return cls(
            bos=integer(config, "codec_bos_id"),
            eos=integer(config, "codec_eos_token_id"),
            pad=integer(config, "codec_pad_id"),
            nothink=integer(config, "codec_nothink_id"),
            think_bos=integer(config, "codec_think_bos_id"),
            think_eos=integer(config, "codec_think_eos_id"),
        )


@dataclass(frozen=True)
class TalkerConfig:
    """The decoder that reads the thinker's states and predicts the first code of each frame of speech."""

    text: DecoderConfig
    projection: MlpConfig  # from the thinker's width to the talker's
    code_predictor: CodePredictorConfig
    thinker_width: int
    accept_layer: int  # number of the thinker's layers after which its states stand for media
    codec: CodecTokens
    speakers: Mapping[str, int]  # id by name in lower case

    @classmethod
    def from_dict(cls, config: Config, shapes: Shapes) -> TalkerConfig:
        predictor = CodePredictorConfig.from_dict(table(config, "code_predictor_config"))
        num_code_groups = integer(config, "num_code_groups", predictor.num_code_groups)
        if num_code_groups != predictor.num_code_groups:
            raise UnsupportedConfig(
                f"talker_config has num_code_groups {num_code_groups}, its code predictor {predictor.num_code_groups}: "
                "expected the same"
            )
        text = table(config, "text_config")
        activation = activation_named(str(text.get("hidden_act", "silu")))
        return cls(
            text=_sparse_decoder(text, shapes, is_talker=True),
            projection=MlpConfig(integer(text, "intermediate_size", 0), activation, bias=True),
            code_predictor=predictor,
            thinker_width=integer(config, "thinker_hidden_size"),
            accept_layer=integer(config, "accept_hidden_layer"),
            codec=CodecTokens.from_dict(config),
            speakers=_speakers(config),
        )


@dataclass(frozen=True)
class Code2WavConfig:
    """The decoder from codes to samples: a transformer with a sliding window, then convolutions that upsample."""

    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    window: int  # frames that a frame attends to, including itself
    rope_theta: float
    max_positions: int
    eps: float
    activation: str
    attention_bias: bool
    codebook_size: int
    num_quantizers: int
    decoder_width: int
    upsample_rates: tuple[int, ...]  # of the decoder's blocks
    upsampling_ratios: tuple[int, ...]  # of the convolutions before them

    @classmethod
    def from_dict(cls, config: Config) -> Code2WavConfig:
        width, num_heads = model_width(config), integer(config, "num_attention_heads")
        num_kv_heads = integer(config, "num_key_value_heads", num_heads)
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise UnsupportedConfig(
                f"code2wav_config has num_key_value_heads {num_kv_heads}, expected a divisor of num_attention_heads, "
                f"{num_heads}"
            )
        parameters = rope_parameters(config)
        rope_type = parameters.get("rope_type", "default")
        if rope_type != "default":
            raise UnsupportedConfig(f"code2wav_config has rope_type {rope_type!r}, expected default")
        return cls(
            width=width,
            mlp_width=integer(config, "intermediate_size"),
            num_layers=integer(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_width=head_width(config, width, num_heads),
            window=integer(config, "sliding_window"),
            rope_theta=number(parameters, "rope_theta", number(config, "rope_theta", 10_000.0)),
            max_positions=integer(config, "max_position_embeddings"),
            eps=number(config, "rms_norm_eps", 1e-5),
            activation=activation_named(str(config.get("hidden_act", "silu"))),
            attention_bias=bool(config.get("attention_bias", False)),
            codebook_size=integer(config, "codebook_size"),
            num_quantizers=integer(config, "num_quantizers"),
            decoder_width=integer(config, "decoder_dim"),
            upsample_rates=_integers(config, "upsample_rates", (8, 5, 4, 3)),
            upsampling_ratios=_integers(config, "upsampling_ratios", (2, 2)),
        )


@dataclass(frozen=True)
class TurnTokens:
    """Ids by which the talker finds the turns of a conversation, and ids of its text rows that control speech."""

    im_start: int
    im_end: int
    system: int
    user: int
    assistant: int
    tts_pad: int
    tts_bos: int
    tts_eos: int

    @classmethod
    def from_dict(cls, config: Config) -> TurnTokens:
        return cls(
            im_start=integer(config, "im_start_token_id", 151_644),
            im_end=integer(config, "im_end_token_id", 151_645),
            system=integer(config, "system_token_id", 8_948),
            user=integer(config, "user_token_id", 872),
            assistant=integer(config, "assistant_token_id", 77_091),
            tts_pad=integer(config, "tts_pad_token_id", 151_671),
            tts_bos=integer(config, "tts_bos_token_id", 151_672),
            tts_eos=integer(config, "tts_eos_token_id", 151_673),
        )


@dataclass(frozen=True)
class OmniConfig:
    """The whole model; `talker` and `code2wav` are None in checkpoints without a voice, such as "Thinking"."""

    thinker: ThinkerConfig
    talker: TalkerConfig | None
    code2wav: Code2WavConfig | None
    turns: TurnTokens

    @classmethod
    def from_dict(cls, config: Config, shapes: Shapes) -> OmniConfig:
        """Read the config; `shapes` are those of the checkpoint's tensors, which show how experts are stored."""
        thinker = ThinkerConfig.from_dict(table(config, "thinker_config"), shapes)
        talker, code2wav = None, None
        if config.get("enable_audio_output", True):
            talker = TalkerConfig.from_dict(table(config, "talker_config"), shapes)
            code2wav = Code2WavConfig.from_dict(table(config, "code2wav_config"))
            if talker.thinker_width != thinker.text.width:
                raise UnsupportedConfig(
                    f"talker_config has thinker_hidden_size {talker.thinker_width}, expected {thinker.text.width}"
                )
            if code2wav.num_quantizers != talker.code_predictor.num_code_groups:
                raise UnsupportedConfig(
                    f"code2wav_config has num_quantizers {code2wav.num_quantizers}, expected the talker's "
                    f"num_code_groups, {talker.code_predictor.num_code_groups}"
                )
        return cls(thinker, talker, code2wav, TurnTokens.from_dict(config))


def _sparse_decoder(config: Config, shapes: Shapes, *, is_talker: bool) -> DecoderConfig:
    """Return a decoder with experts and three interleaved axes of positions, even if its config does not say so."""
    parameters = {**_MROPE, "rope_theta": config.get("rope_theta", _ROPE_THETA), **rope_parameters(config)}
    parameters["mrope_interleaved"] = True
    named = {**config, "rope_parameters": parameters}
    # A thinker that was saved separately has no prefix.
    names = [name for name in shapes if name.startswith(f"{TALKER}.") == is_talker]
    stored = ExpertStorage.separate if has_separate_experts(names) else ExpertStorage.stacked
    moe = moe_config(named, stored, renormalize=bool(config.get("norm_topk_prob", True)))
    return decoder_config(named, qk_norm=True, tied=False, moe=moe, default_head_width=_HEAD_WIDTH)


def _speakers(config: Config) -> Mapping[str, int]:
    speakers = config.get("speaker_id") or {}
    if not isinstance(speakers, Mapping):
        raise UnsupportedConfig(f"talker_config has speaker_id {speakers!r}, expected a table")
    return {str(name).lower(): integer(speakers, name) for name in speakers}


def _integers(config: Config, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    value = config.get(key, default)
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, int) and item > 0 for item in value):
        raise UnsupportedConfig(f"config has {key} {value!r}, expected whole numbers above 0")
    return tuple(value)
