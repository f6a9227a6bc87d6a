"""What a step costs beside the model: scheduling, buffers, sampling, text and handles, of sequences that decode.

    python benchmarks/step_overhead.py [--sequences 1 8 64] [--steps 400] [--sampled] [--profile] [--json FILE]

The engine is the real one around a model whose forward gives logits that are there already. Of the steps of each
number of sequences the fastest twentieth counts: others on the machine only ever add. To compare two versions, run both
by turns.
"""

import argparse
import cProfile
import json
import pstats
import statistics
from time import perf_counter

import numpy as np
import torch

from tilewright.engine.load.assembly import build_core
from tilewright.engine.loop import EngineLoop
from tilewright.engine.measure.costs import Costs
from tilewright.engine.schedule.step import StepLimits
from tilewright.layers.attention import KvLayer
from tilewright.models.protocol import KvSpec
from tilewright.ops.native import kernels
from tilewright.types import ModelInputs, SamplingParams

VOCABULARY_SIZE = 1024
PROMPT_TOKENS = 200
WARM_UP_STEPS = 50
NUM_AXES = 3


class FreeModel:
    """Random logits, other ones when `turn` is called: so that no draft is right for long."""

    vocab_size = VOCABULARY_SIZE
    num_position_axes = NUM_AXES
    kv_spec = KvSpec((KvLayer(num_heads=1, head_width=16),))
    cross_spec = state_spec = predictor = None
    num_embeddings = VOCABULARY_SIZE

    def __init__(self, max_sequences):
        self._random = torch.randn(1024, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(0))
        self._logits = torch.zeros(max_sequences, VOCABULARY_SIZE)
        self._turn = 0

    def turn(self):
        self._turn += 1
        order = np.random.default_rng(self._turn).integers(0, len(self._random), len(self._logits))
        self._logits.copy_(self._random[torch.from_numpy(order)])

    def forward(self, batch):
        num_rows = len(batch.token_ids_T) if batch.logit_rows is None else len(batch.logit_rows)
        return self._logits[:num_rows]


class PlainDecoder:
    def push(self, token_ids):
        return "".join(map(chr, token_ids))

    def flush(self):
        return ""


def make_loop(model, num_sequences, num_steps):
    max_context = PROMPT_TOKENS + num_steps + WARM_UP_STEPS + num_sequences + 200
    limits = StepLimits(max_context=max_context, max_sequences=num_sequences)
    num_pages = num_sequences * (max_context // 64 + 2)
    core = build_core(model, torch.float32, limits, num_pages, make_token_decoder=PlainDecoder, speculate=4)
    costs = Costs(*(1000,) * 7)
    return EngineLoop(core, costs=costs, threaded=False)


def prompt(seed):
    token_ids = np.random.default_rng(seed).integers(0, VOCABULARY_SIZE, PROMPT_TOKENS)
    positions = np.arange(PROMPT_TOKENS, dtype=np.int64)[None].repeat(NUM_AXES, 0)
    return ModelInputs(tuple(token_ids.tolist()), positions, PROMPT_TOKENS)


def step_times(num_sequences, options):
    """Seconds of each step in which all sequences decode."""
    model = FreeModel(max(64, num_sequences))
    loop = make_loop(model, num_sequences, options.steps)
    sampling = {"temperature": 0.8, "top_p": 0.95, "top_k": 20} if options.sampled else {"temperature": 0.0}
    params = SamplingParams(ignore_eos=True, **sampling)
    handles = [loop.submit(lambda seed=seed: prompt(seed), params) for seed in range(num_sequences)]
    while any(not handle._deltas for handle in handles):
        loop.step()
    profile = cProfile.Profile() if options.profile else None
    times = []
    for number in range(WARM_UP_STEPS + options.steps):
        model.turn()
        if profile and number == WARM_UP_STEPS:
            profile.enable()
        began_s = perf_counter()
        loop.step()
        times.append(perf_counter() - began_s)
    if profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    assert loop.stats().num_running == num_sequences
    return times[WARM_UP_STEPS:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sampled", action="store_true", help="draw tokens at a temperature instead of the likeliest")
    parser.add_argument("--profile", action="store_true", help="show where the time goes; it costs some itself")
    parser.add_argument("--json", help="a file for the numbers")
    options = parser.parse_args()
    kernels.set_num_threads(1)
    torch.set_num_threads(1)
    results = {}
    print("sequences  ms per step  us per sequence  steps per s")
    for num_sequences in options.sequences:
        step_s = statistics.quantiles(step_times(num_sequences, options), n=20)[0]
        results[num_sequences] = step_s
        print(f"{num_sequences:9}  {step_s * 1e3:11.3f}  {step_s / num_sequences * 1e6:15.1f}  {1 / step_s:11.0f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
