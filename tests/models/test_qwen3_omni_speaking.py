"""Answers that are spoken by the engine: what transformers says, while others write; aborted ones leave nothing."""

import json
import wave

import numpy as np
import pytest
import tiny_checkpoint
import tiny_omni
import tiny_speech
import torch
from components import randomized
from oracle import require

from tilewright.cli import main
from tilewright.engine.engine import Engine
from tilewright.engine.speech.sequence import find_voice
from tilewright.models.qwen3_omni.config import MediaTokens
from tilewright.outputs.sound import to_pcm16
from tilewright.types import RequestError

TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ {'user': 'U', 'assistant': 'A\\n'}.get(message.role, 'S') }}\n"
    "{%- if message.content is string %}{{ message.content }}{% else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>{%- else %}{{ part.text }}{% endif -%}"
    "{%- endfor -%}{%- endif -%}<|end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>A{{ '\\n' }}{%- endif -%}"
)
SPECIAL = [*tiny_checkpoint.OMNI_SPECIAL, "<|im_start|>", "<|tts_pad|>", "<|tts_bos|>", "<|tts_eos|>"]
VOCAB = 280
IDS = {token: tiny_checkpoint.FIRST_SPECIAL + i for i, token in enumerate(SPECIAL)}
END = IDS["<|end|>"]
GREEDY = {"max_tokens": 10, "temperature": 0}
SPOKEN = {"modalities": ("text", "audio")}
OPTIONS = {"dtype": "float32", "pack_cache": False, "kv_memory": "64MB", "max_sequences": 4}


def whole_config(byte_ids):
    tokens = MediaTokens(
        *(IDS[f"<|{name}|>"] for name in ("audio_pad", "audio_start", "audio_end", "image_pad", "video_pad")),
        IDS["<|vision_start|>"],
        IDS["<|vision_end|>"],
    )
    talker = {**tiny_speech.TALKER, "thinker_hidden_size": 96, "accept_hidden_layer": 1, "spatial_merge_size": 2}
    made = tiny_omni.config_of(vocab_size=VOCAB, tokens=tokens).to_dict()
    turns = {"user": "U", "assistant": "A", "system": "S"}
    return require("transformers").Qwen3OmniMoeConfig(
        thinker_config=made["thinker_config"],
        talker_config=talker,
        code2wav_config=tiny_speech.CODE2WAV,
        im_start_token_id=IDS["<|im_start|>"],
        im_end_token_id=END,
        **{f"{name}_token_id": byte_ids[letter] for name, letter in turns.items()},
        **{f"tts_{name}_token_id": IDS[f"<|tts_{name}|>"] for name in ("pad", "bos", "eos")},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speaking")
    tiny_checkpoint.write_tokenizer(folder, SPECIAL, template=TEMPLATE)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    whole = tiny_omni.make_network(whole_config(vocabulary))
    randomized(whole.talker, seed=5)
    tiny_speech.quiet(randomized(whole.code2wav, seed=5))
    with torch.no_grad():
        whole.talker.codec_head.weight[tiny_speech.TALKER["codec_eos_token_id"]] *= tiny_speech.EAGERNESS
    whole.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END, "do_sample": False}))
    tiny_checkpoint.write_patch_settings(folder, feature_size=tiny_omni.BINS)
    return folder


@pytest.fixture(scope="module")
def engine(folder):
    with Engine(folder, **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def network(folder):
    return require("transformers").Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder).eval()


def tone(seconds=0.5, hertz=300):
    time = np.arange(int(seconds * 16_000)) / 16_000
    return (np.sin(2 * np.pi * hertz * time) * 0.3).astype(np.float32)


def asked(text, *sounds):
    parts = [{"type": "audio", "audio": sound} for sound in sounds]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@torch.no_grad()
def said_by_transformers(network, engine, messages, sounds, speaker, max_tokens=10):
    ids = torch.tensor([engine.loaded.processor.chat(messages).token_ids])
    media = {}
    if sounds:
        extractor = require("transformers").WhisperFeatureExtractor(feature_size=tiny_omni.BINS)
        options = {"padding": True, "truncation": False, "return_attention_mask": True, "return_tensors": "pt"}
        features = extractor(sounds, sampling_rate=16_000, **options)
        media = {
            "input_features": features["input_features"],
            "feature_attention_mask": features["attention_mask"],
        }
    for part in (network.thinker, network.talker):
        part.rope_deltas = None
    sequences, samples = network.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **media,
        speaker=speaker,
        thinker_max_new_tokens=max_tokens,
        thinker_eos_token_id=END,
        thinker_do_sample=False,
        talker_do_sample=False,
        talker_max_new_tokens=60,
    )
    return sequences[0, ids.shape[1] :].tolist(), samples[0, 0].numpy()


