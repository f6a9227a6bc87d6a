"""Time to first token of a question about a picture, and of a second one: python benchmarks/picture_questions.py FOLDER

Prints JSON: the time to first token for a new picture and for another question about the same one, decode speed in
tokens per second and as a share of the machine's read bandwidth, and memory. A round is one picture with two questions;
the machine is probed before and after each round. Needs the engine only: no server, no video decoder.

  python benchmarks/random_mllama.py /dev/shm/mllama-11b --config Llama-3.2-11B-Vision-Instruct.json
  python benchmarks/picture_questions.py /dev/shm/mllama-11b
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
from pathlib import Path
from time import perf_counter

import numpy as np

from tilewright import Engine
from tilewright.bench.timing import between, probe
from tilewright.engine.measure import machine
from tilewright.types import Completion

NUM_QUESTION_TOKENS = 16


class Questions:
    """Asks an engine questions of random tokens about random pictures."""

    def __init__(self, engine: Engine, side: int, new_tokens: int) -> None:
        self.engine, self.side, self.new_tokens = engine, side, new_tokens
        self.random = np.random.default_rng(0)

    def picture(self) -> np.ndarray:
        """Smooth gradients with noise on top, [side, side, 3] uint8."""
        across, down = (
            self.random.uniform(0, 255, (2, self.side, 1, 3)).cumsum(1) / np.arange(1, self.side + 1)[:, None, None]
        )
        mixed = (across + down.transpose(1, 0, 2)) / 2 + self.random.normal(0, 10, (self.side, self.side, 3))
        return mixed.clip(0, 255).astype(np.uint8)

    def ask(self, picture: np.ndarray, new_tokens: int | None = None) -> Completion:
        vocabulary_size = self.engine.loaded.model.vocab_size
        words = self.random.integers(vocabulary_size // 8, vocabulary_size * 7 // 8, NUM_QUESTION_TOKENS)
        ids = [*self.engine.loaded.processor.picture_token_ids, *words.tolist()]
        return self.engine.generate(
            prompt_token_ids=ids,
            images=[picture],
            max_tokens=new_tokens or self.new_tokens,
            temperature=0.0,
            ignore_eos=True,
        )

    def round(self) -> dict[str, float]:
        before, picture = probe(), self.picture()
        first, second = self.ask(picture), self.ask(picture)
        limits = between(before, probe())
        self.gemm_dtype = limits.gemm_dtype
        figures = {"read_gb_s": limits.read_gb_s, "gemm_tflops": limits.gemm_tflops}
        for name, answer in (("first_question", first), ("second_question", second)):
            timings = answer.timings
            decode_s = timings.total_s - timings.first_token_s
            figures[f"{name}_ttft_s"] = timings.first_token_s
            figures[f"{name}_tokens_per_s"] = (len(answer.token_ids) - 1) / decode_s
            figures[f"{name}_bandwidth_share"] = (timings.decode_bytes_per_s or 0.0) / limits.read_gb_s / 1e9
        figures["second_ttft_of_first"] = figures["second_question_ttft_s"] / figures["first_question_ttft_s"]
        return figures


def memory_bytes() -> dict[str, int]:
    """Resident memory of this process, now and at its peak; mapped pages of the checkpoint count."""
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_resident_bytes": 1024 * peak_kib, "resident_bytes": resource.getpagesize() * resident_pages}


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="checkpoint of a vision model")
    parser.add_argument("--side", type=int, default=1120, help="sides of the pictures in pixels (default 1120)")
    parser.add_argument("--new-tokens", type=int, default=48, help="tokens per answer (default 48)")
    parser.add_argument("--rounds", type=int, default=3, help="pictures, two questions about each (default 3)")
    parser.add_argument("--kv-memory", default="8GB", help="memory of the KV cache (default 8GB)")
    options = parser.parse_args()
    begin = perf_counter()
    # No speculation: random weights repeat themselves, which favours drafts. No pack cache: load_s would include
    # writing it.
    with Engine(
        options.folder, kv_memory=options.kv_memory, max_context=2048, max_sequences=8, speculate=0, pack_cache=False
    ) as engine:
        load_s = perf_counter() - begin
        log(f"loaded in {load_s:.1f} s")
        questions = Questions(engine, options.side, options.new_tokens)
        questions.ask(questions.picture(), new_tokens=4)  # warm-up: records steps and touches memory for the first time
        rounds = []
        for number in range(options.rounds):
            rounds.append(questions.round())
            log(f"round {number + 1} of {options.rounds}: {rounds[-1]}")
        described = machine.as_dict(machine.describe())
        document = {
            "model": options.folder.name,
            "side": options.side,
            "new_tokens": options.new_tokens,
            "load_s": load_s,
            "gemm_dtype": questions.gemm_dtype,
            "median": {name: statistics.median(row[name] for row in rounds) for name in rounds[0]},
            "rounds": rounds,
            "memory": memory_bytes(),
            "stats": {"feature_bytes": engine.stats().feature_bytes, "num_cross_pages": engine.stats().num_cross_pages},
            "machine": {key: value for key, value in described.items() if key != "kernels"},
        }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
