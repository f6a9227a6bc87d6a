"""Qwen3-Omni's thinker: features of pictures, videos and sounds take the place of tokens of a Qwen3 decoder."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tilewright.layers.batch import Batch
from tilewright.layers.decoder import Decoder
from tilewright.models.decoder_model import DecoderModel
from tilewright.models.media_batch import MediaBatch
from tilewright.models.protocol import Family
from tilewright.models.qwen3_omni.audio import AudioTower
from tilewright.models.qwen3_omni.config import CODE2WAV, MODEL_TYPE, TALKER, THINKER, Shapes, ThinkerConfig
from tilewright.models.qwen3_omni.processor import OmniProcessor
from tilewright.models.qwen3_omni.speech import build_speech
from tilewright.models.qwen3_vl.vision import VisionTower
from tilewright.models.text_config import Config, table

TEXT, VISION, AUDIO = "model", "visual", "audio_tower"
# What the vision tower's mergers are called here, by their names in Qwen3-VL, whose tower it is.
_MERGER_NAMES = {
    "merger_list.": "deepstack_merger_list.",
    ".ln_q.": ".norm.",
    ".mlp.0.": ".linear_fc1.",
    ".mlp.2.": ".linear_fc2.",
}


class OmniThinker(DecoderModel):
    """Reads and hears; writes text."""

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
        """Without the thinker's prefix; the voice is no part of this model."""
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
        """Of pictures and videos with what deepstack adds; of sounds without: they have none."""
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


def _build(config: Config, shapes: Mapping[str, tuple[int, ...]]) -> OmniThinker:
    return OmniThinker(ThinkerConfig.from_dict(table(config, "thinker_config"), shapes))


def _build_thinker(config: Config, shapes: Shapes) -> OmniThinker:
    return OmniThinker(ThinkerConfig.from_dict(config, shapes))


FAMILIES = {
    MODEL_TYPE: Family(_build, OmniProcessor, build_speech=build_speech),
    f"{MODEL_TYPE}_thinker": Family(_build_thinker, OmniProcessor),
}
