"""Qwen3-Omni: a thinker in which features of media replace tokens, and the model that speaks its answers."""

from __future__ import annotations

from torch import Tensor

from tilewright.layers.batch import Batch
from tilewright.layers.decoder import Decoder
from tilewright.layers.embedding import TokenEmbedding
from tilewright.models.protocol import Family, MediaBatch
from tilewright.models.qwen3_omni.audio import AudioTower
from tilewright.models.qwen3_omni.code2wav import Code2Wav
from tilewright.models.qwen3_omni.config import CODE2WAV, MODEL_TYPE, TALKER, THINKER, OmniConfig, ThinkerConfig
from tilewright.models.qwen3_omni.processor import OmniProcessor
from tilewright.models.qwen3_omni.talker import Embed, Talker, TalkerPrompt, make_talker_prompt
from tilewright.models.qwen3_vl.vision import VisionTower
from tilewright.models.text import DecoderModel
from tilewright.models.text_config import Config, Shapes, table
from tilewright.types import ModelInputs, UnsupportedConfig

DEFAULT_VOICE = "ethan"  # transformers' default too


class SpeechModel:
    """The networks that speak answers: talker, code predictor and code2wav, with the names of the voices.

    `LoadedModel` and the engine's `SpeechRunner` hold it. It is whole on one rank: a frame is little work, and the
    other ranks compute the thinker. With `owns_embeddings` the thinker's token embeddings are loaded here too, because
    the thinker's own are split over ranks.
    """

    samples_per_second = 24_000

    def __init__(self, config: OmniConfig, *, owns_embeddings: bool) -> None:
        assert config.talker is not None and config.code2wav is not None
        text, accept_layer = config.thinker.text, config.talker.accept_layer
        if not 0 < accept_layer < text.num_layers:
            raise UnsupportedConfig(
                f"talker_config has accept_hidden_layer {accept_layer}, expected 1 to {text.num_layers - 1}"
            )
        num_codes = config.talker.text.vocab_size
        for name, token_id in (*vars(config.talker.codec).items(), *config.talker.speakers.items()):
            if not 0 <= token_id < num_codes:
                raise UnsupportedConfig(f"talker_config has {name} {token_id}, expected 0 to {num_codes - 1}")
        self.turns, self.codec, self.speakers = config.turns, config.talker.codec, config.talker.speakers
        tokens = config.thinker.tokens
        self.media_ids = frozenset((tokens.audio, tokens.image, tokens.video))
        self.accept_layer = accept_layer
        self.talker = Talker(config.talker)
        self.code2wav = Code2Wav(config.code2wav)
        self._embeddings_name = f"{THINKER}.model.embed_tokens"
        self.embed_tokens: TokenEmbedding | None = None
        if owns_embeddings:
            self.embed_tokens = TokenEmbedding(self._embeddings_name, text.num_embeddings, text.width)

    @property
    def text_eos_id(self) -> int:
        """The thinker token that the talker reads once, after the last text token."""
        return self.turns.tts_eos

    @property
    def text_pad_id(self) -> int:
        """The thinker token that the talker reads from then on."""
        return self.turns.tts_pad

    def thinker_embeddings(self, thinker: DecoderModel) -> Embed:
        """Return the thinker's token embeddings: those of this model where it has them, else the thinker's."""
        return self.embed_tokens or thinker.decoder.embed_tokens

    @property
    def voices(self) -> tuple[str, ...]:
        """The names of the voices, the default first."""
        return tuple(sorted(self.speakers, key=lambda name: (name != DEFAULT_VOICE, name)))

    def checkpoint_name(self, name: str) -> str | None:
        """Return the name of a tensor of these networks; None for one of the thinker."""
        if self.embed_tokens is not None and name == f"{self._embeddings_name}.weight":
            return name
        return name if name.startswith((f"{TALKER}.", f"{CODE2WAV}.")) else None

    def prompt(self, inputs: ModelInputs, voice: str) -> TalkerPrompt:
        """Return the talker's prompt for an answer that is spoken by `voice`, one of `voices`."""
        speaker = self.speakers[voice]
        return make_talker_prompt(inputs.token_ids, inputs.positions, self.turns, self.codec, speaker, self.media_ids)


def build_speech(config: Config, shapes: Shapes, *, owns_embeddings: bool) -> SpeechModel | None:
    """Return the speech model that a whole model's config describes; None where it has no voice."""
    whole = OmniConfig.from_dict(config, shapes)
    has_voice = whole.talker is not None and bool(whole.talker.speakers)
    return SpeechModel(whole, owns_embeddings=owns_embeddings) if has_voice else None


TEXT, VISION, AUDIO = "model", "visual", "audio_tower"
# Our names of the vision tower's mergers, which are Qwen3-VL's, by their names in this checkpoint.
_MERGER_NAMES = {
    "merger_list.": "deepstack_merger_list.",
    ".ln_q.": ".norm.",
    ".mlp.0.": ".linear_fc1.",
    ".mlp.2.": ".linear_fc2.",
}


class OmniThinker(DecoderModel):
    """The thinker: reads text and media, and generates text."""

    num_position_axes = 3
    cross_spec = None
    predictor = None
    state_spec = None

    def __init__(self, config: ThinkerConfig) -> None:
        text = config.text
        self.vocab_size, self.max_context = text.vocab_size, text.max_context
        self.decoder = Decoder(TEXT, text)
        self.vision = VisionTower(VISION, config.vision)
        self.audio = AudioTower(AUDIO, config.audio)

    def checkpoint_name(self, name: str) -> str | None:
        """Return the name without the thinker's prefix; None for tensors of the speech networks."""
        if name.startswith((f"{TALKER}.", f"{CODE2WAV}.")):
            return None
        name = name.removeprefix(f"{THINKER}.")
        if name.startswith(f"{VISION}.merger"):
            for theirs, ours in _MERGER_NAMES.items():
                name = name.replace(theirs, ours)
        return self.decoder.checkpoint_name(name)

    def forward(self, batch: Batch) -> Tensor:
        return self.decoder(batch)

    def encode(self, batch: MediaBatch) -> list[Tensor]:
        """Return the features of each item; those of images and videos include deepstack's, sounds have none."""
        features: dict[int, Tensor] = {}
        for tower, is_sound in ((self.vision, False), (self.audio, True)):
            order = [i for i, item in enumerate(batch.items) if (item.kind == "audio") == is_sound]
            if order:
                part = MediaBatch(batch.buffer, tuple(batch.items[i] for i in order))
                features.update(zip(order, tower(part), strict=True))
        return [features[i] for i in range(len(batch.items))]

    def split_features(self, features_MF: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        embeddings, *deepstack = features_MF.split(self.decoder.config.width, dim=1)
        return embeddings, tuple(deepstack)


def _build(config: Config, shapes: Shapes) -> OmniThinker:
    return OmniThinker(ThinkerConfig.from_dict(table(config, "thinker_config"), shapes))


def _build_thinker(config: Config, shapes: Shapes) -> OmniThinker:
    return OmniThinker(ThinkerConfig.from_dict(config, shapes))


FAMILIES = {
    MODEL_TYPE: Family(_build, OmniProcessor, build_speech=build_speech),
    f"{MODEL_TYPE}_thinker": Family(_build_thinker, OmniProcessor),
}