@pytest.mark.parametrize("sounds", [(), (tone(),)], ids=["text", "sound"])
def test_what_is_said_is_what_transformers_says(engine, network, sounds):
    messages = asked("Who is it?", *sounds)
    ids, samples = said_by_transformers(network, engine, messages, list(sounds), "ann")
    for _ in range(2):  # the second time the prompt is in the prefix cache
        ours = engine.chat(messages, **GREEDY, **SPOKEN)
        assert list(ours.token_ids) == ids
        assert ours.audio_rate == 24_000 and ours.audio.dtype == np.float32
        length = min(len(samples), len(ours.audio))
        assert length > 30 and np.abs(ours.audio[:length] - samples[:length]).max() < 1e-4
        assert len(ours.audio) == len(samples) or len(samples) > 58 * 48


def said(engine, questions, monkeypatch):
    """The answers to questions, and the codes of each."""
    runner, frames = engine.loop.core.speech.runner, {}
    compute_frames = runner.compute_frames

    def watched(chunks):
        compute_frames(chunks)
        frames.update({chunk.sequence.id: chunk.sequence.frames for chunk in chunks})

    monkeypatch.setattr(runner, "compute_frames", watched)
    answers = [engine.chat(question, **GREEDY, **SPOKEN) for question in questions]
    return answers, [frames[number] for number in sorted(frames)]


@pytest.mark.alone  # an engine of two processes, which wait for each other
def test_two_ranks_say_what_one_says(folder, engine, monkeypatch):
    """The thinker is split, the hidden states of a sound that the talker reads too; the voice is on the first rank."""
    questions = [asked("Who is it?"), asked("What is heard?", tone())]
    answers, frames = said(engine, questions, monkeypatch)
    with Engine(folder, tp=2, **OPTIONS) as of_two:
        their_answers, their_frames = said(of_two, questions, monkeypatch)
    assert frames == their_frames and len(frames) == 2 and all(len(own) > 3 for own in frames)
    for one, two in zip(answers, their_answers, strict=True):
        assert one.token_ids == two.token_ids and one.audio.shape == two.audio.shape
        assert np.abs(one.audio - two.audio).max() < 1e-4 and np.abs(one.audio).max() > 0.01


def test_sound_comes_while_text_is_written(engine):
    kinds = []
    for delta in engine.stream(asked("Tell me more."), max_tokens=40, temperature=0, ignore_eos=True, **SPOKEN):
        kinds.append("audio" if delta.audio is not None else "text")
    assert "audio" in kinds[: len(kinds) - 1 - kinds[::-1].index("text")]
    assert engine.loop.core.speech.pool.num_used == 0


def test_text_is_the_same_beside_speech(engine):
    alone = engine.chat(asked("What?"), max_tokens=20, temperature=0, ignore_eos=True)
    assert alone.audio is None and alone.audio_rate is None
    speaking = engine.submit_chat(asked("Tell me more."), max_tokens=30, temperature=0, ignore_eos=True, **SPOKEN)
    beside = engine.chat(asked("What?"), max_tokens=20, temperature=0, ignore_eos=True)
    assert beside.token_ids == alone.token_ids
    (spoken,) = speaking.result()
    assert len(spoken.audio) > 100


def test_an_aborted_answer_leaves_nothing(engine):
    handle = engine.submit_chat(asked("Tell me more."), max_tokens=200, temperature=0, ignore_eos=True, **SPOKEN)
    for delta in handle:
        if delta.audio is not None:
            handle.abort()
            break
    assert list(handle)[-1].finish_reason == "abort"
    core = engine.loop.core
    assert core.speech.pool.num_used == 0 and not core.speech.has_work and not core.speech.answers


def test_voices(engine):
    assert engine.voices == ("ann", "bob")
    question = asked("Who is it?")
    ann, bob = (engine.chat(question, **GREEDY, **SPOKEN, voice=voice) for voice in ("Ann", "bob"))
    assert ann.token_ids == bob.token_ids and not np.array_equal(ann.audio, bob.audio)
    assert engine.voice_aliases["alloy"] == "ann" and engine.voice_aliases["ash"] == "bob"
    by_alias = engine.chat(question, **GREEDY, **SPOKEN, voice="ash")
    np.testing.assert_array_equal(by_alias.audio, bob.audio)
    assert find_voice("Sage", ("chelsie", "sage")) == "sage"  # the model's own name, not OpenAI's for another
    with pytest.raises(RequestError, match="voice is 'eve', expected one of ann, bob"):
        engine.chat(question, **GREEDY, **SPOKEN, voice="eve")
    with pytest.raises(RequestError, match="modalities is"):
        engine.chat(question, **GREEDY, modalities=("smell",))


