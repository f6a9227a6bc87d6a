"""Speech of an answer against transformers' `generate(return_audio=True)`: the same codes and samples."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny_speech
import torch

from tilewright.engine.speech.runner import SpeechRunner
from tilewright.engine.speech.scheduler import MAX_PROMPT_ROWS, SpeechScheduler
from tilewright.engine.speech.sequence import SpeechParams, SpeechSequence
from tilewright.models.qwen3_omni.code2wav import Code2Wav
from tilewright.models.qwen3_omni.config import OmniConfig
from tilewright.models.qwen3_omni.talker import Talker, make_talker_prompt
from tilewright.ops.embedding import embedding
from tilewright.types import ContextLengthExceeded, RequestError

PAGE_SIZE = 32
START, END, BREAK = 140, 141, 7
SYSTEM, USER, ASSISTANT = 142, 143, 144
SOUND = [155, 150, 150, 150, 150, 156]
MEDIA = (150, 151, 152)
NUM_MEL_FRAMES = 30  # which are four tokens
CONVERSATIONS = {
    "question": [[USER, BREAK, 3, 4, 5]],
    "system": [[SYSTEM, BREAK, 9, 5], [USER, BREAK, 3, 4, 30, 31]],
    "sound": [[SYSTEM, BREAK, 9, 5], [USER, BREAK, 3, *SOUND, 20]],
    "turns": [[USER, BREAK, 11, *SOUND], [ASSISTANT, BREAK, 60, 61, 62], [USER, BREAK, 12, 13]],
}


def prompt_ids(turns):
    return [token for turn in turns for token in (START, *turn, END, BREAK)] + [START, ASSISTANT, BREAK]


def thinker_kwargs(token_ids):
    ids = torch.tensor([token_ids])
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if 150 in token_ids:
        mel = torch.randn(1, 16, NUM_MEL_FRAMES, generator=torch.Generator().manual_seed(1))
        kwargs |= {"input_features": mel, "feature_attention_mask": torch.ones(1, NUM_MEL_FRAMES, dtype=torch.long)}
    return kwargs


class Theirs:
    """What transformers writes and says after a prompt, and what the talker reads of its thinker."""

    @torch.no_grad()
    def __init__(self, token_ids, max_tokens, max_frames, speaker="Ann"):
        model = tiny_speech.omni()
        kwargs, seen = thinker_kwargs(token_ids), []
        decode = model.code2wav.chunked_decode
        model.code2wav.chunked_decode = lambda codes, **rest: seen.append(codes) or decode(codes, **rest)
        try:
            sequences, samples = model.generate(
                **kwargs,
                speaker=speaker,
                thinker_max_new_tokens=max_tokens,
                thinker_eos_token_id=END,
                thinker_do_sample=False,
                talker_do_sample=False,
                talker_max_new_tokens=max_frames + 1,
            )
        finally:
            del model.code2wav.chunked_decode
        self.output_ids = sequences[0, len(token_ids) :].tolist()
        self.frames = seen[0][0].t().tolist()
        self.samples = samples[0, 0]
        # As its generate has it: one pass over all but the last token gives the same states.
        fed = {**kwargs, "input_ids": sequences[:, :-1], "attention_mask": torch.ones_like(sequences[:, :-1])}
        self.states = model.thinker(**fed, output_hidden_states=True).hidden_states[2][0]
        lengths = kwargs.get("feature_attention_mask")
        self.positions = model.thinker.get_rope_index(
            kwargs["input_ids"],
            attention_mask=kwargs["attention_mask"],
            audio_seqlens=None if lengths is None else lengths.sum(-1),
        )[0][:, 0].long()


@functools.cache
def answer_of(name, speaker="ann"):
    return Theirs(prompt_ids(CONVERSATIONS[name]), 12, 16, speaker)


@functools.cache
def config():
    model = tiny_speech.omni()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return OmniConfig.from_dict(model.config.to_dict(), shapes)


def make_scheduler(num_pages=64, dtype=torch.float32, replay=True):
    model, own = tiny_speech.omni(), config()
    talker = tiny_speech.filled(lambda: Talker(own.talker), model.talker, "talker", dtype)
    code2wav = tiny_speech.filled(lambda: Code2Wav(own.code2wav), model.code2wav, "code2wav", dtype)
    table = model.thinker.get_input_embeddings().weight.detach().to(dtype)
    runner = SpeechRunner(
        SimpleNamespace(talker=talker, code2wav=code2wav),
        lambda ids: embedding(ids, table),
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        dtype=dtype,
        replay=replay,
    )
    return SpeechScheduler(runner)


def make_sequence(token_ids, theirs, params, speaker="ann", seed=0):
    own = config()
    prompt = make_talker_prompt(
        token_ids, theirs.positions.numpy(), own.turns, own.talker.codec, own.talker.speakers[speaker], MEDIA
    )
    speech = SpeechSequence(prompt, own.turns.tts_eos, own.turns.tts_pad, params, seed)
    speech.media_states = {row: theirs.states[row] for row in prompt.thinker_rows}
    return speech


def greedy(max_frames):
    return SpeechParams(temperature=0.0, max_frames=max_frames)


def spoken(scheduler, speeches):
    """The samples of each sequence, when all are done."""
    samples = {speech: [torch.empty(0)] for speech in speeches}
    while scheduler.has_work:
        for item in scheduler.step():
            samples[item.speech].append(item.samples)
    return [torch.cat(samples[speech]) for speech in speeches]


@pytest.mark.parametrize("speaker", ["ann", "bob"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_codes_and_samples_are_those_of_transformers(name, speaker):
    token_ids = prompt_ids(CONVERSATIONS[name])
    theirs = answer_of(name, speaker)
    scheduler, speech = make_scheduler(), make_sequence(token_ids, theirs, greedy(16), speaker)
    speech.set_text(theirs.output_ids, is_complete=True)
    scheduler.add(speech)
    (samples,) = spoken(scheduler, [speech])
    assert len(speech.frames) > 3
    assert speech.frames == theirs.frames
    assert samples.shape == theirs.samples.shape
    assert (samples - theirs.samples).abs().max() < 1e-4
    assert scheduler.pool.num_used == 0


def test_text_that_comes_slowly_changes_nothing():
    """Samples come while text is still written; the codes are those of a text that was there from the beginning."""
    token_ids = prompt_ids(CONVERSATIONS["sound"])
    theirs = answer_of("sound")
    scheduler, speech = make_scheduler(), make_sequence(token_ids, theirs, greedy(16))
    scheduler.add(speech)
    samples, num_early = [], 0
    for count in range(1, len(theirs.output_ids) + 1):
        speech.set_text(theirs.output_ids[:count], is_complete=count == len(theirs.output_ids))
        for _ in range(2):  # more often than there is text: it waits
            samples += [item.samples for item in scheduler.step()]
        if not speech.is_text_complete:
            num_early += sum(len(part) for part in samples)
            # A frame for each token that is followed by another.
            assert len(speech.frames) <= max(count - 1, 0)
    samples += spoken(scheduler, [speech])
    assert num_early > 0
    assert speech.frames == theirs.frames
    assert (torch.cat(samples) - theirs.samples).abs().max() < 1e-4


def test_sequences_together_are_as_each_alone():
    scheduler = make_scheduler()
    speeches, answers = [], []
    for name in ("question", "sound", "turns"):
        token_ids = prompt_ids(CONVERSATIONS[name])
        answers.append(answer_of(name))
        speeches.append(make_sequence(token_ids, answers[-1], greedy(16)))
    speeches[0].set_text(answers[0].output_ids, is_complete=True)
    scheduler.add(speeches[0])
    early = [item.samples for _ in range(5) for item in scheduler.step()]
    for speech, answer in zip(speeches[1:], answers[1:], strict=True):
        speech.set_text(answer.output_ids, is_complete=True)
        scheduler.add(speech)
    samples = spoken(scheduler, speeches)
    samples[0] = torch.cat((*early, samples[0]))
    for speech, own, answer in zip(speeches, samples, answers, strict=True):
        assert speech.frames == answer.frames
        assert (own - answer.samples).abs().max() < 1e-4


def test_a_long_prompt_is_read_in_parts():
    token_ids = prompt_ids([[USER, BREAK, *([3, 4, 5, 9] * (MAX_PROMPT_ROWS // 4 + 30))]])
    theirs = Theirs(token_ids, 6, 6)
    scheduler, speech = make_scheduler(), make_sequence(token_ids, theirs, greedy(6))
    speech.set_text(theirs.output_ids, is_complete=True)
    scheduler.add(speech)
    scheduler.step()
    assert speech.num_computed == MAX_PROMPT_ROWS and not speech.frames
    spoken(scheduler, [speech])
    assert speech.frames == theirs.frames


class Any:
    """Positions of plain text, for tests that compare with nothing."""

    def __init__(self, token_ids):
        self.positions = torch.arange(len(token_ids)).expand(3, -1)
        self.states = None


def drawn(seed, others=()):
    token_ids = prompt_ids(CONVERSATIONS["question"])
    params = SpeechParams(max_frames=12)
    scheduler = make_scheduler()
    speeches = [make_sequence(token_ids, Any(token_ids), params, seed=one) for one in (seed, *others)]
    for speech in speeches:
        speech.set_text([60, 61, 62, 63, 64, END], is_complete=True)
        scheduler.add(speech)
    spoken(scheduler, speeches)
    return speeches[0].frames


@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)])
def test_recorded_frames_are_those_that_are_not(seeds):
    """Bit for bit, of sequences that begin and end one after the other."""
    token_ids, said = prompt_ids(CONVERSATIONS["question"]), []
    for replay in (True, False):
        scheduler = make_scheduler(replay=replay)
        speeches = [
            make_sequence(token_ids, Any(token_ids), SpeechParams(max_frames=9 + 4 * i), seed=seed)
            for i, seed in enumerate(seeds)
        ]
        for speech in speeches:
            speech.set_text([60, 61, 62, 63, 64, END], is_complete=True)
            scheduler.add(speech)
            scheduler.step()
        said.append(([speech.frames for speech in speeches], spoken(scheduler, speeches)))
    assert said[0][0] == said[1][0]
    assert all(torch.equal(one, other) for one, other in zip(said[0][1], said[1][1], strict=True))


class OutOfBreathError(Exception):
    pass


class FailingSequence:
    """Makes the work on one of a scheduler's sequences raise when it is done, after so many frames."""

    def __init__(self, scheduler, where, speech, num_frames):
        self.where, self.speech, self.num_frames = where, speech, num_frames
        self.scheduler, self.most_together = scheduler, 0
        of, name = (scheduler.runner, "_complete") if where == "codes" else (
            scheduler.model.code2wav, "_decode_together"
        )  # fmt: skip
        self.work = getattr(of, name)
        setattr(of, name, self)

    def __call__(self, *args):
        result, them = self.work(*args), args[-1]
        self.most_together = max(self.most_together, len(them))
        if self.mark in them and len(self.speech.frames) >= self.num_frames:
            raise OutOfBreathError("out of breath")
        return result

    @property
    def mark(self):
        if self.where == "codes":
            return self.speech
        return self.speech.code2wav_state


