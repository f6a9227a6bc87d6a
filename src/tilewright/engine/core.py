"""One step over all requests: schedule, compute, sample and update, then draft if the model can."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from tilewright.engine.constraint.compiler import ConstraintCompiler, Grammar
from tilewright.engine.draft.predictor import DraftPlan, PredictorDrafter
from tilewright.engine.run.executor import StepBisector
from tilewright.engine.sample.detokenizer import Detokenizer, TokenDecoder
from tilewright.engine.sample.sampler import Sampler
from tilewright.engine.schedule.resources import SequenceResources
from tilewright.engine.schedule.scheduler import Scheduler
from tilewright.engine.schedule.sequence import PromptReader, Sequence
from tilewright.engine.schedule.step import DraftInput, Sampled, SequenceOutput, Step
from tilewright.engine.speech.scheduler import SpeechScheduler
from tilewright.engine.speech.sequence import SpeechSequence
from tilewright.layers.batch import WantedStates
from tilewright.types import Completion, Delta, FinishReason, Medium, ModelInputs, RequestError, SamplingParams

_log = logging.getLogger(__name__)


class StepRunner(Protocol):
    """Computes a step.

    It encodes the media of `step.encode` into the encoder cache, fills the pages of `step.cross_groups` from it, writes
    the keys and values of the chunks' tokens, drafts included, into the pages of their sequences and recurrent states
    into their slots, and returns the requested rows of logits in order, fp32 [step.num_logits, V]. A step without
    chunks only encodes.
    """

    def run(self, step: Step) -> Tensor: ...

    def run_with_states(self, step: Step, wanted: WantedStates) -> tuple[Tensor, Tensor]: ...

    def encode(self, media: list[Medium]) -> None: ...

    def send_ahead(self, media: list[Medium]) -> None: ...

    def end_ahead(self) -> None: ...


@dataclass(frozen=True)
class StepResult:
    """What one step computed, and what it added to each sequence."""

    deltas: list[tuple[Sequence, Delta]] = field(default_factory=list)
    failures: dict[str, Exception] = field(default_factory=dict)  # by dropped request
    step: Step | None = None  # None: it raised as a whole
    draft_inputs: list[DraftInput] = field(default_factory=list)  # the predictor's inputs after it


class EngineCore:
    """Accepts requests and returns what each step adds to their sequences. Not thread-safe: one thread uses it."""

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        sampler: Sampler,
        *,
        make_token_decoder: Callable[[], TokenDecoder],
        vocabulary_size: int,
        num_embeddings: int | None = None,
        eos_token_ids: Collection[int] = (),
        constraints: ConstraintCompiler | None = None,
        drafter: PredictorDrafter | None = None,
        speech: SpeechScheduler | None = None,
        sends_ahead: bool = False,
    ) -> None:
        self.runner = runner
        self._sends_ahead = sends_ahead  # whether media of later steps are copied to the device while it computes
        self.scheduler = scheduler
        self.sampler = sampler
        self.make_token_decoder = make_token_decoder
        self.vocabulary_size = vocabulary_size
        self.num_embeddings = num_embeddings or vocabulary_size  # tokens the model can read; some are never generated
        self.eos_token_ids = frozenset(eos_token_ids)
        self.constraints = constraints
        self.drafter = drafter  # None: the model has no multi-token predictor
        self.speech = speech  # None: the model does not speak
        self._finish_reasons: WeakKeyDictionary[Sequence, FinishReason] = WeakKeyDictionary()  # of text still spoken
        self._detokenizers: WeakKeyDictionary[Sequence, Detokenizer] = WeakKeyDictionary()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or (self.speech is not None and self.speech.has_work)

    @property
    def resources(self) -> SequenceResources:
        """Memory that sequences share."""
        return self.scheduler.resources

    def must_compile(self, params: SamplingParams) -> bool:
        """Return whether the request's constraint still has to be compiled, which may take seconds. Thread-safe."""
        constraint = params.constraint
        return constraint is not None and self.constraints is not None and not self.constraints.knows(constraint)

    def compile(self, inputs: ModelInputs, params: SamplingParams) -> Grammar | None:
        """Return the grammar of a request's constraint, or None; RequestError if it is invalid. Thread-safe."""
        if params.constraint is None:
            return None
        if self.constraints is None:
            raise RequestError("constraint is given, but this engine has no tokenizer to hold answers to it")
        return self.constraints.compile(params.constraint, opens_reasoning=inputs.opens_reasoning)

    def add(
        self,
        request_id: str,
        inputs: ModelInputs,
        params: SamplingParams,
        submitted_s: float | None = None,
        grammar: Grammar | None = None,
        prompt_reader: PromptReader | None = None,
    ) -> list[Sequence]:
        """Queue a new request and return its sequences; RequestError if it can never be answered.

        `prompt_reader` gets the logits of the prompt, if its log-probabilities are asked for.
        """
        for name, ids, count in (
            ("the prompt", inputs.token_ids, self.num_embeddings),
            ("logit_bias", params.logit_bias, self.vocabulary_size),
            ("stop_token_ids", params.stop_token_ids, self.vocabulary_size),
        ):
            for token_id in (min(ids), max(ids)) if ids else ():
                if not 0 <= token_id < count:
                    raise RequestError(f"{name} has token {token_id}, expected 0 to {count - 1}")
        self.scheduler.check(len(inputs.token_ids))
        speeches = [self._make_speech(inputs, params) for _ in range(params.n)] if params.voice is not None else []
        sequences = Sequence.for_request(
            request_id, inputs, params, self.eos_token_ids, submitted_s, grammar, prompt_reader
        )
        stop = params.stop if grammar is None else ()  # a grammar decides where the answer ends
        for sequence in sequences:
            self._detokenizers[sequence] = Detokenizer(self.make_token_decoder(), stop, params.min_tokens)
        self.scheduler.add(sequences)
        if self.speech is not None:
            for sequence, speech in zip(sequences, speeches, strict=False):
                self.speech.add(speech, sequence)
        return sequences

    def _make_speech(self, inputs: ModelInputs, params: SamplingParams) -> SpeechSequence:
        if self.speech is None:
            raise RequestError(f"voice is {params.voice!r:.100}, but this model does not speak", param="voice")
        return self.speech.make_sequence(inputs, params)

    def step(self) -> StepResult:
        """Run one step and return what it adds to each sequence: nothing while it only computes prompts.

        An error in one sequence ends only its request. An error of the step as a whole ends the requests that it
        computed, or all requests if it could not be scheduled. Speech runs after the text, with a bounded amount of
        work per step (engine/speech/scheduler.py).
        """
        step = None
        try:
            step = self.scheduler.schedule() if self.scheduler.has_work else Step()
            result = self._step_text(step)
            return result if self.speech is None else self._step_speech(self.speech, result)
        except Exception as error:
            return self._abandon(step, error)

    def _step_text(self, step: Step) -> StepResult:
        plan = None
        if self.drafter and step.chunks:
            plan = self.drafter.plan(step)
            step = replace(step, keeps_hidden=plan.keeps_hidden)
        try:
            sampled = self._compute(step)
        except Exception as error:
            bisector = StepBisector(self._compute, self.runner.encode, self.scheduler)
            computed, sampled = bisector.bisect(step, error)
        else:
            computed = step
        deltas = self._deltas(self.scheduler.update(computed, sampled))
        failures = self.scheduler.pop_failures()
        for request_id in failures:
            self.scheduler.abort(request_id)
        draft_inputs: list[DraftInput] = []
        if self.drafter and plan is not None and computed is step:
            draft_inputs = self._draft(self.drafter, step, plan)
        return StepResult(deltas, failures, step, draft_inputs)

    def _step_speech(self, speech: SpeechScheduler, result: StepResult) -> StepResult:
        """Return the result of the text with that of speech. A spoken answer ends when its sound is complete.

        Speech that fails ends only its request.
        """
        failures = dict(result.failures)
        for request_id in failures:
            speech.forget(request_id)
        merged = [self._pass_text(speech, sequence, delta) for sequence, delta in result.deltas]
        try:
            deltas = speech.step()
        except Exception as error:  # not caused by a single answer
            failures.update({sequence.request_id: error for sequence in speech.answers})
            deltas = []
        for delta in deltas:
            sequence = delta.speech.answer
            assert sequence is not None, "speech is added with its answer"
            if delta.error is not None:
                failures.setdefault(sequence.request_id, delta.error)
                continue
            reason = self._finish_reasons.pop(sequence, None) if delta.is_done else None
            merged.append((sequence, Delta(sequence.index, audio=delta.samples.numpy(), finish_reason=reason)))
        for request_id in failures:
            self.scheduler.abort(request_id)
            speech.forget(request_id)
        merged = [item for item in merged if item[0].request_id not in failures]
        return replace(result, deltas=merged, failures=failures)

    def _abandon(self, step: Step | None, error: Exception) -> StepResult:
        """Drop the requests of a step that raised as a whole; all requests if it could not be scheduled."""
        scheduler = self.scheduler
        sequences = scheduler.running + scheduler.waiting
        if step is not None:
            sequences = [chunk.sequence for chunk in step.chunks] + scheduler.readers(step.encode)
        failures = scheduler.pop_failures() | {sequence.request_id: error for sequence in sequences}
        for request_id in failures:
            scheduler.abort(request_id)
            if self.speech is not None:
                self.speech.forget(request_id)
        return StepResult(failures=failures)

    def _pass_text(self, speech: SpeechScheduler, sequence: Sequence, delta: Delta) -> tuple[Sequence, Delta]:
        """Pass a Delta's text to speech; if it is the last, hold back finish_reason until the sound is complete."""
        if not speech.is_speaking(sequence):
            return sequence, delta
        speech.set_text(sequence, is_complete=delta.finish_reason is not None)
        if delta.finish_reason is not None:
            self._finish_reasons[sequence] = delta.finish_reason
        return sequence, replace(delta, finish_reason=None)

    def abort(self, request_id: str) -> list[tuple[Sequence, Delta]]:
        """End a request and return the last Delta of each unfinished sequence. Not while a step is under way."""
        ended = self.scheduler.abort(request_id)
        if self.speech is not None:
            for sequence in self.speech.abort(request_id):
                if sequence not in ended:  # its text is complete, its sound is not
                    sequence.finish_reason = "abort"
                    ended.append(sequence)
        return [
            (sequence, Delta(sequence.index, self._detokenizers[sequence].flush(), (), finish_reason="abort"))
            for sequence in ended
        ]

    def _compute(self, step: Step) -> list[Sampled]:
        if not step.chunks:
            self.runner.encode(step.encode)
            return []
        wanted = None if self.speech is None else self.speech.wanted_states(step)
        if self.speech is None or wanted is None:
            return self._sample(self.runner.run(step), step)
        logits, states_MD = self.runner.run_with_states(step, wanted)
        self.speech.store_states(step, states_MD)
        return self._sample(logits, step)

    def _sample(self, logits: Tensor, step: Step) -> list[Sampled]:
        """Sample the step's tokens; meanwhile, the media of the next step are copied to the device."""
        if not self._sends_ahead:
            return self.sampler.sample(logits, step)
        self.runner.send_ahead(self.scheduler.media_ahead(step))
        try:
            return self.sampler.sample(logits, step)
        finally:
            self.runner.end_ahead()

    def _draft(self, drafter: PredictorDrafter, step: Step, plan: DraftPlan) -> list[DraftInput]:
        try:
            return drafter.draft(step, plan, self.scheduler.find_room)
        except Exception:  # answers do not depend on it
            _log.exception("nothing could be drafted after a step")
            return []

    def completion(self, sequence: Sequence) -> Completion:
        """Return the answer of a finished sequence."""
        assert sequence.finish_reason is not None, f"sequence {sequence.id} is {sequence.status.value}"
        params = sequence.params
        samples = None if self.speech is None else self.speech.pop_samples(sequence)
        return Completion(
            text=self._detokenizers[sequence].text,
            token_ids=tuple(sequence.output_token_ids),
            finish_reason=sequence.finish_reason,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            timings=sequence.timings(),
            logprobs=None if params.logprobs is None else tuple(sequence.logprobs),
            prompt_logprobs=None if params.prompt_logprobs is None else tuple(sequence.prompt_logprobs),
            audio=samples,
            audio_rate=None if samples is None or self.speech is None else self.speech.model.samples_per_second,
        )

    def _deltas(self, outputs: list[SequenceOutput]) -> list[tuple[Sequence, Delta]]:
        results = []
        for output in outputs:
            try:
                results.append((output.sequence, self._delta(output)))
            except Exception as error:
                self.scheduler.fail(output.sequence, error)
        return results

    def _delta(self, output: SequenceOutput) -> Delta:
        """Return an output with its text; end the sequence at a stop string."""
        sequence, reason = output.sequence, output.finish_reason
        detokenizer = self._detokenizers[sequence]
        text, num_tokens = "", 0
        for token_id in output.token_ids:
            num_tokens += 1
            if output.has_stop_token and num_tokens == len(output.token_ids):
                break
            text += detokenizer.push(token_id)
            if detokenizer.is_stopped:
                self._stop_at(sequence, len(output.token_ids) - num_tokens)
                reason = "stop"
                break
        if reason is not None:
            text += detokenizer.flush()
            if detokenizer.is_stopped:  # perhaps only in the text that the decoder had held back
                reason = sequence.finish_reason = "stop"
        logprobs = None if sequence.params.logprobs is None else tuple(output.logprobs[:num_tokens])
        return Delta(sequence.index, text, tuple(output.token_ids[:num_tokens]), logprobs, reason)

    def _stop_at(self, sequence: Sequence, num_surplus: int) -> None:
        """End a sequence at a stop string; with accepted drafts it may be a few tokens past it."""
        if sequence.is_finished:
            sequence.finish_reason = "stop"
        else:
            self.scheduler.finish(sequence, "stop")
        if num_surplus:
            del sequence.token_ids[-num_surplus:]
            del sequence.logprobs[-num_surplus:]
