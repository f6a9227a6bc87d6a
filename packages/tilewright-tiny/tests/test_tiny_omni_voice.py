"""The recipe of the voice: its networks are transformers', it is trained on the rows that are served, it learns."""

import json
from itertools import islice
from random import Random

import numpy as np
import pytest
import torch
from oracle import require

from tilewright.engine.engine import Engine
from tilewright.engine.speech.sequence import SpeechParams
from training.shards import read_weights, write_weights
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
from training.tiny_omni.said import VOICES, answers, as_spoken, sayings
from training.tiny_omni.talker import Talker
from training.tiny_omni.train_codec import Segments, SpectralLoss
from training.tiny_omni.train_talker import (
    DISTURBED,
    EMBEDDINGS,
    OWN,
    Sayings,
    codes_of,
    contexts_of,
    disturbed,
    told,
)  # fmt: skip
from training.tiny_omni.utterances import TRANSCRIBE
from training.tiny_vl.batches import Encoder

pytestmark = pytest.mark.long

MAX_FRAMES = 24  # an untrained talker seldom ends


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
    made = shaken(Talker(config["talker_config"]), 1.5).eval()
    made.turn_deaf()
    return made


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
    return Clips(samples, starts, num_frames, [texts[i % 5] for i in numbers])


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


@pytest.fixture
def spoken(engine, monkeypatch):
    """What the engine answers to messages, and the speech sequence of the answer."""

    def ask(messages, **options):
        params = SpeechParams(temperature=0.0, max_frames=MAX_FRAMES)
        monkeypatch.setattr("tilewright.engine.speech.scheduler.make_speech_params", lambda _: params)
        sequences, scheduler = [], engine.loop.core.speech
        add = scheduler.add
        monkeypatch.setattr(scheduler, "add", lambda speech, answer: (sequences.append(speech), add(speech, answer)))
        greedy = {"temperature": 0, "modalities": ("text", "audio"), "voice": "chelsie"}
        answer = engine.chat(messages, **greedy, **options)
        monkeypatch.setattr(scheduler, "add", add)
        return answer, sequences[0]

    return ask


def batch_for(hearing, config, context, answer_ids, frames):
    """What the talker reads in training of one saying."""
    codes = torch.tensor(frames)[None]
    encoder = Encoder(hearing / "tokenizer.json")
    sayings = Sayings(["Blue."], codes, torch.tensor([len(frames)]), config, encoder, "cpu")
    if answer_ids is not None:
        ids = [*answer_ids, sayings.turns.tts_eos]
        padding = [sayings.turns.tts_pad] * (len(frames) + 1)
        sayings.text_ids = torch.tensor([ids + padding])
    return sayings, sayings.batch(context, 0, 1)


def check_rows(sayings, batch, speech):
    num_rows = speech.prompt.num_rows + len(speech.frames)
    assert batch.text_ids[0].tolist() == [speech.text_id(row) for row in range(num_rows)]
    assert batch.codec_ids[batch.codec_ids >= 0].tolist() == list(speech.prompt.codec_ids)
    assert batch.asked_from == speech.prompt.num_rows - 1
    assert np.array_equal(speech.prompt.positions, np.tile(np.arange(speech.prompt.num_rows), (3, 1)))
    assert batch.first[0].tolist() == [*(codes[0] for codes in speech.frames), sayings.codec.eos]


def check_codes(talker, table, sayings, batch, frames):
    """Each code that was said is the one that the trained network gives for the rows of training."""
    with torch.no_grad():
        now = told(talker, table, batch, sayings.media)
    assert len(frames) > 3 and torch.equal(now.likeliest[0], torch.tensor(frames))
    assert torch.equal(now.right, torch.ones(NUM_CODES))


@pytest.fixture(scope="module")
def table(hearing):
    return read_weights(hearing)[EMBEDDINGS]


def test_training_sees_the_rows_that_are_served(spoken, hearing, config, talker, table):
    messages = [{"role": "assistant", "content": "Blue."}]
    _, speech = spoken(messages, max_tokens=1, continue_final_message=True)
    sayings, batch = batch_for(hearing, config, (), None, speech.frames)
    check_rows(sayings, batch, speech)
    check_codes(talker, table, sayings, batch, speech.frames)


def test_training_sees_the_rows_that_are_served_after_a_sound(spoken, hearing, config, talker, table, engine):
    noise = np.random.default_rng(0).integers(-9000, 9000, 16_000).astype(np.float32) / 32768
    sound = {"type": "audio", "audio": noise}
    messages = [{"role": "user", "content": [sound, {"type": "text", "text": "What is said?"}]}]
    _, speech = spoken(messages, max_tokens=6)
    assert len(speech.prompt.media_rows) > 5
    ids = tuple(engine.loaded.processor.chat(messages).token_ids)
    sayings, batch = batch_for(hearing, config, ids[:-3], speech.text_ids, speech.frames)
    check_rows(sayings, batch, speech)
    check_codes(talker, table, sayings, batch, speech.frames)


