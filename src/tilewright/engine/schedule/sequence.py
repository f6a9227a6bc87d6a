"""One answer being generated, and the arithmetic over its tokens."""

from __future__ import annotations

import bisect
import enum
import itertools
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tilewright.engine.constraint.compiler import Grammar
from tilewright.engine.constraint.matcher import Matcher
from tilewright.engine.kv.cross import CrossGroup, CrossSpan, cross_groups_of
from tilewright.engine.measure.stats import StepReads
from tilewright.types import FinishReason, Medium, ModelInputs, SamplingParams, Timings, TokenLogprob

# Called with the index of a prompt token and fp32 logits [R, V] for it and the tokens after it, before the next step
# overwrites them.
PromptReader = Callable[[int, Tensor], None]

_next_id = itertools.count()
NO_SLOT = -1


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class FeatureSpan:
    """Tokens start .. start + length of a sequence, and the first of a medium's features that take their place.

    Made of the spans of a Medium; a StepWriter makes a row of `feature_runs` of what a chunk has of it.
    """

    medium: Medium
    first_feature: int
    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass
class StateSlots:
    """Slots of the state cache that a running sequence holds."""

    own: int  # where its steps write the state
    read: int = NO_SLOT  # the state after its computed tokens: its own or a snapshot's; none before the first
    kept: dict[int, int] = field(default_factory=dict)  # in the step under way: token count -> slot of that state


@dataclass
class WindowPages:
    """Pages that a running sequence holds in layers with one sliding window: those of its latest tokens."""

    first: int  # index of the first of these pages in the sequence; earlier ones are released
    pages: list[int]
    num_stored: int  # how many of the sequence's pages the prefix cache has seen

    @property
    def stop(self) -> int:
        """Index in the sequence of the page after these."""
        return self.first + len(self.pages)


