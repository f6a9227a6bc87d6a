"""vLLM's CPU build as a worker, offline and in one process; eager, because compiling takes minutes and was not ready
for Qwen3-VL in ten. Its caches stay on, as by default. python vllm_worker.py FOLDER"""

import os
import sys

# Read by vLLM when it is imported. One thread per CPU of the process; 2 GiB for keys and values.
CPUS = sorted(os.sched_getaffinity(0))
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, CPUS)))
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from worker import Checkpoint, System, serve, take_stdout  # noqa: E402

DTYPE = "bfloat16"


class Vllm(System):
    name = "vllm"
    keeps_prefixes = True

    def __init__(self, checkpoint: Checkpoint) -> None:
        from vllm import LLM

        self.checkpoint = checkpoint
        media = {"limit_mm_per_prompt": {"image": 1, "video": 0}, "skip_mm_profiling": True}
        self.llm = LLM(
            model=checkpoint.folder,
            dtype=DTYPE,
            max_model_len=4096,
            max_num_seqs=8,
            max_num_batched_tokens=4096,
            enforce_eager=True,
            seed=0,
            **(media if checkpoint.has_vision else {}),
        )

    def versions(self) -> dict[str, str]:
        import torch
        import vllm

        return {"vllm": vllm.__version__, "torch": torch.__version__}

    def details(self) -> dict[str, object]:
        return {"dtype": DTYPE}

    def generate(self, prompts: list, images: list | None, new_tokens: int) -> int:
        from vllm import SamplingParams

        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        if images:
            requests = [
                {
                    "prompt_token_ids": self.checkpoint.around_image(1, prompt),
                    "multi_modal_data": {"image": image},
                }
                for prompt, image in zip(prompts, images, strict=True)
            ]
        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        answers = self.llm.generate(requests, sampling, use_tqdm=False)
        assert all(len(answer.outputs[0].token_ids) == new_tokens for answer in answers)
        return len(answers[0].prompt_token_ids)


if __name__ == "__main__":
    serve(Vllm, sys.argv[1], take_stdout())