def begun(scheduler, seeds):
    token_ids = prompt_ids(CONVERSATIONS["question"])
    speeches = [make_sequence(token_ids, Any(token_ids), SpeechParams(max_frames=14), seed=seed) for seed in seeds]
    for speech in speeches:
        speech.set_text([60, 61, 62, 63, 64, END], is_complete=True)
        scheduler.add(speech)
    return speeches


@pytest.mark.parametrize("where", ["codes", "samples"])
@pytest.mark.parametrize("num_frames", [0, 6])
def test_a_sequence_that_fails_is_silent_alone(where, num_frames):
    """Of three that are spoken together; the others are as without it, bit for bit."""
    scheduler = make_scheduler()
    healthy = begun(scheduler, (1, 3))
    expected = spoken(scheduler, healthy)
    scheduler = make_scheduler()
    speeches = begun(scheduler, (1, 2, 3))
    failing = FailingSequence(scheduler, where, speeches[1], num_frames)
    samples, failures = {speech: [] for speech in speeches}, []
    while scheduler.has_work:
        for item in scheduler.step():
            samples[item.speech].append(item.samples)
            failures += [item] if item.error else []
    assert failing.most_together == 3
    (failed,) = failures
    assert failed.speech is speeches[1] and isinstance(failed.error, OutOfBreathError) and failed.is_done
    assert scheduler.pool.num_used == 0
    for speech, other, own in zip(speeches[::2], healthy, expected, strict=True):
        assert speech.frames == other.frames and len(speech.frames) > 4
        assert torch.equal(torch.cat(samples[speech]), own)


