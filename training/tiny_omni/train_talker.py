"""Trains the talker of the embedded Omni from scratch: `python -m training.tiny_omni.train_talker --help`."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.models.qwen3_omni.config import CodecTokens, TurnTokens
from tilewright.models.qwen3_omni.talker_prompt import TalkerPrompt, talker_prompt
from training.loop import add_network_options, learning_rate_at, tell, training_parser
from training.shards import read_weights, write_weights
from training.tiny_omni.batches import Batch as Heard
from training.tiny_omni.batches import collate, features_of, takes
from training.tiny_omni.checkpoint import CODEBOOK, SPEAKER_IDS, TALKER_FILE, with_voice
from training.tiny_omni.clips import Clips, add_clip_options, stored_clips, synthesised
from training.tiny_omni.codec import Codec
from training.tiny_omni.network import PREFIX, Network
from training.tiny_omni.talker import Talker, penalised
from training.tiny_omni.train_codec import frame, read_codec
from training.tiny_omni.utterances import ANSWER, TRANSCRIBE, spoken_words
from training.tiny_vl.batches import Encoder, attention_mask
from training.tiny_vl.optimiser import make_optimisers

MAX_GRADIENT = 1.0
NUM_CONTEXTS = 256  # turns of users before what is said, of which half have a sound
NO_CONTEXT = 0.5  # the share of rows without one, as where a text alone is to be spoken
NUM_VALIDATION_CLIPS = 128
ENCODED_AT_A_TIME = 32
NUM_COLLATING = 6  # processes that make batches
NO_TARGET = -100
DISTURBED = 0.06  # the share of frames that are read as others than were said, so that a slip is not the end
REST_WEIGHT = 1.0  # of the codes after the first


@dataclass(frozen=True)
class Context:
    """A prompt of the thinker, and its states at the sound's rows (count, width) after the layer the talker accepts."""

    ids: tuple[int, ...]
    states: Tensor


@dataclass
class Rows:
    """What the talker reads of one saying, on the host; codes are (frames, quantisers)."""

    prompt: TalkerPrompt
    text_ids: list[int]  # of every row
    states: Tensor
    codes: Tensor


@dataclass
class Batch:
    text_ids: Tensor  # (batch, rows)
    codec_ids: Tensor  # (batch, rows): of the vocabulary, -1 where there is none
    codes: Tensor  # (batch, rows, quantisers): of the frame before, -1 where there is none
    states: Tensor  # (media rows, width)
    state_rows: Tensor  # (media rows): in the batch's rows, one after the other
    first: Tensor  # (batch, rows): the first code of the next frame or the end, NO_TARGET where nothing is asked
    frames: Tensor  # (batch, rows, quantisers): the next frame, NO_TARGET where there is none

    def to(self, device: str) -> Batch:
        return Batch(**{name: value.to(device, non_blocking=True) for name, value in vars(self).items()})


def rows_of(prompt: TalkerPrompt, answer_ids: Sequence[int], states: Tensor, codes: Tensor, turns: TurnTokens) -> Rows:
    """Rows up to that of the last frame: the text's tokens one by one, its end, and padding from then on."""
    num_rows = prompt.num_rows + len(codes)
    text = [*prompt.text_ids, *answer_ids, turns.tts_eos]
    return Rows(prompt, [*text, *[turns.tts_pad] * num_rows][:num_rows], states, codes)


