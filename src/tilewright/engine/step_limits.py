"""How much the engine may do at once."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.types import RequestError


@dataclass(frozen=True)
class StepLimits:
    """How much one step may do.

    A step's weights are read once: at 20 GB/s and 1 TFLOP/s in bf16, reading costs as much as computing 50 rows. At
    1,024 tokens it is 5 % of the step, and larger steps gain nothing but make decoding sequences wait longer. A few
    more let a picture of 1024 x 1024, 1,024 features, go in one step with the question about it: 18 tokens left over
    took another 0.2 of 3.3 seconds.
    """

    max_context: int
    max_tokens_per_step: int = 1152
    max_sequences: int = 64
    # Two pictures of 1024 x 1024 at 16 pixels a patch; the encoder's products are at their peak from far fewer rows.
    max_encode_patches: int = 8192
    # Two of 512 x 512, or a single larger one, while others wait for the next token of their answers.
    max_encode_patches_beside_decodes: int = 2048
    # Below the 50 rows at which computing costs as much as reading the weights, a rejected draft costs little.
    max_rows_with_drafts: int = 32
    # Logits of 128 rows over 152,000 tokens are 78 MB.
    max_prompt_rows: int = 128

    @property
    def max_draft_rows(self) -> int:
        """Rows of a step with drafts: they leave half of it to prompts, however small it is."""
        return min(self.max_rows_with_drafts, self.max_tokens_per_step // 2)

    def max_patches(self, has_decodes: bool) -> int:
        """How many the encoder takes in a step, unless a single medium has more."""
        if not has_decodes:
            return self.max_encode_patches
        return min(self.max_encode_patches, self.max_encode_patches_beside_decodes)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise RequestError(f"{name} is {value}, expected at least 1")
        if self.max_sequences > self.max_tokens_per_step:
            raise RequestError(
                f"max_sequences is {self.max_sequences}, more than max_tokens_per_step, {self.max_tokens_per_step}: "
                "each running sequence decodes one token per step"
            )