def test_sampled_speech_depends_on_its_seed_alone():
    assert drawn(1) == drawn(1, others=(2, 3)) != drawn(2)


def test_nothing_to_say_is_silence():
    token_ids = prompt_ids(CONVERSATIONS["question"])
    scheduler, speech = make_scheduler(), make_sequence(token_ids, Any(token_ids), greedy(8))
    scheduler.add(speech)
    assert scheduler.step() == [] and not speech.frames
    speech.set_text([END], is_complete=True)
    (item,) = scheduler.step()
    assert item.is_done and not len(item.samples) and not scheduler.has_work
    assert scheduler.pool.num_used == 0


def test_a_sequence_waits_for_pages_and_dropping_one_frees_them():
    token_ids = prompt_ids(CONVERSATIONS["question"])
    params = greedy(40)
    speeches = [make_sequence(token_ids, Any(token_ids), params) for _ in range(2)]
    scheduler = make_scheduler(num_pages=3)
    for speech in speeches:
        speech.set_text([60, 61, 62, 63, END], is_complete=True)
        scheduler.add(speech)
    scheduler.step()
    assert speeches[0].frames and not speeches[1].frames and scheduler.waiting == [speeches[1]]
    scheduler.drop(speeches[0])
    scheduler.step()
    assert speeches[1].frames and not scheduler.waiting
    scheduler.drop(speeches[1])
    assert scheduler.pool.num_used == 0 and not scheduler.has_work


def test_a_sequence_that_is_dropped_while_it_waits():
    token_ids = prompt_ids(CONVERSATIONS["question"])
    scheduler, speech = make_scheduler(), make_sequence(token_ids, Any(token_ids), greedy(8))
    scheduler.add(speech)
    scheduler.drop(speech)
    assert not scheduler.has_work


def test_prompts_that_can_not_be_spoken():
    token_ids = prompt_ids(CONVERSATIONS["question"])
    with pytest.raises(ContextLengthExceeded, match=r"is 0 tokens\. However, .* 17 rows for the talker"):
        speech = make_sequence(token_ids, Any(token_ids), greedy(33))
        make_scheduler(num_pages=1).add(replace(speech))
    with pytest.raises(RequestError, match="beginning of an answer"):
        make_sequence(token_ids[:-3], Any(token_ids[:-3]), greedy(8))