def collated(group: list[Rows], eos: int) -> Batch:
    length = -(-max(len(rows.text_ids) for rows in group) // 16) * 16
    num_codes = group[0].codes.shape[1]
    text_ids = torch.zeros(len(group), length, dtype=torch.long)
    codec_ids = torch.full((len(group), length), -1)
    codes = torch.full((len(group), length, num_codes), -1)
    first, frames = torch.full((len(group), length), NO_TARGET), torch.full((len(group), length, num_codes), NO_TARGET)
    states, state_rows = [], []
    for index, rows in enumerate(group):
        prompt, count = rows.prompt, len(rows.codes)
        begin = prompt.num_rows
        text_ids[index, : len(rows.text_ids)] = torch.tensor(rows.text_ids)
        codec_ids[index, prompt.num_plain_rows : begin] = torch.tensor(prompt.codec_ids)
        codes[index, begin : begin + count] = rows.codes
        frames[index, begin - 1 : begin - 1 + count] = rows.codes
        first[index, begin - 1 : begin - 1 + count] = rows.codes[:, 0]
        first[index, begin - 1 + count] = eos
        if prompt.media_rows:
            states.append(rows.states)
            state_rows += [index * length + row for row in prompt.media_rows]
    width = group[0].states.shape[1]
    media = torch.cat(states) if states else torch.empty(0, width)
    return Batch(text_ids, codec_ids, codes, media, torch.tensor(state_rows, dtype=torch.long), first, frames)


def inputs_of(talker: Talker, table: Tensor, batch: Batch) -> Tensor:
    """The sums (batch, rows, width) that the engine's `SpeechRunner` makes."""
    x = talker.text_projection(table[batch.text_ids])
    media = talker.hidden_projection(batch.states).to(x.dtype)
    x = x.flatten(0, 1).index_put((batch.state_rows,), media).view_as(x)
    tokens = talker.model.codec_embedding(batch.codec_ids.clamp(min=0)) * (batch.codec_ids >= 0)[..., None]
    spoken = talker.embed_frames(batch.codes.clamp(min=0)) * (batch.codes[..., :1] >= 0)
    return x + tokens + spoken


def losses_of(talker: Talker, table: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Those of first codes and of the others, and how many of each place's codes are the likeliest."""
    x = inputs_of(talker, table, batch)
    length = x.shape[1]
    # A row sees those before it; what is behind a saying's end is seen by nothing that is asked.
    mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
    positions = torch.arange(length, device=x.device)[None]
    hidden = talker.hidden(x, mask, positions)
    is_asked = batch.first != NO_TARGET
    logits = penalised(talker.codec_head(hidden).float(), batch.first.clamp(min=0), batch.first >= 0)
    is_banned = torch.arange(logits.shape[-1], device=x.device) >= CODEBOOK
    is_banned[talker.config["codec_eos_token_id"]] = False
    logits = logits[is_asked].masked_fill(is_banned, -1e4)
    first = F.cross_entropy(logits, batch.first[is_asked])
    is_frame = batch.frames[..., 0] != NO_TARGET
    frames = batch.frames[is_frame]
    rest_logits = talker.code_predictor(hidden[is_frame], talker.model.codec_embedding(frames[:, 0]), frames).float()
    rest = F.cross_entropy(rest_logits.flatten(0, 1), frames[:, 1:].flatten())
    right = [(logits.argmax(-1) == batch.first[is_asked]).float().mean()]
    right += [(rest_logits[:, i].argmax(-1) == frames[:, i + 1]).float().mean() for i in range(frames.shape[1] - 1)]
    return first, rest, torch.stack(right)


def disturbed(batch: Batch) -> Batch:
    """The batch with other codes in some of the frames that are read; what is asked for stays."""
    is_other = (torch.rand_like(batch.codes[..., :1], dtype=torch.float) < DISTURBED) & (batch.codes >= 0)
    others = torch.randint_like(batch.codes, CODEBOOK)
    return replace(batch, codes=torch.where(is_other, others, batch.codes))


class Sayings(torch.utils.data.IterableDataset[Batch]):
    """Clips as rows, before which users said something at random: batches without end."""

    def __init__(
        self,
        clips: Clips,
        codes: list[Tensor],
        contexts: list[Context],
        config: dict[str, Any],
        encoder: Encoder,
        batch_size: int,
        seed: int,
    ) -> None:
        self.batch_size, self.seed = batch_size, seed
        self.contexts, self.codes, self.clips = contexts, codes, clips
        self.turns, self.codec = TurnTokens.from_dict(config), CodecTokens.from_dict(config["talker_config"])
        self.media = frozenset((config["thinker_config"]["audio_token_id"],))
        self.answers = [encoder.ids_of(text) for text in clips.texts]
        self.header = encoder.ids_of("<|im_start|>assistant\n")

    def __len__(self) -> int:
        return len(self.codes)

    def rows(self, rng: Random, index: int) -> Rows:
        context = self.contexts[0] if rng.random() < NO_CONTEXT else rng.choice(self.contexts)
        return self.rows_after(context, index)

    def rows_after(self, context: Context, index: int) -> Rows:
        ids = [*context.ids, *self.header]
        positions = torch.arange(len(ids)).expand(3, -1).numpy()
        speaker = SPEAKER_IDS[self.clips.speakers[index]]
        prompt = talker_prompt(ids, positions, self.turns, self.codec, speaker, self.media)
        return rows_of(prompt, self.answers[index], context.states, self.codes[index], self.turns)

    def __iter__(self) -> Iterator[Batch]:
        """Of sayings that last about equally long."""
        worker = torch.utils.data.get_worker_info()
        rng, batch_size = Random(self.seed * 1000 + (worker.id if worker else 0)), self.batch_size
        order = sorted(range(len(self)), key=lambda index: len(self.codes[index]))
        groups = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        while True:
            # Others are together every time.
            shifted = [index for group in groups for index in rng.sample(group, len(group))]
            offset = rng.randrange(batch_size)
            parts = [shifted[max(start, 0) : start + batch_size] for start in range(-offset, len(shifted), batch_size)]
            rng.shuffle(parts)
            for part in parts:
                if part:
                    yield collated([self.rows(rng, index) for index in part], self.codec.eos)


@torch.no_grad()
def contexts_of(network: Network, encoder: Encoder, accept_layer: int, count: int) -> list[Context]:
    """Nothing, questions that are written, and sentences that are heard with one."""
    rng = Random("contexts")
    width = network.text["hidden_size"]
    found = [Context((), torch.empty(0, width))]
    for _ in range(count // 2):
        asked = rng.choice((*TRANSCRIBE, *(text for text in ANSWER if text)))
        ids = encoder.ids_of(f"<|im_start|>user\n{asked}<|im_end|>\n")
        found.append(Context(tuple(ids), torch.empty(0, width)))
    device = next(network.parameters()).device.type
    for take in islice(takes(rng, "training"), count // 2):
        batch = collate(rng, encoder, [take], rng.uniform(0.05, 0.4), is_casual=False).to(device)
        states = heard_states(network, batch, accept_layer)
        asked = rng.choice((*TRANSCRIBE, *ANSWER))
        before = batch.ids[0, : batch.start + len(states) + 1].tolist()
        found.append(Context((*before, *encoder.ids_of(f"{asked}<|im_end|>\n")), states))
    return found


@torch.no_grad()
def heard_states(network: Network, batch: Heard, accept_layer: int) -> Tensor:
    """The thinker's states of the first row's sound (count, width) after so many layers."""
    features = network.audio_tower(features_of(batch.samples))
    x = network.model.embed_tokens(batch.ids)
    stop = batch.start + features.shape[1]
    x = torch.cat((x[:, : batch.start], features.to(x.dtype), x[:, stop:]), 1)
    cos, sin = network._rotations(batch.positions)
    for layer in network.model.layers[:accept_layer]:
        x = layer(x, cos, sin, attention_mask(batch.segments))
    return x[0, batch.start : stop].float().cpu()


@torch.no_grad()
def codes_of(codec: Codec, clips: Clips, device: str) -> list[Tensor]:
    """(frames, quantisers) of every clip, int16."""
    samples = clips.samples.to(device)
    found: list[Tensor] = [torch.empty(0)] * len(clips)
    order = clips.num_frames.argsort().tolist()
    for start in range(0, len(order), ENCODED_AT_A_TIME):
        group = order[start : start + ENCODED_AT_A_TIME]
        length = int(clips.num_frames[group[-1]])
        sound = torch.zeros(len(group), length * codec.samples_per_frame, device=device)
        for row, index in zip(sound, group, strict=True):
            first, count = int(clips.starts[index]), int(clips.num_frames[index]) * codec.samples_per_frame
            row[:count] = samples[first : first + count].float() / 32768
        codes = codec.codes(sound).cpu()
        for row, index in zip(codes, group, strict=True):
            found[index] = row[: int(clips.num_frames[index])]
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
    thinker = Network(config, len(spoken_words()))
    thinker.load_stored({n: w for n, w in read_weights(hearing).items() if n.startswith(PREFIX)})
    thinker.to(options.device)
    talker_config = config["talker_config"]
    contexts = contexts_of(thinker, encoder, talker_config["accept_hidden_layer"], options.contexts)
    sets = [
        Sayings(one, codes_of(codec, one, options.device), contexts, config, encoder, options.batch_size, options.seed)
        for one in (clips, validation)
    ]
    tell(f"codes of {len(clips):,} clips are there")
    # Rows of the table as a checkpoint holds them.
    table = thinker.model.embed_tokens.weight.detach().bfloat16().float()
    talker = Talker(talker_config)
    if options.start_from:
        stored = read_weights(Path(options.start_from), TALKER_FILE)
        talker.load_state_dict({name.removeprefix("talker."): weight for name, weight in stored.items()})
    talker.to(options.device)
    tell(f"{sum(p.numel() for p in talker.parameters()):,} parameters in the talker")
    if options.compile:
        torch._dynamo.config.cache_size_limit = 64
        for layer in (*talker.model.layers, *talker.code_predictor.model.layers):
            layer.compile(dynamic=True)
    run(options, talker, table, sets[0], sets[1], folder)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = training_parser(
        "training.tiny_omni.train_talker",
        "Trains the talker of the embedded Omni on codes of synthesised speech.",
        writes="weights",
        draws="sentences",
        minutes=10.0,
        batch_size=96,
        lr=6e-4,
    )
    add_network_options(parser, weight_decay=0.1)
    parser.add_argument("--thinker", required=True, metavar="FOLDER", help="a checkpoint that hears")
    parser.add_argument("--codec", required=True, metavar="FOLDER", help="of train_codec")
    add_clip_options(parser)
    parser.add_argument("--contexts", type=int, default=NUM_CONTEXTS, help="users' turns (default: %(default)s)")
    parser.add_argument("--score-every-s", type=float, default=30.0, help="for validation (default: %(default)s)")
    return parser.parse_args(arguments)


def run(
    options: argparse.Namespace, talker: Talker, table: Tensor, sayings: Sayings, held_out: Sayings, folder: Path
) -> None:
    device = options.device
    optimisers = make_optimisers(talker, "muon", options.lr, options.weight_decay, device == "cuda")
    rng = Random("validation")
    group = [held_out.rows(rng, index) for index in range(len(held_out))]
    checked = [collated(group[start : start + 32], held_out.codec.eos) for start in range(0, len(group), 32)]
    total_s = options.minutes * 60
    began_s: float | None = None
    scored_s = time.monotonic()
    step = 0
    source = torch.utils.data.DataLoader(
        sayings,
        batch_size=None,
        num_workers=min(options.workers, NUM_COLLATING),
        prefetch_factor=4 if options.workers else None,
        pin_memory=False,
    )
    for on_host in source:
        elapsed_s = time.monotonic() - began_s if began_s is not None else 0.0
        if elapsed_s >= total_s:
            break
        for optimiser in optimisers:
            for part in optimiser.param_groups:
                part["lr"] = options.lr * learning_rate_at(elapsed_s / total_s)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            first, rest, _ = losses_of(talker, table, disturbed(on_host.to(device)))
        (first + REST_WEIGHT * rest).backward()
        size = torch.nn.utils.clip_grad_norm_(talker.parameters(), MAX_GRADIENT)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        step += 1
        if began_s is None and step == 5:
            began_s = time.monotonic()  # by then most kernels are compiled
        now_s = time.monotonic()
        if now_s - scored_s > options.score_every_s:
            scored_s = now_s
            losses = torch.stack((first.detach(), rest.detach(), size)).tolist()
            if not all(map(math.isfinite, losses)):
                raise SystemExit(
                    f"step {step}: losses are {losses}, no numbers any more; {folder} has the last weights"
                )
            tell(f"{elapsed_s:5.0f} s  step {step}  loss of first codes {losses[0]:.4f}, of the others {losses[1]:.4f}")
            tell(f"{elapsed_s:5.0f} s  validation {score(talker, table, checked, device)}")
            keep(folder, talker)
    tell(f"{step} steps: validation {score(talker, table, checked, device)}")
    keep(folder, talker)


@torch.no_grad()
def score(talker: Talker, table: Tensor, batches: list[Batch], device: str) -> str:
    """Losses, and the share of codes that are the likeliest after the right ones, by their place in a frame."""
    found = []
    for batch in batches:
        first, rest, right = losses_of(talker, table, batch.to(device))
        found.append(torch.cat((torch.stack((first, rest)), right)))
    of_first, of_rest, *shares = torch.stack(found).mean(0).tolist()
    return f"first codes {of_first:.4f}, others {of_rest:.4f}, likeliest {[round(share, 3) for share in shares]}"


def keep(folder: Path, talker: Talker) -> None:
    write_weights(folder, {f"talker.{name}": weight for name, weight in talker.state_dict().items()}, TALKER_FILE)


if __name__ == "__main__":
    sys.exit(main())
