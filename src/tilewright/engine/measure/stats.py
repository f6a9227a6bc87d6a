"""Counters and speeds of the engine."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

WINDOW_S = 10.0


@dataclass(frozen=True)
class Stats:
    """A snapshot. Rates are shares from 0 to 1 since the start; speeds are those of the last 10 seconds."""

    num_running: int
    num_waiting: int
    num_preparing: int
    num_pages: int
    num_pages_used: int
    prefix_hit_rate: float
    feature_hit_rate: float
    feature_bytes: int
    num_cross_pages: int  # for encoder states that tokens attend to; 0 in models without cross-attention
    num_cross_pages_used: int
    cross_hit_rate: float
    num_preemptions: int
    num_drafts_proposed: int
    num_drafts_accepted: int
    num_prompt_tokens: int  # without those found in the prefix cache
    num_output_tokens: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    num_steps: int
    busy_s: float  # time spent in steps
    step_age_s: float  # duration of the step under way so far; 0 between steps
    read_bytes_per_s: float  # weights, keys and values read by steps of the last 10 seconds, per second spent in them
    flops_per_s: float  # and their operations
    num_window_pages: int = 0  # of layers with sliding windows; 0 in models without them
    num_window_pages_used: int = 0
    num_state_slots: int = 0  # for states of recurrent layers; 0 in models without them
    num_state_slots_used: int = 0
    num_state_snapshots: int = 0  # states that later prompts may start from
    state_hit_rate: float = 0.0
    # The fields of `engine.measure.memory.MemoryUse`.
    weight_bytes: int = 0
    mapped_weight_bytes: int = 0
    kv_bytes: int = 0
    kv_bytes_used: int = 0
    kv_bytes_touched: int = 0
    scratch_bytes: int = 0
    resident_bytes: int = 0
    resident_file_bytes: int = 0
    other_bytes: int = 0

    @property
    def draft_acceptance(self) -> float:
        return self.num_drafts_accepted / max(1, self.num_drafts_proposed)


@dataclass(frozen=True)
class StepCount:
    """Counts of one step."""

    ended_s: float
    took_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    read_bytes: int
    flops: int


@dataclass(frozen=True)
class StepReads:
    """Bytes that steps read since the start, and the seconds they took."""

    num_bytes: int = 0
    busy_s: float = 0.0

    def speed_since(self, earlier: StepReads) -> float | None:
        """Return the bytes per second of the steps since then; None without such steps, or if reads are not counted."""
        num_bytes, busy_s = self.num_bytes - earlier.num_bytes, self.busy_s - earlier.busy_s
        return num_bytes / busy_s if num_bytes and busy_s > 0 else None


@dataclass(frozen=True)
class Speeds:
    """Speeds over the window: tokens per second of it, bytes and operations per second spent in steps."""

    prompt_tokens_per_s: float
    output_tokens_per_s: float
    read_bytes_per_s: float
    flops_per_s: float


class StepCounter:
    """Counts of steps, in all and in the last seconds. One thread counts, any thread reads."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_steps = 0
        self.reads = StepReads()
        self._lock = threading.Lock()
        self._steps: deque[StepCount] = deque()

    def count(self, step: StepCount) -> None:
        with self._lock:
            self.num_prompt_tokens += step.num_prompt_tokens
            self.num_output_tokens += step.num_output_tokens
            self.num_steps += 1
            self.reads = StepReads(self.reads.num_bytes + step.read_bytes, self.reads.busy_s + step.took_s)
            self._steps.append(step)
            while self._steps[0].ended_s < step.ended_s - WINDOW_S:
                self._steps.popleft()

    def speeds(self) -> Speeds:
        now = time.perf_counter()
        with self._lock:
            recent = [step for step in self._steps if step.ended_s >= now - WINDOW_S]
        busy_s = sum(step.took_s for step in recent) or 1.0
        return Speeds(
            prompt_tokens_per_s=sum(step.num_prompt_tokens for step in recent) / WINDOW_S,
            output_tokens_per_s=sum(step.num_output_tokens for step in recent) / WINDOW_S,
            read_bytes_per_s=sum(step.read_bytes for step in recent) / busy_s,
            flops_per_s=sum(step.flops for step in recent) / busy_s,
        )
