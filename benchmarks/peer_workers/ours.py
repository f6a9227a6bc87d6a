"""Tilewright as a worker: python ours.py FOLDER [JSON of Engine's options]"""

import json
import sys
from dataclasses import asdict

from worker import Checkpoint, System, serve, take_stdout

# No speculation unless asked for: the others do not either. Room for eight images at once, and for the next eight.
OPTIONS = {"dtype": "bfloat16", "speculate": 0, "max_context": 4096, "max_sequences": 8}


class Tilewright(System):
    name = "ours"
    keeps_prefixes = True

    def __init__(self, checkpoint: Checkpoint, options: dict) -> None:
        from tilewright import Engine

        self.checkpoint = checkpoint
        self.engine = Engine(checkpoint.folder, **{**OPTIONS, **options})

    def versions(self) -> dict[str, str]:
        import torch

        import tilewright

        return {"tilewright": tilewright.__version__, "torch": torch.__version__}

    def details(self) -> dict[str, object]:
        from tilewright.engine.measure import machine
        from tilewright.engine.measure.costs import costs_of

        loaded = self.engine.loaded
        costs = costs_of(loaded.model, loaded.dtype.itemsize)
        dtype = str(loaded.dtype).removeprefix("torch.")
        return {"dtype": dtype, "costs": asdict(costs), "machine": machine.as_dict(machine.describe())}

    def generate(self, prompts: list, images: list | None, new_tokens: int) -> int:
        media = {}
        if images:
            prompts = [self.checkpoint.around_image(1, prompt) for prompt in prompts]
            media["images"] = [[image] for image in images]
        answers = self.engine.generate(
            prompt_token_ids=prompts, max_tokens=new_tokens, temperature=0.0, ignore_eos=True, **media
        )
        assert all(len(answer.token_ids) == new_tokens for answer in answers)
        self.first_token_s = answers[0].timings.first_token_s
        return answers[0].num_prompt_tokens

    def probe(self) -> dict[str, float]:
        from tilewright.bench.timing import probe

        return asdict(probe())


if __name__ == "__main__":
    answers = take_stdout()
    options = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    serve(lambda checkpoint: Tilewright(checkpoint, options), sys.argv[1], answers)
