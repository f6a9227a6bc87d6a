"""The events of a request that may be computed more than once, as its listener sees them: each token once."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass

from tilewright.server.link.backend import (
    AnswerDelta,
    Ended,
    EngineRequest,
    Event,
    Failed,
    Listener,
    Restarted,
    Started,
)
from tilewright.types import FinishReason


def with_seed(request: EngineRequest) -> EngineRequest:
    """The request with a seed, a random one if it has none: another replica then draws the same tokens.

    They depend on the seed and the position alone, not on what else is in the batch.
    """
    if request.sampling.get("seed") is not None:
        return request
    return dataclasses.replace(request, sampling={**request.sampling, "seed": secrets.randbits(63)})


@dataclass
class _Progress:
    """How far one of the n answers is."""

    text: str = ""
    num_tokens: int = 0
    finish_reason: FinishReason | None = None


class Recovery:
    """Passes the events of one request on, over one attempt to compute it or several.

    A later attempt repeats what was passed on already, which is compared and left out. If it differs, as on a machine
    with other instructions, the listener gets `Restarted` and all of the later attempt.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._passed: dict[int, _Progress] = {}  # by the answer's index
        self._seen: dict[int, _Progress] = {}  # in this attempt
        self._events: list[Event] = []  # of this attempt, unless it is the first
        self._has_started = False
        self.num_attempts = 0
        self.has_ended = False

    def begin(self) -> None:
        """A new attempt begins."""
        self.num_attempts += 1
        self._seen = {}
        self._events = []

    def add(self, event: Event) -> None:
        """Passes on what is new of an event."""
        if self.num_attempts > 1 and isinstance(event, Started | AnswerDelta):
            self._events.append(event)
        if isinstance(event, Started):
            if not self._has_started:
                self._has_started = True
                self._listener(event)
        elif isinstance(event, AnswerDelta):
            self._add_delta(event)
        else:
            if isinstance(event, Ended) and not self._agrees_at_the_end():
                self._restart()
            self.has_ended = isinstance(event, Ended | Failed)
            self._listener(event)

    def _add_delta(self, delta: AnswerDelta) -> None:
        passed = self._passed.setdefault(delta.index, _Progress())
        seen = self._seen.setdefault(delta.index, _Progress())
        is_new = seen == passed
        seen.text += delta.text
        seen.num_tokens += delta.num_tokens
        seen.finish_reason = seen.finish_reason or delta.finish_reason
        if is_new:  # nothing of an earlier attempt is left to compare with
            self._passed[delta.index] = dataclasses.replace(seen)
            self._listener(delta)
            return
        length = min(len(seen.text), len(passed.text))
        has_stopped_early = seen.finish_reason is not None and len(seen.text) < len(passed.text)
        if seen.text[:length] != passed.text[:length] or has_stopped_early:
            self._restart()
            return
        num_new_tokens = max(0, seen.num_tokens - passed.num_tokens)
        new_text = seen.text[len(passed.text) :]
        finish_reason = seen.finish_reason if passed.finish_reason is None else None
        if new_text or num_new_tokens or finish_reason:
            logprobs = delta.logprobs
            if logprobs is not None:
                logprobs = logprobs[max(0, len(logprobs) - num_new_tokens) :]
            passed.text += new_text
            passed.num_tokens += num_new_tokens
            passed.finish_reason = passed.finish_reason or finish_reason
            self._listener(AnswerDelta(delta.index, new_text, num_new_tokens, finish_reason, logprobs))

    def _agrees_at_the_end(self) -> bool:
        return all(self._seen.get(index, _Progress()).text == passed.text for index, passed in self._passed.items())

    def _restart(self) -> None:
        """Starts the listener over with this attempt."""
        self._passed = {index: dataclasses.replace(seen) for index, seen in self._seen.items()}
        self._listener(Restarted())
        for event in self._events:
            self._listener(event)
