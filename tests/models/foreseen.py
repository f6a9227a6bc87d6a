"""Tiny Qwen3.5 checkpoints whose multi-token predictor is mostly right, by construction.

The head of token t's successor is what the final norm makes of t's embedding, and layers add little to it: the model
writes one permutation of its vocabulary, and now and then what its states and keys make it write instead. The predictor
hands the embedding of the next token on in the same way, and adds as little of its own.
"""

from __future__ import annotations

import torch
from core_answers import CoreAnswers
from test_mllama import save_tensors
from test_qwen3_5_mtp import Twin, text_model_of

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

    def choose(self, num_sequences, num_read):
        return self.num_drafts

    def record(self, num_proposed, num_right):
        assert 0 <= num_right <= num_proposed > 0

    def time_step(self, num_rows, took_s):
        self.num_timed += 1

    def time_pass(self, num_sequences, took_s):
        self.num_timed += 1


class Answers(CoreAnswers):
    """With `drafts`, after every step so many are made."""

    def __init__(self, model, dtype, *, drafts=0, num_slots=48, page_size=PAGE_SIZE, **options):
        super().__init__(model, dtype, drafts=drafts, num_state_slots=num_slots, page_size=page_size, **options)
        if self.drafter:
            self.drafter.policy = Always(drafts)

    @property
    def acceptance(self):
        return self.drafter.num_accepted / self.drafter.num_proposed