class Sequence:
    """A prompt and the tokens generated after it so far.

    A request for n answers makes n of these over one prompt (`for_request`). The first is their leader: it computes the
    prompt and its log-probabilities, the others find its pages in the prefix cache.
    """

    def __init__(
        self,
        request_id: str,
        inputs: ModelInputs,
        params: SamplingParams,
        *,
        index: int = 0,
        leader: Sequence | None = None,
        seed: int | None = None,
        stop_token_ids: Collection[int] = (),
        submitted_s: float | None = None,
        matcher: Matcher | None = None,
        prompt_reader: PromptReader | None = None,
    ) -> None:
        self.id = next(_next_id)  # counts up with arrival
        self.request_id = request_id
        self.index = index
        self._leader = leader  # None for the leader itself: a reference cycle would keep it alive
        self.inputs = inputs
        self.params = params
        self.seed = secrets.randbits(64) if seed is None else seed
        self.stop_token_ids = frozenset(stop_token_ids)
        # With ignore_eos the stop tokens include the end of text only if a grammar may need it.
        self._ignored_token_ids = self.stop_token_ids.difference(params.stop_token_ids)
        self.matcher = matcher  # of a constrained answer, until it is finished
        self.prompt_reader = prompt_reader  # gets the raw logits of the prompt, if its log-probabilities are asked for

        self.token_ids = list(inputs.token_ids)
        self.num_prompt_tokens = len(inputs.token_ids)
        self.position_offset = inputs.next_position - len(inputs.token_ids)  # of an output token's rope position
        self.num_computed_tokens = 0  # their keys and values are in the pages
        self.pages: list[int] = []
        self.page_digests: list[bytes] = []  # of full pages, as far as needed
        self.num_stored_pages = 0  # how many of `pages`, from the first, the prefix cache has seen
        self.window_pages: dict[int, WindowPages] = {}  # by window, in models with sliding windows
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache when it was first admitted
        self.first_kept_token: int | None = None  # first token whose hidden state is read: computed even if cached
        self.pinned_keys: list[bytes] = []  # of media that are being read
        self.cross_groups: list[CrossGroup] = cross_groups_of(inputs.media) if leader is None else leader.cross_groups
        self.pinned_groups: list[CrossGroup] = []  # those seen by tokens of the step under way
        self.state_slots: StateSlots | None = None  # while it runs, in models with recurrent layers
        self.branch_border = 0  # how many of its tokens had matching pages when it was last admitted
        self.last_snapshot: bytes | None = None  # latest snapshot after its prompt, which the next one replaces
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.logprobs: list[TokenLogprob] = []  # of the output
        self._prompt_logprobs: list[TokenLogprob | None] = [None]
        self._feature_spans: list[FeatureSpan] = (
            _feature_spans(inputs.media) if leader is None else leader._feature_spans
        )
        self._span_stops = [span.stop for span in self._feature_spans]

        self.submitted_s = time.perf_counter() if submitted_s is None else submitted_s
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self.reads_at_first_token: StepReads | None = None  # of the engine, at the end of that step

    @classmethod
    def for_request(
        cls,
        request_id: str,
        inputs: ModelInputs,
        params: SamplingParams,
        eos_token_ids: Collection[int] = (),
        submitted_s: float | None = None,
        grammar: Grammar | None = None,
        prompt_reader: PromptReader | None = None,
    ) -> list[Sequence]:
        """Return the params.n sequences of a request. Without a seed they share a random one."""
        stop_token_ids = frozenset(params.stop_token_ids)
        # A grammar may be complete: there only the otherwise ignored tokens are allowed.
        if not params.ignore_eos or grammar is not None:
            stop_token_ids |= frozenset(eos_token_ids)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        sequences: list[Sequence] = []
        for index in range(params.n):
            sequence = cls(
                request_id,
                inputs,
                params,
                index=index,
                leader=sequences[0] if sequences else None,
                seed=seed,
                stop_token_ids=stop_token_ids,
                submitted_s=submitted_s,
                matcher=None if grammar is None else grammar.start(),
                prompt_reader=prompt_reader,
            )
            sequences.append(sequence)
        return sequences

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output, without drafts."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_decoding(self) -> bool:
        """Return whether all that is left to compute is the token sampled last."""
        num_tokens = len(self.token_ids)
        return num_tokens > self.num_prompt_tokens and num_tokens - self.num_computed_tokens == 1

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def waits_for_leader(self) -> bool:
        """Return whether its prompt is still being computed by the first sequence of its request."""
        leader = self._leader
        return leader is not None and leader.num_output_tokens == 0 and not leader.is_finished

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None]:
        """Log-probabilities of prompt tokens so far, shared by the request's sequences; None for the first token."""
        return (self._leader or self)._prompt_logprobs

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Return whether this sequence still has to compute log-probabilities of prompt tokens."""
        return (
            self.params.prompt_logprobs is not None
            and self._leader is None
            and len(self._prompt_logprobs) < self.num_prompt_tokens
        )

    def suppressed_token_ids(self, num_drafts: int = 0) -> frozenset[int]:
        """Return the stop tokens that must not come next, or after num_drafts drafts; before min_tokens that is all."""
        if self.num_output_tokens + num_drafts < self.params.min_tokens:
            return self.stop_token_ids
        return self._ignored_token_ids if self.params.ignore_eos else frozenset()

    def positions(self, start: int, stop: int) -> np.ndarray:
        """Return the rope positions [A, stop - start] of tokens start .. stop, which may include drafts."""
        num_prompt_tokens = self.num_prompt_tokens
        prompt = self.inputs.positions[:, start:stop]
        if stop <= num_prompt_tokens:
            return prompt
        first = max(start, num_prompt_tokens) + self.position_offset
        count = stop - max(start, num_prompt_tokens)
        output = np.broadcast_to(np.arange(first, first + count, dtype=np.int64), (prompt.shape[0], count))
        return output if start >= num_prompt_tokens else np.concatenate([prompt, output], axis=1)

    @property
    def unread_media(self) -> list[Medium]:
        """Media that uncomputed tokens read."""
        return [
            medium
            for medium in self.inputs.media
            if medium.spans and medium.spans[-1].start + medium.spans[-1].length > self.num_computed_tokens
        ]

    def feature_spans(self, start: int, stop: int) -> list[FeatureSpan]:
        """Return the features that replace tokens start .. stop, cut to that range, in order."""
        found: list[FeatureSpan] = []
        for index in range(bisect.bisect_right(self._span_stops, start), len(self._feature_spans)):
            span = self._feature_spans[index]
            if span.start >= stop:
                break
            first, last = max(span.start, start), min(span.stop, stop)
            found.append(FeatureSpan(span.medium, span.first_feature + first - span.start, first, last - first))
        return found

    def cross_groups_in(self, start: int, stop: int) -> list[CrossGroup]:
        """Return the groups that some of tokens start .. stop see, in order."""
        return [group for group in self.cross_groups if group.start < stop and start < group.stop]

    def cross_spans(self, start: int, stop: int) -> list[CrossSpan]:
        """Return the cross-attention spans of tokens start .. stop, in order; tokens that see nothing have none."""
        return [
            cross_span for group in self.cross_groups_in(start, stop) for cross_span in group.cross_spans(start, stop)
        ]

    def timings(self) -> Timings:
        """Return the seconds since submission; events that have not happened yet count as now."""
        now = time.perf_counter() if self.finished_s is None else self.finished_s
        queued, first_token = self.started_s or now, self.first_token_s or now
        return Timings(queued - self.submitted_s, first_token - self.submitted_s, now - self.submitted_s)


def _feature_spans(media: tuple[Medium, ...]) -> list[FeatureSpan]:
    found = []
    for medium in media:
        if medium.num_states:
            continue
        first_feature = 0
        for span in medium.spans:
            found.append(FeatureSpan(medium, first_feature, span.start, span.length))
            first_feature += span.length
    return sorted(found, key=lambda span: span.start)
