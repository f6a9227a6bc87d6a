"""The recipe of the model that hears: answers are right, sets are apart, the network is transformers', it learns."""

import dataclasses
import multiprocessing
import os
from random import Random

import numpy as np
import pytest
import torch
from oracle import require

from tilewright.models.qwen3_omni.config import AudioConfig
from tilewright.ops.media import log_mel
from tilewright.server.api.transcriptions import TranscriptionBody, TranslationBody
from training.loop import Average
from training.shards import read_weights, write_weights
from training.tiny_omni import evaluate, speech
from training.tiny_omni.batches import Take, collate, features_of, log_mels, takes
from training.tiny_omni.checkpoint import write_configs
from training.tiny_omni.items import heard, items, score
from training.tiny_omni.network import Network
from training.tiny_omni.room import GAP_BINS, GAP_FRAMES, NUM_GAPS, STRETCH, as_of_others, with_gaps, worn
from training.tiny_omni.train import train_step
from training.tiny_omni.utterances import SETS, TRANSCRIBE, Utterance, random_utterance, spoken_words, utterances
from training.tiny_omni.variants import own_data, random_variant, write_variant
from training.tiny_omni.words import number_words
from training.tiny_vl.batches import NO_TARGET, Encoder, attention_mask
from training.tiny_vl.lesson import listed
from training.tiny_vl.optimiser import make_optimisers

pytestmark = pytest.mark.long

speaking = pytest.mark.skipif(
    not speech.is_there() and os.environ.get("CI", "").lower() in ("", "0", "false"),
    reason="espeak-ng and flite are not installed; in CI they must be",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("hearing")
    write_configs(made)
    return made


@pytest.fixture(scope="module")
def config(folder):
    return write_configs(folder)


def said(count):
    rng = Random("recipe")
    return [random_utterance(rng) for _ in range(count)]


def drawn_takes(count):
    """Sentences with noise for a voice."""
    rng, noise = Random("noise"), np.random.default_rng(0)
    return [
        Take(random_utterance(rng), noise.integers(-9000, 9000, 16_000 + 900 * index).astype(np.int16))
        for index in range(count)
    ]


def test_no_two_sets_share_what_is_said():
    contents, texts = {}, {}
    for utterance in said(6000):
        assert contents.setdefault(utterance.content, utterance.set_name) == utterance.set_name
        assert texts.setdefault(utterance.text, utterance.set_name) == utterance.set_name
    assert set(contents.values()) == {"training", *SETS}
    source = utterances(Random("a set"), "test")
    assert {next(source).set_name for _ in range(30)} == {"test"}


def test_no_two_sets_share_a_speaker():
    speakers = {
        name: {speech.random_voice(Random(seed), name).speaker for seed in range(600)} for name in ("training", *SETS)
    }
    assert all(speakers.values())
    for one in speakers:
        for other in speakers:
            assert one == other or not speakers[one] & speakers[other]


def test_speakers_of_training_are_drawn_and_no_others():
    for name in ("training", *SETS):
        voices = [speech.random_voice(Random(seed), name) for seed in range(400)]
        variants = [voice.variant for voice in voices if voice.variant]
        assert len(set(variants)) == len(variants)
        assert len(variants) > 150 if name == "training" else not variants
    assert speech.random_voice(Random(1), "training") == speech.random_voice(Random(1), "training")


def test_a_drawn_speaker_has_values_that_espeak_takes():
    for seed in range(300):
        lines = [line.split() for line in random_variant(Random(seed)).splitlines()]
        assert lines[0] == ["language", "variant"]
        values = {
            " ".join(line[: 1 + (line[0] == "formant")]): [*map(int, line[1 + (line[0] == "formant") :])]
            for line in lines[1:]
        }
        assert len(values) == len(lines) - 1  # nothing is said twice
        assert all(f"formant {number}" in values for number in range(9))
        assert all(30 < values[f"formant {number}"][0] < 200 for number in range(9))
        base, most = values["pitch"]
        assert 50 <= base < most <= 410
        points = values.get("tone", [0, 0])
        assert points[::2] == sorted(points[::2]) and all(0 <= height <= 255 for height in points[1::2])


def test_own_data_has_all_there_is_and_one_speaker_for_each_process(tmp_path):
    (tmp_path / "voices" / "!v").mkdir(parents=True)
    for name in ("en_dict", "voices/mb", "voices/!v/m1"):
        (tmp_path / name).write_text(name)
    own = own_data(tmp_path)
    assert (own / "en_dict").read_text() == "en_dict" and (own / "voices" / "!v" / "m1").read_text() == "voices/!v/m1"
    for text in ("a long one", "another"):
        assert (own / "voices" / "!v" / write_variant(own, text)).read_text() == text
    assert len([*(own / "voices" / "!v").iterdir()]) == 2
    assert len([*(tmp_path / "voices" / "!v").iterdir()]) == 1  # nothing is written there


def test_answers_follow_from_what_is_said():
    numbers = {number_words(number): number for number in range(1000)}
    kinds = set()
    for utterance in said(4000):
        kinds.add(utterance.kind)
        words = utterance.text.split()
        if utterance.kind == "sum":
            way = next(word for word in words if word in ("plus", "minus", "times"))
            one, other = utterance.text.split(" is ")[1].split(f" {way} ")
            result = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}[way](
                numbers[one], numbers[other]
            )
            assert utterance.answer == number_words(result)
        elif utterance.kind == "bigger":
            both = sorted(numbers[part.strip()] for part in utterance.text.split("er ", 2)[-1].split(" or "))
            assert utterance.answer == number_words(both["bigger" in words])
        elif utterance.kind in ("draw", "repeat"):
            assert utterance.text.endswith(utterance.answer)
        elif utterance.kind == "order":
            assert utterance.answer == words[words.index("first") + 1 if "first" in words else -1]
    assert len(kinds) == 15
    assert number_words(342) == "three hundred and forty two" and number_words(700, "") == "seven hundred"
    assert number_words(305, "") == "three hundred five"


