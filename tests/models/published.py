"""Small checkpoints in the formats in which people publish quantised models, and what their quants stand for.

Everything here is written from the formats' descriptions, apart from the package: each writer makes random quants for
a module, gives the tensors that a checkpoint has for them, and the weight [n, k] that they mean, in fp64.
"""

import json

import torch
from safetensors.torch import save_file

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def to_ints(quants: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., m] integers from 0 on as int32 [..., m * bits / 32], the first in the lowest bits."""
    per_int = 32 // bits
    words = torch.zeros(*quants.shape[:-1], quants.shape[-1] // per_int, dtype=torch.int64)
    for place in range(per_int):
        words |= quants[..., place::per_int].long() << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


class Writer:
    """Random modules of one format. `std` is about what the weights of the model have."""

    def __init__(self, std: float = 0.1) -> None:
        self.std, self.random = std, torch.Generator().manual_seed(5)

    def whole(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Integers from low to high, the middle ones most often."""
        middle, spread = (low + high) / 2, (high - low) / 5
        found = torch.randn(*shape, generator=self.random) * spread + middle
        return found.round().clamp(low, high)

    def scales(self, *shape: int, steps: float, dtype: torch.dtype) -> torch.Tensor:
        return (self.std / steps * (0.5 + torch.rand(*shape, generator=self.random))).to(dtype)


class CompressedInt8(Writer):
    """int-quantized W8A8, or W8A16 where `rounds_x` is not; `tensor`: one scale for all."""

    def __init__(self, rounds_x: bool, strategy: str = "channel") -> None:
        super().__init__()
        self.strategy = strategy
        self.config = compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": strategy}, rounds_x)

    def module(self, n: int, k: int) -> tuple[dict, torch.Tensor]:
        quants = self.whole(-127, 127, n, k)
        scales = self.scales(*((n, 1) if self.strategy == "channel" else (1,)), steps=50, dtype=torch.bfloat16)
        tensors = {"weight": quants.to(torch.int8), "weight_scale": scales, "input_scale": torch.ones(1)}
        return tensors, quants.double() * scales.double()


