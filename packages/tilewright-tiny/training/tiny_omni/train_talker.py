"""Trains the talker of the embedded Omni from scratch: `python -m training.tiny_omni.train_talker --help`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.models.qwen3_omni.config import AudioConfig, CodecTokens, TurnTokens
from tilewright.models.qwen3_omni.talker import make_talker_prompt
from training.loop import Average, add_network_options, check_finite, learning_rate_at, tell, training_parser
from training.shards import read_weights, write_weights
from training.tiny_omni.batches import MAX_SECONDS as MAX_HEARD_S
from training.tiny_omni.batches import prefix
from training.tiny_omni.checkpoint import AUDIO, CODEBOOK, SPEAKER_IDS, TALKER_FILE, with_voice
from training.tiny_omni.clips import Clips, add_clip_options, stored_clips, synthesised
from training.tiny_omni.codec import Codec
from training.tiny_omni.said import VOICES
from training.tiny_omni.talker import Talker, penalised
from training.tiny_omni.train_codec import frame, read_codec
from training.tiny_omni.utterances import ANSWER, TRANSCRIBE
from training.tiny_vl.batches import Encoder
from training.tiny_vl.optimiser import make_optimisers

MAX_GRADIENT = 1.0
NUM_CONTEXTS = 96  # turns of users before what is said, of which half have a sound
NO_CONTEXT = 0.6  # the share of batches without one, as where a text alone is to be spoken
NUM_VALIDATION_CLIPS = 128
ENCODED_AT_A_TIME = 64
NO_TARGET = -100
# Shares of frames that are read as others than were said, so that a slip is not the end: in all their codes, and in
# those after the first, which are harder to tell.
DISTURBED, REST_DISTURBED = 0.04, 0.15
OWN = 0.35  # the share of frames that are read as the talker itself would have said them, every other step
REST_WEIGHT = 1.0  # of the codes after the first
EMBEDDINGS = "thinker.model.embed_tokens.weight"


@dataclass
class Batch:
    """What the talker reads of some sayings behind one context, and what it is asked."""

    text_ids: Tensor  # (batch, rows)
    codec_ids: Tensor  # (rows): of the vocabulary, -1 where there is none
    codes: Tensor  # (batch, frames, quantisers): what the rows behind the prompt read
    frames: Tensor  # (batch, frames, quantisers): what they were, NO_TARGET behind a saying's end
    first: Tensor  # (batch, frames + 1): the first code of each frame and the end, NO_TARGET behind it
    asked_from: int  # the first row that is asked for a code


class Sayings:
    """Clips as rows, all of which lie where the talker is."""

    def __init__(
        self, texts: list[str], codes: Tensor, num_frames: Tensor, config: dict[str, Any], encoder: Encoder, device: str
    ) -> None:
        self.device, self.codes = device, codes.to(device)
        self.turns, self.codec = TurnTokens.from_dict(config), CodecTokens.from_dict(config["talker_config"])
        self.media = frozenset((config["thinker_config"]["audio_token_id"],))
        self.header = encoder.ids_of("<|im_start|>assistant\n")
        self.order = num_frames.argsort().to(device)
        self.lengths = num_frames.sort().values.tolist()
        self.num_frames = num_frames.to(device)
        answers = [[*encoder.ids_of(text), self.turns.tts_eos] for text in texts]
        width = max(codes.shape[1] + 1, *map(len, answers))
        padded = [ids + [self.turns.tts_pad] * (width - len(ids)) for ids in answers]
        self.text_ids = torch.tensor(padded, device=device)

    def __len__(self) -> int:
        return len(self.lengths)

    def draw(self, rng: Random, contexts: list[tuple[int, ...]], batch_size: int) -> Batch:
        """Sayings that last about equally long."""
        context = () if rng.random() < NO_CONTEXT else rng.choice(contexts)
        start = rng.randint(0, max(0, len(self) - batch_size))
        return self.batch(context, start, start + batch_size)

    def batch(self, context: tuple[int, ...], start: int, stop: int) -> Batch:
        """Those from one rank to another, by how long they last, after a user's turns."""
        chosen, longest = self.order[start:stop], self.lengths[min(stop, len(self)) - 1]
        ids = [*context, *self.header]
        positions = torch.arange(len(ids)).expand(3, -1).numpy()
        speaker = SPEAKER_IDS[next(iter(VOICES))]
        prompt = make_talker_prompt(ids, positions, self.turns, self.codec, speaker, self.media)
        text_ids = torch.tensor(prompt.text_ids, device=self.device).expand(len(chosen), -1)
        codec_ids = torch.full((prompt.num_rows + longest,), -1)
        codec_ids[prompt.num_plain_rows : prompt.num_rows] = torch.tensor(prompt.codec_ids)
        place = torch.arange(longest + 1, device=self.device)
        count = self.num_frames[chosen][:, None]
        codes = self.codes[chosen, :longest].long()
        frames = codes.masked_fill((place[:-1] >= count)[..., None], NO_TARGET)
        first = F.pad(frames[..., 0], (0, 1), value=NO_TARGET).masked_fill(place == count, self.codec.eos)
        return Batch(
            torch.cat((text_ids, self.text_ids[chosen, : longest + 1]), 1),
            codec_ids.to(self.device),
            codes,
            frames,
            first,
            prompt.num_rows - 1,
        )


