"""How fast a checkpoint answers about a picture, and the next question about it: python benchmarks/looking.py FOLDER

Prints JSON: the first token's seconds for a picture that is new and for another question about it, tokens per second
and the share of the machine's read bandwidth while they are decoded, and memory. A round is one picture and two
questions; the machine is probed before and after each. Needs the engine alone: no server, no decoder of films.

  python benchmarks/random_mllama.py /dev/shm/mllama-11b --config Llama-3.2-11B-Vision-Instruct.json
  python benchmarks/looking.py /dev/shm/mllama-11b
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

from tilewright import Engine, machine
from tilewright.bench.probe import between, probe
from tilewright.types import Completion

NUM_QUESTION_TOKENS = 16


class Asker:
    """Asks an engine questions of random tokens about random pictures."""

    def __init__(self, engine: Engine, side: int, new_tokens: int) -> None:
        self.engine, self.side, self.new_tokens = engine, side, new_tokens
        self.random = np.random.default_rng(0)

    def picture(self) -> np.ndarray:
        """Soft colours under noise, [side, side, 3] uint8."""
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
    """What this process holds, and has held at most, pages of the checkpoint that it read included."""
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_resident_bytes": 1024 * peak_kib, "resident_bytes": resource.getpagesize() * resident_pages}


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkpoint that sees")
    parser.add_argument("--side", type=int, default=1120, help="of the pictures, in pixels (default 1120)")
    parser.add_argument("--new-tokens", type=int, default=48, help="of an answer (default 48)")
    parser.add_argument("--rounds", type=int, default=3, help="pictures, with two questions each (default 3)")
    parser.add_argument("--kv-memory", default="8GB", help="for keys and values (default 8GB)")
    options = parser.parse_args()
    begin = perf_counter()
    # No speculation: random tokens repeat themselves. No cache of packed weights: it would be written first.
    with Engine(
        options.folder, kv_memory=options.kv_memory, max_context=2048, max_sequences=8, speculate=0, pack_cache=False
    ) as engine:
        load_s = perf_counter() - begin
        note(f"loaded in {load_s:.1f} s")
        asker = Asker(engine, options.side, options.new_tokens)
        asker.ask(asker.picture(), new_tokens=4)  # records steps, and touches memory for the first time
        rounds = []
        for number in range(options.rounds):
            rounds.append(asker.round())
            note(f"round {number + 1} of {options.rounds}: {rounds[-1]}")
        described = machine.as_dict(machine.describe())
        document = {
            "model": options.folder.name,
            "side": options.side,
            "new_tokens": options.new_tokens,
            "load_s": load_s,
            "gemm_dtype": asker.gemm_dtype,
            "median": {name: statistics.median(row[name] for row in rounds) for name in rounds[0]},
            "rounds": rounds,
            "memory": memory_bytes(),
            "stats": {"feature_bytes": engine.stats().feature_bytes, "num_cross_pages": engine.stats().num_cross_pages},
            "machine": {key: value for key, value in described.items() if key != "kernels"},
        }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