class CompressedPacked(Writer):
    """pack-quantized in groups, with or without zeros; `g_idx`: columns of a group are anywhere."""

    def __init__(self, group: int, bits: int = 4, zeros: bool = False, g_idx: bool = False) -> None:
        super().__init__()
        self.group, self.bits, self.zeros, self.g_idx = group, bits, zeros, g_idx
        weights = {"num_bits": bits, "type": "int", "symmetric": not zeros, "strategy": "group", "group_size": group}
        if group == -1:
            weights |= {"strategy": "channel", "group_size": None}
        self.config = compressed("pack-quantized", weights, False)
        self.orders: dict[int, torch.Tensor] = {}

    def module(self, n: int, k: int) -> tuple[dict, torch.Tensor]:
        half = 1 << (self.bits - 1)
        group = k if self.group == -1 else self.group
        quants = self.whole(-half, half - 1, n, k)
        scales = self.scales(n, k // group, steps=half / 2.5, dtype=torch.bfloat16)
        tensors = {
            "weight_packed": to_ints(quants + half, self.bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([n, k]),
        }
        zeros = torch.zeros(n, k // group)
        if self.zeros:
            zeros = self.whole(-3, 3, n, k // group)
            tensors["weight_zero_point"] = to_ints((zeros + half).t(), self.bits).t().contiguous()
        groups = torch.arange(k) // group
        if self.g_idx:
            # Of one order for all modules of an input, as one calibration gives it.
            groups = groups[self.orders.setdefault(k, torch.randperm(k, generator=self.random))]
            tensors["weight_g_idx"] = groups.int()
        return tensors, (quants - zeros[:, groups]).double() * scales.double()[:, groups]


class Fp8(Writer):
    """e4m3 with a scale for each block, row or tensor, as DeepSeek and Qwen publish it or as compressed-tensors."""

    def __init__(self, block: int | None, is_compressed: bool = False) -> None:
        super().__init__()
        self.block, self.is_compressed = block, is_compressed
        if is_compressed:
            strategy = (
                {"strategy": "channel"} if block is None else {"strategy": "block", "block_structure": [block] * 2}
            )
            self.config = compressed("float-quantized", {"num_bits": 8, "type": "float", **strategy}, True)
        else:
            self.config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
            self.config |= {"weight_block_size": [block, block]} if block else {}

    def module(self, n: int, k: int) -> tuple[dict, torch.Tensor]:
        quants = (torch.randn(n, k, generator=self.random) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        if self.block is None:
            scales = self.scales(*((n, 1) if self.is_compressed else (1,)), steps=100, dtype=torch.float32)
            return {"weight": quants, "weight_scale": scales}, quants.double() * scales.double()
        blocks = (-(-n // self.block), -(-k // self.block))
        scales = self.scales(*blocks, steps=100, dtype=torch.float32)
        wide = scales.double().repeat_interleave(self.block, 0)[:n].repeat_interleave(self.block, 1)[:, :k]
        name = "weight_scale" if self.is_compressed else "weight_scale_inv"
        return {"weight": quants, name: scales}, quants.double() * wide


class CompressedMxfp4(Writer):
    """mxfp4-pack-quantized: two codes of e2m1 to a byte, the first in its lower half; exponents of powers of two."""

    VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    def __init__(self) -> None:
        super().__init__()
        weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
        self.config = compressed("mxfp4-pack-quantized", weights, True)

    def module(self, n: int, k: int) -> tuple[dict, torch.Tensor]:
        codes = torch.randint(0, 16, (n, k), generator=self.random)
        exponents = torch.randint(119, 124, (n, k // 32), generator=self.random)
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        magnitudes = torch.tensor(self.VALUES, dtype=torch.float64)[codes % 8]
        scales = torch.exp2((exponents - 127).double()).repeat_interleave(32, 1)
        tensors = {"weight_packed": packed.to(torch.uint8), "weight_scale": exponents.to(torch.uint8)}
        return tensors, torch.where(codes < 8, magnitudes, -magnitudes) * scales


class Gptq(Writer):
    """GPTQ: symmetric or with zeros, which its first version stores less one; `act_order`: groups of any columns."""

    def __init__(self, group: int, bits: int = 4, sym: bool = True, act_order: bool = False, version: int = 1) -> None:
        super().__init__()
        self.group, self.bits, self.sym, self.act_order, self.version = group, bits, sym, act_order, version
        self.config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": act_order}
        self.config |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}
        self.orders: dict[int, torch.Tensor] = {}

    def module(self, n: int, k: int) -> tuple[dict, torch.Tensor]:
        most, half = (1 << self.bits) - 1, 1 << (self.bits - 1)
        group = k if self.group == -1 else self.group
        quants = self.whole(0, most, n, k)
        scales = self.scales(k // group, n, steps=half / 2.5, dtype=torch.float16)
        zeros = torch.full((k // group, n), float(half)) if self.sym else self.whole(half - 3, half + 3, k // group, n)
        groups = torch.arange(k) // group
        if self.act_order:
            groups = groups[self.orders.setdefault(k, torch.randperm(k, generator=self.random))]
        tensors = {
            "qweight": to_ints(quants, self.bits).view(n, -1).t().contiguous(),
            "qzeros": to_ints(zeros - (1 if self.version == 1 else 0), self.bits),
            "scales": scales,
            "g_idx": groups.int(),
        }
        return tensors, (quants - zeros.t()[:, groups]).double() * scales.double().t()[:, groups]


class Awq(Writer):
    """AWQ in the order of its gemm kernels."""

    def __init__(self, group: int) -> None:
        super().__init__()
        self.group = group
        self.config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}

    def module(self, n: int, k: int) -> tuple[dict, torch.Tensor]:
        quants = self.whole(0, 15, k, n)
        zeros = self.whole(5, 11, k // self.group, n)
        scales = self.scales(k // self.group, n, steps=3, dtype=torch.float16)

        def packed(values: torch.Tensor) -> torch.Tensor:
            return to_ints(values.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 4)

        tensors = {"qweight": packed(quants), "qzeros": packed(zeros), "scales": scales}
        wide = zeros.repeat_interleave(self.group, 0), scales.double().repeat_interleave(self.group, 0)
        return tensors, ((quants - wide[0]).double() * wide[1]).t()


def compressed(format: str, weights: dict, rounds_x: bool) -> dict:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    group["input_activations"] = {"num_bits": 8, "strategy": "token", "dynamic": True} if rounds_x else None
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def write(folder, network, writer, skipped=()):
    """`network` with its linears in the writer's format but for the head and `skipped`, and as plain fp32: two folders.

    `skipped` are ends of modules' names.
    """
    stored, plain = {}, {}
    linears = {
        name for name, module in network.named_modules() if isinstance(module, torch.nn.Linear) and "layers" in name
    }
    for name, tensor in network.state_dict().items():
        module, _, end = name.rpartition(".")
        if end == "weight" and module in linears and not module.endswith(tuple(skipped)):
            tensors, meant = writer.module(*tensor.shape)
            stored |= {f"{module}.{own}": value.contiguous() for own, value in tensors.items()}
            plain[name] = meant.float().contiguous()
        elif not (name == "lm_head.weight" and network.config.tie_word_embeddings):
            stored[name] = plain[name] = tensor.clone()
    config = network.config.to_dict() | {"dtype": "float32", "architectures": [type(network).__name__]}
    folders = folder / "stored", folder / "plain"
    for own, tensors, extra in zip(folders, (stored, plain), ({"quantization_config": writer.config}, {}), strict=True):
        own.mkdir(parents=True)
        save_file(tensors, own / "model.safetensors")
        (own / "config.json").write_text(json.dumps(config | extra))
    return folders