def contexts_of(encoder: Encoder, count: int) -> list[tuple[int, ...]]:
    """Users' turns: questions that are written, and sounds with one or without."""
    rng, sound = Random("contexts"), AudioConfig.from_dict(AUDIO)
    found = []
    for _ in range(count // 2):
        asked = rng.choice((*TRANSCRIBE, *(text for text in ANSWER if text)))
        found.append(tuple(encoder.ids_of(f"<|im_start|>user\n{asked}<|im_end|>\n")))
    for _ in range(count // 2):
        heard, _ = prefix(encoder, sound.num_features(rng.randint(60, int(100 * MAX_HEARD_S))), None)
        asked = rng.choice((*TRANSCRIBE, *ANSWER))
        found.append((*heard, *encoder.ids_of(f"{asked}<|im_end|>\n")))
    return found


def inputs_of(talker: Talker, table: Tensor, batch: Batch, media: frozenset[int]) -> Tensor:
    """The sums (batch, rows, width) that the engine's `SpeechRunner` makes; rows of a sound say nothing."""
    is_text = torch.ones_like(batch.text_ids, dtype=torch.bool)
    for token_id in media:
        is_text &= batch.text_ids != token_id
    x = talker.text_projection(table[batch.text_ids]) * is_text[..., None]
    tokens = talker.model.codec_embedding(batch.codec_ids.clamp(min=0)) * (batch.codec_ids >= 0)[:, None]
    spoken = talker.embed_frames(batch.codes)
    return x + tokens + F.pad(spoken, (0, 0, x.shape[1] - spoken.shape[1], 0))


@dataclass
class Told:
    """Losses of first codes and of the others, what share of each place's codes is the likeliest, and those codes."""

    first: Tensor
    rest: Tensor
    right: Tensor  # (quantisers)
    likeliest: Tensor  # (batch, frames, quantisers)


def told(talker: Talker, table: Tensor, batch: Batch, media: frozenset[int]) -> Told:
    """Each code after the right ones before it in its frame, and after the frames that are read."""
    x = inputs_of(talker, table, batch, media)
    length = x.shape[1]
    # A row sees those before it; what is behind a saying's end is seen by nothing that is asked.
    mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
    hidden = talker.hidden(x, mask, torch.arange(length, device=x.device)[None])[:, batch.asked_from :]
    # What may be said is a code or the end, which is the first id behind them.
    logits = talker.codec_head(hidden)[..., : CODEBOOK + 1].float()
    logits = penalised(logits, batch.first.clamp(min=0), batch.first >= 0)
    first = F.cross_entropy(logits.flatten(0, 1), batch.first.flatten(), ignore_index=NO_TARGET)
    is_frame = batch.frames[..., 0] >= 0
    frames = batch.frames.clamp(min=0).flatten(0, 1)
    begun = talker.model.codec_embedding(frames[:, 0])
    rest_logits = talker.code_predictor(hidden[:, :-1].flatten(0, 1), begun, frames).float()
    rest = F.cross_entropy(rest_logits.flatten(0, 1), batch.frames[..., 1:].flatten(), ignore_index=NO_TARGET)
    codes = logits[:, :-1, :CODEBOOK].argmax(-1, keepdim=True)
    likeliest = torch.cat((codes, rest_logits.argmax(-1).unflatten(0, is_frame.shape)), -1)
    right = ((likeliest == batch.frames).sum((0, 1)) / is_frame.sum()).detach()
    return Told(first, rest, right, likeliest)


def disturbed(batch: Batch, own: Tensor | None = None) -> Batch:
    """The batch with other codes in some of the frames that are read, some of them `own`; what is asked for stays."""
    codes = batch.codes
    share = torch.rand(codes.shape[:2], device=codes.device)[..., None]
    others = torch.randint_like(codes, CODEBOOK)
    is_rest = torch.arange(codes.shape[-1], device=codes.device) > 0
    is_other = (share < DISTURBED) | ((share < DISTURBED + REST_DISTURBED) & is_rest)
    codes = torch.where(is_other, others, codes)
    if own is not None:
        codes = torch.where(share > 1 - OWN, own, codes)
    return replace(batch, codes=codes)


@torch.no_grad()
def codes_of(codec: Codec, clips: Clips, device: str) -> Tensor:
    """(clips, most frames, quantisers) of every clip, int16; behind a clip's end there is anything."""
    samples = clips.samples.to(device)
    longest = int(clips.num_frames.max())
    found = torch.zeros(len(clips), longest, len(codec.quantisers), dtype=torch.int16, device=device)
    order = clips.num_frames.argsort()
    for group in order.split(ENCODED_AT_A_TIME):
        length = int(clips.num_frames[group[-1]])
        place = torch.arange(length * codec.samples_per_frame, device=device)
        count = (clips.num_frames[group] * codec.samples_per_frame).to(device)[:, None]
        index = (clips.starts[group].to(device)[:, None] + place).clamp(max=len(samples) - 1)
        sound = samples[index].float() / 32768 * (place < count)
        found[group.to(device), :length] = codec.codes(sound).to(torch.int16)
    return found


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    folder = Path(options.out)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    codec = read_codec(Path(options.codec))
    hearing = Path(options.thinker)
    config = with_voice(json.loads((hearing / "config.json").read_text()))
    # Before a GPU is used: a process that has one cannot be forked.
    validation = synthesised("validation", min(NUM_VALIDATION_CLIPS, options.clips), 0, options.workers, frame(codec))
    clips = stored_clips(options, frame(codec))
    codec.to(options.device)
    encoder = Encoder(hearing / "tokenizer.json")
    sets = [
        Sayings(one.texts, codes_of(codec, one, options.device), one.num_frames, config, encoder, options.device)
        for one in (clips, validation)
    ]
    tell(f"codes of {len(clips):,} clips are there")
    table = read_weights(hearing)[EMBEDDINGS].to(options.device)
    talker = Talker(config["talker_config"])
    if options.start_from:
        stored = read_weights(Path(options.start_from), TALKER_FILE)
        talker.load_state_dict({name.removeprefix("talker."): weight for name, weight in stored.items()})
        talker.turn_deaf()
    talker.to(options.device)
    tell(f"{sum(p.numel() for p in talker.parameters()):,} parameters in the talker")
    if options.compile:
        torch._dynamo.config.cache_size_limit = 64
        for layer in (*talker.model.layers, *talker.code_predictor.model.layers):
            layer.compile(dynamic=True)
    run(options, talker, table, contexts_of(encoder, NUM_CONTEXTS), sets[0], sets[1], folder)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = training_parser(
        "training.tiny_omni.train_talker",
        "Trains the talker of the embedded Omni on codes of synthesised speech.",
        writes="weights",
        draws="sentences",
        minutes=10.0,
        batch_size=128,
        lr=8e-4,
    )
    add_network_options(parser, weight_decay=0.1)
    parser.add_argument("--thinker", required=True, metavar="FOLDER", help="a checkpoint that hears")
    parser.add_argument("--codec", required=True, metavar="FOLDER", help="of train_codec")
    add_clip_options(parser)
    parser.add_argument("--score-every-s", type=float, default=30.0, help="for validation (default: %(default)s)")
    return parser.parse_args(arguments)


def run(
    options: argparse.Namespace,
    talker: Talker,
    table: Tensor,
    contexts: list[tuple[int, ...]],
    sayings: Sayings,
    held_out: Sayings,
    folder: Path,
) -> None:
    device = options.device
    optimisers = make_optimisers(talker, "muon", options.lr, options.weight_decay, device == "cuda")
    average = Average(talker)
    rng = Random(options.seed)
    total_s = options.minutes * 60
    began_s: float | None = None
    scored_s = time.monotonic()
    step = 0
    batch, own = sayings.draw(rng, contexts, options.batch_size), None
    while True:
        elapsed_s = time.monotonic() - began_s if began_s is not None else 0.0
        if elapsed_s >= total_s:
            break
        for optimiser in optimisers:
            for part in optimiser.param_groups:
                part["lr"] = options.lr * learning_rate_at(elapsed_s / total_s)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            now = told(talker, table, disturbed(batch, own), sayings.media)
        (now.first + REST_WEIGHT * now.rest).backward()
        torch.nn.utils.clip_grad_norm_(talker.parameters(), MAX_GRADIENT)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        average.update()
        step += 1
        # Every batch comes twice, the second time behind what the talker made of it the first time.
        if own is None:
            own = now.likeliest.detach()
        else:
            batch, own = sayings.draw(rng, contexts, options.batch_size), None
        if began_s is None and step == 6:
            began_s = time.monotonic()  # by then most kernels are compiled
        if time.monotonic() - scored_s > options.score_every_s:
            losses = torch.stack((now.first, now.rest)).tolist()
            check_finite(step, losses, folder)
            tell(f"{elapsed_s:5.0f} s  step {step}  loss of first codes {losses[0]:.4f}, of the others {losses[1]:.4f}")
            with average.in_place():
                tell(f"{elapsed_s:5.0f} s  validation {score(talker, table, held_out)}")
                keep(folder, talker)
            scored_s = time.monotonic()
    with average.in_place():
        tell(f"{step} steps: validation {score(talker, table, held_out)}")
        keep(folder, talker)


@torch.no_grad()
def score(talker: Talker, table: Tensor, held_out: Sayings) -> str:
    """Losses, and the share of codes that are the likeliest after the right ones, by their place in a frame."""
    found = []
    for start in range(0, len(held_out), 32):
        now = told(talker, table, held_out.batch((), start, start + 32), held_out.media)
        found.append(torch.cat((torch.stack((now.first, now.rest)), now.right)))
    of_first, of_rest, *shares = torch.stack(found).mean(0).tolist()
    return f"first codes {of_first:.4f}, others {of_rest:.4f}, likeliest {[round(share, 3) for share in shares]}"


def keep(folder: Path, talker: Talker) -> None:
    write_weights(folder, {f"talker.{name}": weight for name, weight in talker.state_dict().items()}, TALKER_FILE)


if __name__ == "__main__":
    sys.exit(main())
