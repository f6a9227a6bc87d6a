"""The recipe of the voice: its networks are transformers', it is trained on the rows that are served, it learns."""

import json
from random import Random

import numpy as np
import pytest
import torch
from oracle import require

from tilewright.engine.engine import Engine
from tilewright.engine.speech.voice import SpeechParams
from training.shards import read_weights, write_weights
from training.tiny_omni.batches import Take, collate
from training.tiny_omni.checkpoint import (
    CODE2WAV,
    CODEBOOK,
    CODEC_FILE,
    NUM_CODES,
    SPEAKER_IDS,
    TALKER_FILE,
    with_voice,
    write_configs,
    write_speaking,
)  # fmt: skip
from training.tiny_omni.clips import Clips
from training.tiny_omni.codec import Codec
from training.tiny_omni.judge import num_errors, words_of
from training.tiny_omni.network import Network
from training.tiny_omni.said import VOICES, answers
from training.tiny_omni.talker import Talker, penalised
from training.tiny_omni.train_codec import Segments, SpectralLoss
from training.tiny_omni.train_talker import Context, Sayings, codes_of, collated, heard_states, inputs_of, losses_of
from training.tiny_omni.utterances import utterances
from training.tiny_vl.batches import Encoder

MAX_FRAMES = 24  # an untrained talker seldom ends
WIDTH = 256


