"""What speaks the thinker's answers: the talker and code2wav, and which ids they find in its prompts."""

from __future__ import annotations

from tilewright.layers.token_embedding import TokenEmbedding
from tilewright.models.decoder_model import DecoderModel
from tilewright.models.qwen3_omni.code2wav import Code2Wav
from tilewright.models.qwen3_omni.config import CODE2WAV, TALKER, THINKER, OmniConfig, Shapes
from tilewright.models.qwen3_omni.talker import Talker
from tilewright.models.qwen3_omni.talker_prompt import talker_prompt
from tilewright.models.speaking import Embed, TalkerPrompt
from tilewright.models.text_config import Config
from tilewright.types import ModelInputs, UnsupportedConfig

DEFAULT_VOICE = "ethan"  # transformers' default too


class OmniSpeech:
    """The networks, whole on one rank: a frame of speech is small, and the other ranks have the thinker to compute.

    With `has_table`, rows of the thinker's embedding table are kept here too, because it is split over ranks there.
    """

    samples_per_second = 24_000

    def __init__(self, config: OmniConfig, *, has_table: bool) -> None:
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
        self.table_name = f"{THINKER}.model.embed_tokens"
        self.table = TokenEmbedding(self.table_name, text.num_embeddings, text.width) if has_table else None

    @property
    def text_end_id(self) -> int:
        return self.turns.tts_eos

    @property
    def text_padding_id(self) -> int:
        return self.turns.tts_pad

    def embed_of(self, model: DecoderModel) -> Embed:
        """Rows of the thinker's table: this one's where there is one, else the model's."""
        return self.table or model.decoder.embed_tokens

    @property
    def voices(self) -> tuple[str, ...]:
        """Their names, the default first."""
        return tuple(sorted(self.speakers, key=lambda name: (name != DEFAULT_VOICE, name)))

    def checkpoint_name(self, name: str) -> str | None:
        """The name of a tensor that speaks; None for one of the thinker."""
        if self.table is not None and name == f"{self.table_name}.weight":
            return name
        return name if name.startswith((f"{TALKER}.", f"{CODE2WAV}.")) else None

    def prompt(self, inputs: ModelInputs, voice: str) -> TalkerPrompt:
        """What the talker reads before an answer that is spoken by `voice`, one of `voices`."""
        speaker = self.speakers[voice]
        return talker_prompt(inputs.token_ids, inputs.positions, self.turns, self.codec, speaker, self.media_ids)


def build_speech(config: Config, shapes: Shapes, *, has_table: bool) -> OmniSpeech | None:
    """The networks that a whole model's config describes; None where it has no voice."""
    whole = OmniConfig.from_dict(config, shapes)
    has_voice = whole.talker is not None and bool(whole.talker.speakers)
    return OmniSpeech(whole, has_table=has_table) if has_voice else None
