"""Tiny Qwen3.5 checkpoints whose multi-token predictor is mostly right, by construction.

The head of token t's successor is what the final norm makes of t's embedding, and layers add little to it: the model
writes one permutation of its vocabulary, and now and then what its states and keys make it write instead. The predictor
hands the embedding of the next token on in the same way, and adds as little of its own.
"""

from __future__ import annotations

import torch
from test_mllama import save_tensors
from test_qwen3_5_mtp import Twin, text_model_of

from tilewright.engine.assembly import build_core
from tilewright.engine.limits import Limits

# What is left of the last projection of every layer: nine of ten greedy drafts are right, one in five drawn ones.
LAYER_SHARES = {"qwen3_5_text": 0.3, "qwen3_5_moe": 0.5, "qwen3_next": 0.5}
SHARPNESS = 12.0
# Last projections of attention, delta nets and MLPs.
ENDS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
PAGE_SIZE = 64  # as long as the chunks of the delta rule: in bf16 answers do not depend on pieces that end with them


@torch.no_grad()
def write(name: str, network, source, folder):
    """The checkpoint of a network without a tied head, changed, with a predictor."""
    torch.manual_seed(7)
    share, text = LAYER_SHARES[name], text_model_of(network)
    twin = Twin(text)
    width, vocabulary_size = text.config.hidden_size, text.config.vocab_size
    successors = torch.randperm(vocabulary_size)

    def change(tensors):
        tensors = dict(tensors) | {f"mtp.{key}": tensor.clone() for key, tensor in twin.state_dict().items()}
        prefix = "model.language_model" if "model.language_model.norm.weight" in tensors else "model"
        for key in tensors:
            if key.endswith(ENDS) and "visual" not in key:
                tensors[key] *= share
        table, norm = torch.randn(vocabulary_size, width), tensors[f"{prefix}.norm.weight"]
        read = torch.nn.functional.rms_norm(table, (width,)) * (1 + norm)
        tensors[f"{prefix}.embed_tokens.weight"] = table
        tensors["lm_head.weight"][successors] = SHARPNESS * read / read.norm(dim=1, keepdim=True) ** 2
        tensors["mtp.norm.weight"] = norm.clone()
        tensors["mtp.pre_fc_norm_embedding.weight"].zero_()
        tensors["mtp.fc.weight"] *= share
        tensors["mtp.fc.weight"][:, :width] += torch.eye(width)
        return tensors

    return save_tensors(folder, source, change)


class Always:
    """A policy that always drafts so many."""

    def __init__(self, num_drafts: int | None) -> None:
        self.num_drafts = num_drafts
        self.num_timed = 0

    def choose(self, num_sequences):
        return self.num_drafts

    def record(self, num_proposed, num_right):
        assert 0 <= num_right <= num_proposed > 0

    def time_step(self, num_rows, took_s):
        self.num_timed += 1

    def time_pass(self, num_sequences, took_s):
        self.num_timed += 1


class NoText:
    def push(self, token_ids):
        return ""

    def flush(self):
        return ""


class Answers:
    """Requests through the real scheduler, runner, sampler and drafter. With `drafts`, after every step so many."""

    def __init__(
        self,
        model,
        dtype,
        *,
        drafts=0,
        num_pages=64,
        num_slots=48,
        tokens_per_step=1024,
        prefix_cache=False,
        replay=True,
        page_size=PAGE_SIZE,
        make_decoder=NoText,
        **options,
    ):
        limits = Limits(max_context=512, max_tokens_per_step=tokens_per_step, max_sequences=min(16, tokens_per_step))
        self.core = build_core(
            model,
            dtype,
            limits,
            num_pages,
            num_state_slots=num_slots,
            make_decoder=make_decoder,
            page_size=page_size,
            speculate=drafts,
            prefix_cache=prefix_cache,
            replay=replay,
            **options,
        )
        self.scheduler, self.drafter = self.core.scheduler, self.core.drafter
        self.num_steps = 0
        runner = self.core.runner
        if self.drafter:
            self.drafter.policy = Always(drafts)
        own = runner.kv_caches[:-1] if model.predictor else runner.kv_caches
        for memory in [*(cache.data for cache in own), *runner.states.conv_states, *runner.states.delta_states]:
            memory.fill_(float("nan"))  # what was never written must not be read

    def to(self, prompts, params):
        """The tokens of each prompt's answers, all asked for at once."""
        sequences = [item for i, inputs in enumerate(prompts) for item in self.add(str(i), inputs, params)]
        self.run()
        return [sequence.output_token_ids for sequence in sequences]

    def add(self, name, inputs, params):
        return self.core.add(name, inputs, params, grammar=self.core.compile(inputs, params))

    def run(self):
        while self.core.has_work:
            self.core.step()
            assert not self.core.failures, self.core.failures
            self.num_steps += 1
        assert self.scheduler.pool.num_used == self.scheduler.states.num_used == 0

    @property
    def acceptance(self):
        return self.drafter.num_accepted / self.drafter.num_proposed
