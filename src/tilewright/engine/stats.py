"""How the engine is doing, in numbers."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

WINDOW_S = 10.0


@dataclass(frozen=True)
class Stats:
    """A snapshot. Rates are shares from 0 to 1, of all since the start; speeds are those of the last 10 seconds."""

    num_running: int
    num_waiting: int
    num_preparing: int
    num_pages: int
    num_pages_used: int
    prefix_hit_rate: float
    feature_hit_rate: float
    feature_bytes: int
    num_preemptions: int
    num_drafts_proposed: int
    num_drafts_accepted: int
    num_prompt_tokens: int  # computed, those found in the prefix cache not counted
    num_output_tokens: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float

    @property
    def draft_acceptance(self) -> float:
        return self.num_drafts_accepted / max(1, self.num_drafts_proposed)


class TokenCounter:
    """Tokens computed and generated, in all and per second. One thread counts, any reads."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self._lock = threading.Lock()
        self._steps: deque[tuple[float, int, int]] = deque()  # when it ended, prompt tokens, output tokens

    def count(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        now = time.perf_counter()
        with self._lock:
            self.num_prompt_tokens += num_prompt_tokens
            self.num_output_tokens += num_output_tokens
            self._steps.append((now, num_prompt_tokens, num_output_tokens))
            while self._steps[0][0] < now - WINDOW_S:
                self._steps.popleft()

    def speeds(self) -> tuple[float, float]:
        """Prompt and output tokens per second, over the window."""
        now = time.perf_counter()
        with self._lock:
            recent = [step for step in self._steps if step[0] >= now - WINDOW_S]
        return sum(step[1] for step in recent) / WINDOW_S, sum(step[2] for step in recent) / WINDOW_S