def shaken(network, scale=1.0):
    """The network with weights that differ from each other and from what they begin with."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                fan_in = parameter[0].numel() if parameter.dim() < 3 else parameter.shape[1] * parameter.shape[2]
                parameter.copy_(noise * scale * fan_in**-0.5)
            else:
                parameter.add_(0.1 * noise)
            parameter.copy_(parameter.bfloat16())
    return network


@pytest.fixture(scope="module")
def codec():
    made = shaken(Codec(CODE2WAV))
    with torch.no_grad():
        for quantiser in made.quantisers:
            quantiser.rows.normal_(generator=torch.Generator().manual_seed(1))
        made.code2wav.decoder[-1].conv.weight.mul_(0.05)
    return made.eval()


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hearing")
    network = shaken(Network(write_configs(folder), 10))
    write_weights(folder, network.stored_weights())
    return folder


@pytest.fixture(scope="module")
def config(hearing):
    return with_voice(json.loads((hearing / "config.json").read_text()))


@pytest.fixture(scope="module")
def talker(config):
    return shaken(Talker(config["talker_config"]), 1.5).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, hearing, codec, talker):
    made = tmp_path_factory.mktemp("speaking")
    voice = tmp_path_factory.mktemp("voice")
    codec.fill_table()
    write_weights(voice, {f"code2wav.{n}": w for n, w in codec.code2wav.state_dict().items()}, CODEC_FILE)
    write_weights(voice, {f"talker.{n}": w for n, w in talker.state_dict().items()}, TALKER_FILE)
    write_speaking(hearing, voice, voice, made)
    return made


@pytest.fixture(scope="module")
def engine(folder):
    with Engine(folder, dtype="float32", pack_cache=False, kv_memory="64MB", max_sequences=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def whole(folder):
    network = require("transformers").Qwen3OmniMoeForConditionalGeneration
    return network.from_pretrained(folder, dtype=torch.float32).eval()


def noise_clips(count, frame):
    """Clips of noise, of various lengths."""
    numbers = torch.arange(count)
    num_frames = 5 + 3 * numbers
    generator = torch.Generator().manual_seed(0)
    samples = torch.randint(-9000, 9000, (int(num_frames.sum()) * frame,), generator=generator).to(torch.int16)
    starts = (num_frames.cumsum(0) - num_frames) * frame
    texts = ["Blue.", "Two.", "Forty two.", "A red circle.", "One two three."]
    voices = tuple(VOICES)
    return Clips(
        samples, starts, num_frames, [texts[i % 5] for i in numbers], [voices[i % len(voices)] for i in numbers]
    )


def test_a_model_with_a_voice_stays_small(folder):
    weights = read_weights(folder)
    assert 10e6 < sum(weight.numel() for weight in weights.values()) < 19e6
    assert {name.split(".")[0] for name in weights} == {"thinker", "talker", "code2wav"}
    assert set(VOICES) == set(SPEAKER_IDS)


def test_code2wav_is_that_of_transformers(codec, whole):
    codes = torch.randint(CODEBOOK, (2, NUM_CODES, 9), generator=torch.Generator().manual_seed(0))
    stored = Codec(CODE2WAV).code2wav
    stored.load_state_dict(whole.code2wav.state_dict())
    with torch.no_grad():
        ours, theirs = stored(codes), whole.code2wav(codes)[:, 0]
    assert ours.shape == theirs.shape == (2, 9 * 960 - 555)
    assert theirs.abs().max() > 0.01 and (ours.clamp(-1, 1) - theirs).abs().max() < 1e-4


def test_decoding_codes_is_decoding_the_latents_they_stand_for(codec):
    codec.fill_table()
    sound = torch.randn(1, 8 * codec.samples_per_frame, generator=torch.Generator().manual_seed(0)) * 0.1
    with torch.no_grad():
        chosen, codes = codec.quantised(codec.latents(sound))
        assert torch.equal(codes, codec.codes(sound)) and codes.shape == (1, 8, NUM_CODES)
        from_rows = codec.code2wav.samples_of(codec.out(chosen))
        assert (codec.code2wav(codes.transpose(1, 2)) - from_rows).abs().max() < 1e-4


def chosen_by(talker, table, batch):
    """Codes that the talker would choose after those of the batch, for rows that are asked: (rows, quantisers)."""
    x = inputs_of(talker, table, batch)
    length = x.shape[1]
    hidden = talker.hidden(x, torch.ones(length, length, dtype=torch.bool).tril(), torch.arange(length)[None])
    is_asked = batch.first >= 0
    logits = penalised(talker.codec_head(hidden), batch.first.clamp(min=0), is_asked)
    logits[..., CODEBOOK:] = -torch.inf
    logits[..., talker.config["codec_eos_token_id"]] = talker.codec_head(hidden)[
        ..., talker.config["codec_eos_token_id"]
    ]
    is_frame = batch.frames[..., 0] >= 0
    frames = batch.frames[is_frame]
    rest = talker.code_predictor(hidden[is_frame], talker.model.codec_embedding(frames[:, 0]), frames).argmax(-1)
    return logits.argmax(-1)[is_asked], rest


@pytest.fixture
def spoken(engine, monkeypatch):
    """What the engine answers to messages, and the voice that it spoke with."""

    def ask(messages, **options):
        params = SpeechParams(temperature=0.0, max_frames=MAX_FRAMES)
        monkeypatch.setattr("tilewright.engine.speech.speech.speech_params", lambda _: params)
        voices, speech = [], engine.loop.core.speech
        start = speech.start
        monkeypatch.setattr(speech, "start", lambda sequence, voice: (voices.append(voice), start(sequence, voice)))
        greedy = {"temperature": 0, "modalities": ("text", "audio"), "voice": "chelsie"}
        answer = engine.chat(messages, **greedy, **options)
        monkeypatch.setattr(speech, "start", start)
        return answer, voices[0]

    return ask


def rows_for(hearing, config, context, answer_ids, frames):
    encoder = Encoder(hearing / "tokenizer.json")
    clips = Clips(torch.zeros(1), torch.zeros(1), torch.tensor([len(frames)]), ["Blue."], ["chelsie"])
    sayings = Sayings(clips, [torch.tensor(frames)], [context], config, encoder, 1, 0)
    if answer_ids is not None:
        sayings.answers = [answer_ids]
    return sayings.rows_after(context, 0), sayings.codec.eos


def check_codes(talker, table, rows, eos, frames):
    """Each code that was said is the one that the trained network gives for the rows of training."""
    with torch.no_grad():
        first, rest = chosen_by(talker, table, collated([rows], eos))
    said = torch.tensor(frames)
    assert len(said) > 3
    assert torch.equal(first[:-1], said[:, 0]) and (len(said) == MAX_FRAMES or first[-1] == eos)
    assert torch.equal(rest, said[:, 1:])


@pytest.fixture(scope="module")
def thinker(hearing, config):
    network = Network(config, 10)
    network.load_stored(read_weights(hearing))
    return network.eval()


def test_training_sees_the_rows_that_are_served(spoken, hearing, config, talker, thinker):
    messages = [{"role": "assistant", "content": "Blue."}]
    _, voice = spoken(messages, max_tokens=1, continue_final_message=True)
    rows, eos = rows_for(hearing, config, Context((), torch.empty(0, WIDTH)), None, voice.frames)
    assert rows.prompt.text_ids == voice.prompt.text_ids and rows.prompt.codec_ids == voice.prompt.codec_ids
    assert np.array_equal(rows.prompt.positions, voice.prompt.positions)
    assert rows.text_ids == [voice.text_id(row) for row in range(len(rows.text_ids))]
    check_codes(talker, thinker.model.embed_tokens.weight, rows, eos, voice.frames)


def test_training_sees_the_rows_that_are_served_after_a_sound(spoken, hearing, config, talker, thinker, engine):
    encoder = Encoder(hearing / "tokenizer.json")
    noise = np.random.default_rng(0).integers(-9000, 9000, 16_000).astype(np.int16)
    take = Take(next(utterances(Random(0))), noise)
    batch = collate(Random(0), encoder, [take], 0.1, is_casual=False)
    states = heard_states(thinker, batch, config["talker_config"]["accept_hidden_layer"])
    sound = {"type": "audio", "audio": batch.samples[0].numpy().astype(np.float32) / 32768}
    messages = [{"role": "user", "content": [sound, {"type": "text", "text": "What is said?"}]}]
    _, voice = spoken(messages, max_tokens=6)
    served = torch.stack([voice.media_states[row] for row in voice.prompt.thinker_rows])
    assert served.shape == states.shape and (served - states).abs().max() < 1e-3 * states.abs().max()
    ids = tuple(engine.loaded.processor.chat(messages).token_ids)
    rows, eos = rows_for(hearing, config, Context(ids[:-3], served), voice.text_ids, voice.frames)
    assert rows.prompt.text_ids == voice.prompt.text_ids and rows.prompt.media_rows == voice.prompt.media_rows
    assert np.array_equal(rows.prompt.positions, voice.prompt.positions)
    check_codes(talker, thinker.model.embed_tokens.weight, rows, eos, voice.frames)


def test_transformers_says_the_same(spoken, whole, engine, config):
    messages = [{"role": "user", "content": "What is said?"}]
    ours, voice = spoken(messages, max_tokens=6)
    ids = torch.tensor([engine.loaded.processor.chat(messages).token_ids])
    with torch.no_grad():
        sequences, samples = whole.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            speaker="Chelsie",
            thinker_max_new_tokens=6,
            thinker_eos_token_id=config["im_end_token_id"],
            thinker_do_sample=False,
            talker_do_sample=False,
            talker_max_new_tokens=MAX_FRAMES + 1,  # the last of which it does not complete
        )
    assert sequences[0, ids.shape[1] :].tolist() == list(ours.token_ids)
    assert samples.shape[-1] == len(ours.audio) == len(voice.frames) * 960 - 555
    assert np.abs(ours.audio - samples[0, 0].numpy()).max() < 1e-3


def test_the_voice_learns(hearing, config, codec, thinker):
    encoder = Encoder(hearing / "tokenizer.json")
    clips = noise_clips(3, codec.samples_per_frame)
    sayings = Sayings(clips, codes_of(codec, clips, "cpu"), [Context((), torch.empty(0, WIDTH))], config, encoder, 3, 0)
    batch = next(iter(sayings))
    talker = Talker(config["talker_config"])
    optimiser = torch.optim.AdamW(talker.parameters(), 2e-3)
    table = thinker.model.embed_tokens.weight.detach()
    totals = []
    for _ in range(8):
        first, rest, right = losses_of(talker, table, batch)
        totals.append((first + rest).item())
        optimiser.zero_grad()
        (first + rest).backward()
        optimiser.step()
    assert right.shape == (NUM_CODES,) and totals[-1] < 0.9 * totals[0]


def test_the_codec_learns():
    torch.manual_seed(0)
    codec, loss_of = Codec(CODE2WAV), SpectralLoss()
    sound = Segments(noise_clips(2, codec.samples_per_frame), codec.samples_per_frame, "cpu", 0).draw(1)[:, : 960 * 6]
    optimiser = torch.optim.AdamW([p for p in codec.parameters() if p.requires_grad], 1e-3)
    losses = []
    for _ in range(4):
        latents = codec.latents(sound)
        chosen, _ = codec.quantised(latents.float(), is_learning=True)
        made = codec.code2wav.samples_of(codec.out(latents + (chosen - latents).detach()))
        loss = loss_of(made, sound[:, : made.shape[1]])
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Three hundred and forty two.", "342"),
        ("Three four two.", "3, 4, 2."),
        ("Twenty one.", "21!"),
        ("C a t.", "C-A-T"),
        ("The grey lamp is on.", "the gray lamp is on"),
    ],
)
def test_words_are_the_same_however_they_are_written(one, other):
    assert words_of(one) == words_of(other)


def test_errors_are_words_that_are_wrong_missing_or_too_many():
    expected = words_of("A red circle.")
    assert num_errors(expected, words_of("red circle")) == 1
    assert num_errors(expected, words_of("a bread circle here")) == 2
    assert num_errors(expected, []) == 3


def test_held_out_answers_are_the_same_every_time():
    assert list(answers("test", 20)) == list(answers("test", 20)) != list(answers("validation", 20))