def test_contexts_are_what_users_send(hearing, engine):
    encoder = Encoder(hearing / "tokenizer.json")
    found = contexts_of(encoder, 40)
    chat = engine.loaded.processor.chat
    assert {tuple(chat([{"role": "user", "content": text}]).token_ids[:-3]) for text in TRANSCRIBE} & set(found)
    noise = np.zeros(16_000, np.float32)
    heard = tuple(chat([{"role": "user", "content": [{"type": "audio", "audio": noise}]}]).token_ids[:-3])
    pad = encoder.ids_of("<|audio_pad|>")[0]
    assert tuple(i for i in heard if i != pad) in {tuple(i for i in ids if i != pad) for ids in found}


def test_transformers_says_the_same(spoken, whole, engine, config):
    messages = [{"role": "user", "content": "What is said?"}]
    ours, speech = spoken(messages, max_tokens=6)
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
    assert samples.shape[-1] == len(ours.audio) == len(speech.frames) * 960 - 555
    assert np.abs(ours.audio - samples[0, 0].numpy()).max() < 1e-3


def test_the_voice_learns(hearing, config, codec, table):
    encoder = Encoder(hearing / "tokenizer.json")
    clips = noise_clips(3, codec.samples_per_frame)
    sayings = Sayings(clips.texts, codes_of(codec, clips, "cpu"), clips.num_frames, config, encoder, "cpu")
    batch = sayings.draw(Random(0), contexts_of(encoder, 4), 3)
    talker = Talker(config["talker_config"])
    optimiser = torch.optim.AdamW([p for p in talker.parameters() if p.requires_grad], 2e-3)
    totals, own = [], None
    for _ in range(8):
        now = told(talker, table, disturbed(batch, own), sayings.media)
        totals.append((now.first + now.rest).item())
        optimiser.zero_grad()
        (now.first + now.rest).backward()
        optimiser.step()
        own = now.likeliest
    assert now.right.shape == (NUM_CODES,) and totals[-1] < 0.9 * totals[0]


def test_codes_that_are_read_are_others_now_and_then_and_those_asked_for_never(hearing, config):
    codes = torch.zeros(4, 200, NUM_CODES, dtype=torch.int16)
    encoder = Encoder(hearing / "tokenizer.json")
    sayings = Sayings(["Blue."] * 4, codes, torch.full((4,), 200), config, encoder, "cpu")
    batch = sayings.batch((), 0, 4)
    torch.manual_seed(0)
    other = disturbed(batch, own=torch.ones_like(batch.codes))
    assert torch.equal(other.frames, batch.frames) and torch.equal(other.first, batch.first)
    shares = [(other.codes[..., place] != 0).float().mean().item() for place in range(NUM_CODES)]
    assert abs(shares[0] - OWN - DISTURBED) < 0.06 and all(share > shares[0] for share in shares[1:])


def test_codes_are_those_of_a_clip_with_silence_behind_it(codec):
    clips = noise_clips(3, codec.samples_per_frame)
    codes, longest = codes_of(codec, clips, "cpu"), 11
    assert codes.shape == (3, longest, NUM_CODES)
    for row, start, count in zip(codes, clips.starts, clips.num_frames, strict=True):
        alone = torch.zeros(1, longest * codec.samples_per_frame)
        length = count * codec.samples_per_frame
        alone[0, :length] = clips.samples[start : start + length].float() / 32768
        with torch.no_grad():
            expected = codec.codes(alone)[0, :count]
        # All but those of which two rows of a codebook are as near.
        assert (row[:count] == expected).float().mean() > 0.8


def test_misread_codes_are_few_and_never_the_first(codec):
    codes = torch.zeros(2, 300, NUM_CODES, dtype=torch.long)
    torch.manual_seed(0)
    rows, read = codec.misread(codes, 0.2)
    assert torch.equal(read[..., 0], codes[..., 0]) and abs((read[..., 1:] > 0).float().mean().item() - 0.2) < 0.05
    assert torch.allclose(rows[0, 0], sum(q.rows[read[0, 0, i]] for i, q in enumerate(codec.quantisers)))


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


def test_the_synthesiser_reads_what_it_pronounces_right():
    assert as_spoken("The letters are c, a, t.") == "The letters are C, A, T."
    assert as_spoken("The colour of a grey cat is grey.") == "The color of a gray cat is gray."


def test_errors_are_words_that_are_wrong_missing_or_too_many():
    expected = words_of("A red circle.")
    assert num_errors(expected, words_of("red circle")) == 1
    assert num_errors(expected, words_of("a bread circle here")) == 2
    assert num_errors(expected, []) == 3


def test_held_out_answers_are_the_same_every_time_and_never_trained():
    held_out = answers("test", 60)
    assert held_out == answers("test", 60) and len(set(held_out)) == 60
    assert not set(held_out) & set(answers("validation", 60))
    assert not set(held_out) & set(islice(sayings(Random(0)), 4000))
