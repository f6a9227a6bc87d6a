"""The progress of a batch: a bar on a terminal, else a line every minute."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

from tqdm import tqdm

from tilewright.batch.work import Totals

BAR_INTERVAL_S = 0.5
LINE_INTERVAL_S = 60.0


class Progress:
    """Shows Totals on standard error while they change."""

    def __init__(self, totals: Totals, num_requests: int, num_tokens: Callable[[], int], *, is_quiet: bool) -> None:
        """`num_tokens` are those that were generated so far, also of answers under way."""
        self._totals = totals
        self._num_requests = num_requests
        self._num_tokens = num_tokens
        self._is_quiet = is_quiet
        self._began_s = time.perf_counter()

    async def show(self) -> None:
        """Runs until it is cancelled."""
        if sys.stderr.isatty() and not self._is_quiet:
            await self._draw()
        while not self._is_quiet:
            await asyncio.sleep(LINE_INTERVAL_S)
            print(f"{self._counts()}, {self._speed()}", file=sys.stderr, flush=True)

    def summary(self) -> str:
        totals, took_s = self._totals, time.perf_counter() - self._began_s
        tokens = f"{totals.num_prompt_tokens} prompt and {totals.num_output_tokens} output tokens"
        return f"{self._counts()}; {tokens} in {took_s:.1f} s, {self._speed()}"

    def _counts(self) -> str:
        return f"{self._totals.num_done} of {self._num_requests} done, {self._totals.num_failed} failed"

    def _speed(self) -> str:
        speed = self._num_tokens() / (time.perf_counter() - self._began_s)
        return f"{speed:.1f} tokens/s"

    async def _draw(self) -> None:
        bar = tqdm(total=self._num_requests, initial=self._totals.num_done, unit="request", dynamic_ncols=True)
        try:
            while True:
                self._update(bar)
                await asyncio.sleep(BAR_INTERVAL_S)
        finally:
            self._update(bar)
            bar.close()

    def _update(self, bar: tqdm) -> None:
        bar.set_postfix_str(f"{self._totals.num_failed} failed, {self._speed()}", refresh=False)
        bar.update(self._totals.num_done - bar.n)
