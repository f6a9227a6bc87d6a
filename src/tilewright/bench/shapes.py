"""The sizes of the models whose layers are measured, from their published configs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class VisionShape:
    """A vision tower: patches of patch x patch x 2 frames, merge x merge of which make a token."""

    hidden: int
    mlp: int
    num_heads: int
    head_width: int
    out: int
    patch: int = 16
    merge: int = 2

    @property
    def patch_elements(self) -> int:
        return 3 * 2 * self.patch * self.patch

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the linears of a layer."""
        return {
            "qkv": (3 * self.hidden, self.hidden),
            "proj": (self.hidden, self.hidden),
            "fc1": (self.mlp, self.hidden),
            "fc2": (self.hidden, self.mlp),
        }


@dataclass(frozen=True)
class ModelShape:
    """A language model with a vision tower."""

    name: str
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    vocabulary: int
    vision: VisionShape

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_width

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the linears of a layer."""
        return {
            "qkv": (self.qkv_width, self.hidden),
            "o": (self.hidden, self.num_heads * self.head_width),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }


MODELS = (
    ModelShape("2B", 2048, 6144, 16, 8, 128, 151_936, VisionShape(1024, 4096, 16, 64, 2048)),
    ModelShape("8B", 4096, 12_288, 32, 8, 128, 151_936, VisionShape(1152, 4304, 16, 72, 4096)),
)


@dataclass(frozen=True)
class ExpertShape:
    """The experts of an MoE layer: `top_k` of `num_experts` per token."""

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int

    @property
    def expert_elements(self) -> int:
        """The weights of one expert: gate, up, down."""
        return 3 * self.hidden * self.intermediate


SPARSE_MODELS = (ExpertShape("30B-A3B", 2048, 768, 128, 8),)


@dataclass(frozen=True)
class LinearAttentionShape:
    """The gated delta net of a layer: heads of `width` in keys and values, a convolution over `conv_width` tokens."""

    name: str
    key_heads: int
    value_heads: int
    width: int = 128
    conv_width: int = 4

    @property
    def state_elements(self) -> int:
        return self.value_heads * self.width * self.width

    @property
    def qkv_width(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.width


# Qwen3.5 0.8B and 2B have the first shape, 4B, 9B and 35B-A3B the second.
LINEAR_ATTENTIONS = (LinearAttentionShape("3.5-2B", 16, 16), LinearAttentionShape("3.5-9B", 16, 32))