def test_replies_are_sentences_with_the_answer():
    replies = {}
    for utterance in said(4000):
        assert (utterance.reply is None) == (utterance.answer is None)
        if utterance.answer is not None:
            replies.setdefault(utterance.kind, set()).add(utterance.reply)
            if utterance.kind not in ("draw", "switch"):
                assert f" {utterance.answer}" in f" {utterance.reply.replace(',', '').lower()}"
    assert len(replies) == 11
    # They begin with a few words: a word at the beginning is spelled, and would have to be learned a second time.
    assert {reply.split()[0] for kind in replies.values() for reply in kind} == set(listed("The There Here You"))
    assert "The answer is the number nine." in replies["sum"] and "The door is now open." in replies["switch"]
    assert "The colour of the banana is yellow." in replies["fact"] and "The spider has eight legs." in replies["fact"]
    assert "The word cold is the opposite of hot." in replies["fact"] and "The letters are c, u, p." in replies["spell"]
    bigger = Utterance("bigger", "which one is smaller two or forty six", "two", "", True)
    assert bigger.reply == "The number two is smaller than forty six."
    order = Utterance("order", "what animal comes last cat or dog", "dog", "", True)
    assert order.reply == "The last animal is the dog."
    drawn = Utterance("draw", "draw a red heart and a big blue star", "a red heart and a big blue star", "", False)
    assert drawn.reply == "Here is your red heart, and your big blue star."
    odd = Utterance("odd", "which is an animal cat or red", "cat", "", True)
    assert odd.reply == "The animal of the two is the cat."


def test_a_mean_of_weights_is_in_place_for_a_while():
    network = torch.nn.Linear(1, 1, bias=False)
    average, values = Average(network), (1.0, 2.0, 6.0)
    for value in values:
        torch.nn.init.constant_(network.weight, value)
        average.update()
    with average.in_place():
        assert network.weight.item() == 3.0
    assert network.weight.item() == 6.0


def test_the_prompts_of_the_server_are_taught():
    asked = {TranscriptionBody(model="m").instruction, TranslationBody(model="m").instruction}
    asked.add(TranscriptionBody(model="m", language="en").instruction)
    assert asked <= set(TRANSCRIBE)


def test_an_answer_is_the_same_but_for_case_spaces_and_punctuation():
    assert evaluate.is_same("What is three plus four?", " what is  Three plus four")
    assert not evaluate.is_same("Three.", "Tree.")


def test_mel_frames_are_those_of_the_processor():
    sounds = torch.randn(3, 16_000 + 77, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[0.3], [1e-3], [2]]
    )
    expected = torch.stack([log_mel(sound.contiguous(), 128) for sound in sounds])
    torch.testing.assert_close(log_mels(sounds, 128), expected, rtol=1e-4, atol=1e-4)