def test_a_given_text_is_read_out(engine):
    """It begins an answer, whose one more token is not heard, whichever it is."""
    reading = {"continue_final_message": True, "max_tokens": 1, "temperature": 0, **SPOKEN}
    text = [{"role": "assistant", "content": "Good day."}]
    one = engine.chat(text, **reading)
    other = engine.chat(text, **reading, logit_bias={one.token_ids[0]: -100.0})
    assert one.token_ids != other.token_ids and np.array_equal(one.audio, other.audio)
    longer = engine.chat([{"role": "assistant", "content": "Good day to you."}], **reading)
    assert not np.array_equal(longer.audio[:500], one.audio[:500])


def test_several_answers_are_each_spoken(engine):
    answers = engine.chat(asked("Who?"), n=2, max_tokens=6, temperature=1.0, seed=4, **SPOKEN)
    assert all(len(answer.audio) for answer in answers)
    again = engine.chat(asked("Who?"), n=2, max_tokens=6, temperature=1.0, seed=4, **SPOKEN)
    for one, other in zip(answers, again, strict=True):
        assert np.array_equal(one.audio, other.audio)


def test_the_command_writes_a_file(folder, tmp_path, capsys, engine):
    file = tmp_path / "said.wav"
    asking = ["chat", "Who is it?", "-m", str(folder), "--dtype", "float32", "--temperature", "0", "--max-tokens", "10"]
    assert main([*asking, "--no-pack-cache", "--kv-memory", "64MB", "--speak", str(file)]) == 0
    answer = engine.chat([{"role": "user", "content": "Who is it?"}], **GREEDY, **SPOKEN)
    printed = capsys.readouterr()
    assert printed.out == f"{answer.text}\n" and "s of speech in" in printed.err
    with wave.open(str(file)) as sound:
        assert sound.getframerate() == 24_000
        assert sound.readframes(sound.getnframes()) == to_pcm16(answer.audio)


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--speak", "a.txt"], "ends with one of .wav"), (["--voice", "ann"], "expected --speak with it")],
)
def test_flags_of_the_command(folder, flags, message, capsys):
    assert main(["chat", "Who?", "-m", str(folder), *flags]) != 0
    assert message in capsys.readouterr().err


def test_a_voice_that_fails_leaves_the_others(engine, monkeypatch):
    question, sampling = asked("Tell me more."), {"max_tokens": 20, "temperature": 0, "ignore_eos": True, **SPOKEN}
    alone = engine.chat(question, voice="ann", **sampling)
    runner, bob = engine.loop.core.speech.runner, tiny_speech.TALKER["speaker_id"]["bob"]
    compute_frames = runner.compute_frames

    def failing(chunks):
        if any(bob in chunk.sequence.prompt.codec_ids and len(chunk.sequence.frames) == 3 for chunk in chunks):
            raise RuntimeError("out of breath")
        compute_frames(chunks)

    monkeypatch.setattr(runner, "compute_frames", failing)
    failed, healthy = (engine.submit_chat(question, voice=voice, **sampling) for voice in ("bob", "ann"))
    with pytest.raises(Exception, match="out of breath"):
        failed.result()
    (beside,) = healthy.result()
    assert beside.token_ids == alone.token_ids and np.array_equal(beside.audio, alone.audio)
    core = engine.loop.core
    assert core.speech.pool.num_used == 0 and not core.has_work


@pytest.mark.parametrize("where", ["talker", "scheduler"])
def test_speech_that_fails_leaves_text(engine, monkeypatch, where):
    def broken(*args):
        raise RuntimeError("out of breath")

    scheduler = engine.loop.core.speech
    if where == "talker":
        monkeypatch.setattr(scheduler.runner, "compute_frames", broken)
    else:
        monkeypatch.setattr(scheduler, "_schedule", broken)
    speaking = engine.submit_chat(asked("Tell me more."), max_tokens=30, temperature=0, ignore_eos=True, **SPOKEN)
    assert engine.chat(asked("What?"), **GREEDY).finish_reason
    with pytest.raises(Exception, match="out of breath"):
        speaking.result()
    core = engine.loop.core
    assert core.speech.pool.num_used == 0 and not core.has_work
