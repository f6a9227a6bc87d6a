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

from tilewright import Engine
from tilewright.bench.rounds import Prompts
from tilewright.bench.timing import GEMM_SHAPE, between, probe
from tilewright.bench.torch_dtype import dtype_name, fastest_dtype
from tilewright.engine.measure import machine

NUM_QUESTION_TOKENS = 16


def measure(prompts: Prompts, side: int, new_tokens: int, number: int) -> dict[str, float]:
    """One picture, two questions about it, and the machine's limits around them."""
    before, picture = probe(), prompts.picture((side, side), number)
    questions = (prompts.ids_with_picture(NUM_QUESTION_TOKENS, number, which) for which in range(2))
    answers = [prompts.answers([question], new_tokens, [picture])[0] for question in questions]
    limits = between(before, probe())
    figures = {"read_gb_s": limits.read_gb_s, "gemm_tflops": limits.gemm_tflops}
    for name, answer in zip(("first_question", "second_question"), answers, strict=True):
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
        prompts = Prompts(engine)
        measure(prompts, options.side, 4, 0)  # warm-up: records steps and touches memory for the first time
        rounds = []
        for number in range(1, options.rounds + 1):
            rounds.append(measure(prompts, options.side, options.new_tokens, number))
            log(f"round {number} of {options.rounds}: {rounds[-1]}")
        described = machine.as_dict(machine.describe())
        document = {
            "model": options.folder.name,
            "side": options.side,
            "new_tokens": options.new_tokens,
            "load_s": load_s,
            "gemm_dtype": dtype_name(fastest_dtype(GEMM_SHAPE[0])),
            "median": {name: statistics.median(row[name] for row in rounds) for name in rounds[0]},
            "rounds": rounds,
            "memory": memory_bytes(),
            "stats": {"feature_bytes": engine.stats().feature_bytes, "num_cross_pages": engine.stats().num_cross_pages},
            "machine": {key: value for key, value in described.items() if key != "kernels"},
        }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