def test_wear_is_seeded_and_keeps_the_sound_in_bounds():
    sounds = torch.from_numpy(np.stack([np.sin(np.arange(9000) / step) for step in (9, 30)])).float()
    one, again, other = (worn(sounds, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert one.abs().max() < 1 and one.isfinite().all()


def test_gaps_are_few_and_others_in_every_row():
    mel = torch.randn(64, 300, 128)
    one, again = (with_gaps(mel, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(one, again)
    is_missing = one != mel
    whole_frames, whole_bins = is_missing.all(2).sum(1), is_missing.all(1).sum(1)
    assert whole_frames.max() <= NUM_GAPS * GAP_FRAMES and whole_bins.max() <= NUM_GAPS * GAP_BINS
    assert whole_frames.float().mean() > 4 and whole_bins.float().mean() > 8
    assert len({tuple(row.flatten().tolist()) for row in is_missing.all(2)}) > 60
    means = mel.mean((1, 2))
    assert all((one[row][is_missing[row]] == means[row]).all() for row in range(64))


def test_another_speaker_has_the_same_frames_at_other_frequencies(monkeypatch):
    tones = [300.0, 1200.0, 4000.0]
    time_s = torch.arange(16_000) / 16_000
    sound = torch.stack([torch.sin(2 * torch.pi * hertz * time_s) for hertz in tones for _ in range(40)])
    mel = log_mels(sound, 128)
    monkeypatch.setattr("training.tiny_omni.room.WAVE_HEIGHT", 0.0)
    other = as_of_others(mel, torch.Generator().manual_seed(1))
    assert other.shape == mel.shape and torch.isfinite(other).all()
    peaks = {hertz: log_mels(torch.sin(2 * torch.pi * hertz * time_s)[None], 128)[0, 50].argmax() for hertz in tones}
    moved = other[:, 50].argmax(1).view(3, 40)
    for hertz, found in zip(tones, moved, strict=True):
        edges = [
            log_mels(torch.sin(2 * torch.pi * hertz * by * time_s)[None], 128)[0, 50].argmax()
            for by in (1 / (1 + STRETCH), 1 / (1 - STRETCH))
        ]
        assert edges[0] - 1 <= found.min() < peaks[hertz] < found.max() <= edges[1] + 1
    monkeypatch.setattr("training.tiny_omni.room.STRETCHED", 0.0)
    assert torch.allclose(as_of_others(mel, torch.Generator().manual_seed(1)), mel)


def test_targets_are_the_answers_alone(folder):
    encoder = Encoder(folder / "tokenizer.json")
    group = drawn_takes(12)
    batch = collate(Random(1), encoder, group, 0.3, is_casual=False)
    sound = AudioConfig.from_dict(write_configs(folder)["thinker_config"]["audio_config"])
    num_features = sound.num_features(batch.samples.shape[1] // 160)
    [pad] = encoder.ids_of("<|audio_pad|>")
    assert (batch.ids[:, batch.start : batch.start + num_features] == pad).all()
    assert (batch.ids == pad).sum() == num_features * len(group)
    for row, take in enumerate(group):
        asks = take.utterance.asks(Random(2))
        for segment, ask in enumerate(asks, 1):
            targets = batch.targets[row][batch.segments[row] == segment]
            assert targets[targets != NO_TARGET].tolist() == list(encoder.ids_of(f"{ask.answer}<|im_end|>"))


@pytest.fixture(scope="module")
def stored(config, folder):
    """A network whose every part matters, its weights in the folder, and transformers' network of that folder."""
    torch.manual_seed(0)
    network = Network(config, len(spoken_words())).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.08)
    write_weights(folder, network.stored_weights())
    network.load_stored(read_weights(folder))
    reference, found = require("transformers").Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(found.values()), found
    return network, reference.eval()


@pytest.mark.parametrize("seconds", [0.7, 1.0, 3.3])
def test_the_network_is_that_of_transformers(stored, config, seconds):
    network, reference = stored
    mel = torch.randn(2, round(100 * seconds), 128)
    thinker = config["thinker_config"]
    count = AudioConfig.from_dict(thinker["audio_config"]).num_features(mel.shape[1])
    around = (5, 6, thinker["audio_start_token_id"]), (thinker["audio_end_token_id"], 80, 81, 82)
    ids = torch.tensor([[*around[0], *[thinker["audio_token_id"]] * count, *around[1]]] * 2)
    positions = torch.arange(ids.shape[1]).expand(2, -1)
    with torch.no_grad():
        hidden, _ = network(mel, ids, positions, attention_mask(torch.zeros_like(ids)), 3)
        expected = reference(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            input_features=mel.transpose(1, 2),
            feature_attention_mask=torch.ones(mel.shape[:2], dtype=torch.long),
        ).logits
        torch.testing.assert_close(network.lm_head(hidden), expected, rtol=1e-3, atol=1e-3)


def test_it_learns(config, folder):
    """A few steps on one batch lower both losses, and what it scores is counted by kind."""
    torch.manual_seed(0)
    thinker = config["thinker_config"]
    small = {
        "audio_config": {
            **thinker["audio_config"],
            **{"encoder_layers": 1, "downsample_hidden_size": 8, "d_model": 64, "encoder_ffn_dim": 64},
        },
        "text_config": {**thinker["text_config"], "num_hidden_layers": 1, "intermediate_size": 64},
    }
    network = Network({"thinker_config": {**thinker, **small}}, len(spoken_words()))
    optimisers = make_optimisers(network, "muon", 3e-3, 0.0, False)
    batch = collate(Random(1), Encoder(folder / "tokenizer.json"), drawn_takes(3), 0.1, is_casual=False)
    generator = torch.Generator().manual_seed(0)
    first, *_, last = [train_step(network, optimisers, batch, generator).tolist() for _ in range(8)]
    assert last[0] < 0.8 * first[0] and last[1] < first[1]
    scores = score(network, [batch], "cpu")
    assert set(scores) == {kind for kinds in batch.kinds for kind in kinds}
    assert features_of(batch.samples).shape[1] == batch.samples.shape[1] // 160


def test_a_sample_rate_is_changed_without_changing_the_sound():
    time_s = np.arange(22_050) / 22_050
    tone = np.sin(2 * np.pi * 440 * time_s).astype(np.float32)
    found = speech.resampled(tone, speech.Fraction(16_000, 22_050))
    expected = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    assert len(found) == 16_000
    np.testing.assert_allclose(found[200:-200], expected[200:-200], atol=5e-3)


@speaking
@pytest.mark.parametrize("set_name", ["training", *SETS])
def test_every_speaker_is_there(set_name):
    names = [f"en-us+{speaker}" if speaker else "en" for speaker in speech.SPEAKERS[set_name]]
    voices = [speech.Voice("espeak-ng", name, 160, 50, 50, 0) for name in (*names, *speech.ACCENTS)]
    voices += [speech.Voice("flite", name, 160, 50, 50, 0) for name in {*speech.FLITE[set_name]} - {""}]
    for voice in voices:
        samples = speech.speak("red", voice)
        assert 0.1 < len(samples) / speech.SAMPLE_RATE < 1.5
        assert 0.02 < np.abs(samples).max() <= 1.2


@speaking
def test_drawn_speakers_speak_and_are_not_the_same():
    lengths, levels = [], []
    for seed in range(40):
        rng = Random(seed)
        voice = speech.Voice("espeak-ng", rng.choice(speech.ACCENTS), 160, 50, 50, 0, variant=random_variant(rng))
        samples = speech.speak("which animal comes first", voice)
        lengths.append(len(samples) / speech.SAMPLE_RATE)
        levels.append(float(np.sqrt(np.square(samples).mean())))
    assert min(lengths) > 1 and max(lengths) < 3
    assert min(levels) > 0.01 and max(levels) < 0.6
    assert len({*lengths}) > 30 and len({*levels}) == 40


@speaking
def test_a_forked_process_has_a_speaker_of_its_own():
    voice = speech.Voice("espeak-ng", "en", 160, 50, 50, 0, variant=random_variant(Random(1)))
    speech.speak("red", voice)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(speech.speak, ("red", dataclasses.replace(voice, variant=random_variant(Random(2)))))
    own = speech._espeak()._data / "voices" / "!v"
    assert (own / f".{os.getpid()}").read_text() == voice.variant
    assert len([file for file in own.iterdir() if file.name.startswith(".")]) >= 2


@speaking
def test_an_unknown_speaker_is_told():
    with pytest.raises(speech.SpeechMissing, match="nobody"):
        speech.speak("red", speech.Voice("espeak-ng", "en+nobody", 160, 50, 50, 0))


def test_a_root_without_libraries_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv(speech.ROOT, str(tmp_path))
    with pytest.raises(speech.SpeechMissing, match=r"carry\.sh"):
        speech._library("libespeak-ng.so.1")


@speaking
def test_items_are_sounds_of_their_set():
    found = list(items("test", 3))
    assert all(item.samples.dtype == np.float32 and 0.3 < len(item.samples) / 16_000 < 10 for item in found)
    take = next(takes(Random(3), "validation"))
    assert isinstance(take.utterance, Utterance) and take.utterance.set_name == "validation"
    assert np.array_equal(heard(Random(1), take), heard(Random(1), take))
