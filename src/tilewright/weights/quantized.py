"""Checkpoints with quantised linears: compressed-tensors, FP8, GPTQ and AWQ, with weights under their plain names.

A module whose weight is several tensors (quants, scales, zeros) has one again, "<module>.weight", which is loaded as
quants or as their values. The tensors show which modules those are, the config how to read them. Modules that a config
leaves out (ignore, modules_to_not_convert) have plain weights. Activations are rounded by our products, token by token,
or not at all: scales for them are not used, nor are those of keys and values. An unsupported format is refused by its
own name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from tilewright.host.files import CheckpointError
from tilewright.ops.quantized import QuantFormat, Quantized, dequantize
from tilewright.weights.safetensors import SafetensorsCheckpoint
from tilewright.weights.stored_linear import Awq, Bytes, Fp8, Gptq, Mxfp4, PackedInts, StoredLinear, Tensors

# quantization_config.quant_method -> the format's own name.
METHODS = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "compressed-tensors": "compressed-tensors",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8 (FBGEMM)",
    "bitsandbytes": "bitsandbytes",
    "mxfp4": "MXFP4",
}
# Suffixes of tensors that a format adds, for configs without an entry; a format whose mark is another's too comes
# later.
_MARKS = (
    ("bitsandbytes", (".absmax", ".quant_map", ".SCB", "__nf4", "__fp4")),
    ("compressed-tensors", (".weight_packed",)),
    ("GPTQ", (".g_idx",)),
    ("AWQ", (".qweight",)),
    ("FP8", (".weight_scale_inv", ".weight_scale")),
    ("MXFP4", ("_blocks",)),
    ("MLX", (".scales",)),
)
WHAT_TO_DO = (
    "weights are read as float32, float16 and bfloat16 or, where config.json has their quantization_config, as "
    "compressed-tensors, FP8, GPTQ and AWQ: take such a checkpoint of the model or one that is not quantised"
)


def quantized_format(config: Mapping[str, object], tensor_names: Collection[str]) -> str | None:
    """Return the name of a checkpoint's quantised format, by its config or its tensors; None if it has none."""
    if (method := _method(config)) is not None:
        return METHODS.get(method, method)
    for name, endings in _MARKS:
        if any(tensor.endswith(endings) for tensor in tensor_names):
            return name
    return None


def quantization_of(config: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return the quantization config of the whole model or of its text part; None if there is none."""
    for table in (config, config.get("text_config")):
        if isinstance(table, Mapping):
            stated = table.get("quantization_config") or table.get("compression_config")
            if isinstance(stated, Mapping):
                return stated
    return None


def _method(config: Mapping[str, object]) -> str | None:
    if (stated := quantization_of(config)) is not None:
        # Older bitsandbytes configs have no method, but loading options.
        return str(stated.get("quant_method") or ("bitsandbytes" if _loads_bits(stated) else "unnamed"))
    tables = [config, config.get("text_config")]
    return "MLX" if any(isinstance(table, Mapping) and "quantization" in table for table in tables) else None


def _loads_bits(stated: Mapping[str, object]) -> bool:
    return any(key.startswith(("load_in_", "bnb_", "_load_in_")) for key in stated)


# Suffixes of a quantised module's tensors beside its bias.
_OWN = (
    "weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape", "weight_g_idx",
    "qweight", "qzeros", "scales", "g_idx",
)  # fmt: skip
# Suffixes for activations, and for keys and values.
_UNUSED = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "q_scale", "activation_scale")

_Config = Mapping[str, object]


class QuantizedCheckpoint:
    """Safetensors with quantised linears: a `weights.checkpoint.Checkpoint`."""

    tokenizer_metadata: Mapping[str, object] | None = None
    missing: str | None = None

    def __init__(self, plain: SafetensorsCheckpoint, linears: Mapping[str, StoredLinear]) -> None:
        self._plain = plain
        self._linears = {f"{module}.weight": linear for module, linear in linears.items()}
        self._own_names = {
            f"{module}.weight": [f"{module}.{end}" for end in _OWN if f"{module}.{end}" in plain.shapes]
            for module in linears
        }
        hidden = {name for names in self._own_names.values() for name in names}
        self.path: Path = plain.path
        self.files: Path | None = plain.files
        self.config: dict = plain.config
        self.fingerprint = plain.fingerprint
        self.shapes: Mapping[str, tuple[int, ...]] = {
            **{
                name: shape
                for name, shape in plain.shapes.items()
                if name not in hidden and not name.endswith(tuple(f".{end}" for end in _UNUSED))
            },
            **{name: linear.shape for name, linear in self._linears.items()},
        }

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32 if name in self._linears else self._plain.dtype(name)

    def size_bytes(self, name: str) -> int:
        return sum(self._plain.size_bytes(own) for own in self._names(name))

    def read(self, name: str) -> Tensor:
        """Return the tensor: in place, or its quants' values in fp32."""
        return self.rows(name, 0, self.shapes[name][0]) if name in self._linears else self._plain.read(name)

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """Return rows [begin, end) of the tensor's first axis."""
        if name in self._linears:
            return dequantize(self._linears[name].rows(begin, end))
        return self._plain.rows(name, begin, end)

    def quantized_as(self, name: str) -> QuantFormat | None:
        """Return the format of a tensor's quants; None if it has none."""
        return self._linears[name].format if name in self._linears else None

    def quantized_rows(self, name: str, begin: int, end: int) -> Quantized:
        """Return rows [begin, end) as those quants."""
        return self._linears[name].rows(begin, end)

    def release(self, name: str) -> None:
        for own in self._names(name):
            self._plain.release(own)

    def _names(self, name: str) -> list[str]:
        return self._own_names.get(name, [name])


def with_linears(plain: SafetensorsCheckpoint) -> SafetensorsCheckpoint | QuantizedCheckpoint:
    """Return the checkpoint with its quantised linears combined; unchanged if it has none that are supported."""
    stated = quantization_of(plain.config)
    method = None if stated is None else stated.get("quant_method")
    if stated is None or not isinstance(method, str) or method not in _READERS:
        return plain
    modules: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in plain.shapes.items():
        module, _, end = name.rpartition(".")
        if end in _OWN:
            modules.setdefault(module, {})[end] = shape
    try:
        found = {
            module: linear
            for module, shapes in modules.items()
            if (linear := _READERS[method](plain, Tensors(module, plain.read, shapes), stated)) is not None
        }
    except CheckpointError as error:
        raise CheckpointError(f"{plain.path} is quantised as {METHODS[method]}: {error}") from error
    return QuantizedCheckpoint(plain, found) if found else plain


def _setting(stated: _Config, key: str, allowed: tuple[object, ...], default: object = None) -> object:
    """Return a config entry, which must be one of the allowed values."""
    value = stated.get(key, default)
    if value not in allowed:
        expected = ", ".join(str(item) for item in allowed if item is not None)
        raise CheckpointError(f"{key} is {value!r}, expected {expected}")
    return value


def _whole(stated: _Config, key: str, default: int | None = None) -> int:
    value = stated.get(key, default)
    if type(value) is not int or not -1 <= value < 1 << 31:
        raise CheckpointError(f"{key} is {value!r}, expected an integer")
    return value


def _gptq(plain: SafetensorsCheckpoint, tensors: Tensors, stated: _Config) -> StoredLinear | None:
    if "qweight" not in tensors:
        return None
    bits = _setting(stated, "bits", (4, 8))
    _setting(stated, "checkpoint_format", ("gptq", "gptq_v2", None))
    if stated.get("dynamic"):
        raise CheckpointError("its modules have settings of their own (dynamic), which are not supported")
    version = stated.get("checkpoint_format") == "gptq_v2"
    is_symmetric = stated.get("sym", True) is True
    assert isinstance(bits, int)
    return Gptq(tensors, bits, is_symmetric, _whole(stated, "group_size"), 0 if version else 1)


def _awq(plain: SafetensorsCheckpoint, tensors: Tensors, stated: _Config) -> StoredLinear | None:
    if "qweight" not in tensors:
        return None
    _setting(stated, "bits", (4,))
    _setting(stated, "version", ("gemm", "GEMM"), "gemm")
    _setting(stated, "zero_point", (True,), True)
    return Awq(tensors, _whole(stated, "group_size", 128))


def _fp8(plain: SafetensorsCheckpoint, tensors: Tensors, stated: _Config) -> StoredLinear | None:
    if not {"weight_scale", "weight_scale_inv"} & tensors.shapes.keys():
        return None
    _setting(stated, "fmt", ("e4m3", "float8_e4m3fn", None))
    _expect_e4m3(plain, tensors)
    return Fp8(tensors, _block(stated.get("weight_block_size")) if "weight_scale_inv" in tensors else None)


def _expect_e4m3(plain: SafetensorsCheckpoint, tensors: Tensors) -> None:
    dtype = plain.dtype(f"{tensors.module}.weight")
    if dtype != torch.float8_e4m3fn:
        raise CheckpointError(f"{tensors.module}.weight is {dtype}, expected float8_e4m3fn".replace("torch.", ""))


def _block(value: object) -> tuple[int, int] | None:
    """Return the rows and columns of a block that shares a scale; None if there are no blocks."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise CheckpointError(f"blocks are {value!r}, expected two sizes")
    return value[0], value[1]


def _compressed(plain: SafetensorsCheckpoint, tensors: Tensors, stated: _Config) -> StoredLinear | None:
    if "weight_scale" not in tensors:
        return None
    group = _group_of(tensors.module, stated)
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"its config has no weights for {tensors.module}")
    format = group.get("format") or stated.get("format")
    strategy = _setting(weights, "strategy", ("tensor", "channel", "group", "block"), "tensor")
    if format in ("float-quantized", "naive-quantized") and weights.get("type") == "float":
        _setting(weights, "num_bits", (8,))
        _expect_e4m3(plain, tensors)
        if strategy == "group":
            raise CheckpointError("fp8 has groups of columns, expected a scale for each tensor, row or block")
        return Fp8(tensors, _block(weights.get("block_structure")) if strategy == "block" else None)
    if format == "mxfp4-pack-quantized" and weights.get("type") == "float":
        _setting(weights, "num_bits", (4,))
        _setting(weights, "group_size", (32,))
        return Mxfp4(tensors)
    if weights.get("type", "int") != "int" or strategy == "block":
        raise CheckpointError(f"its format {format} has {weights.get('type')} in {strategy}s, which is not supported")
    bits = _setting(weights, "num_bits", (4, 8))
    size = _whole(weights, "group_size") if strategy == "group" else -1
    rounds_x = isinstance(group.get("input_activations"), Mapping)
    is_symmetric = weights.get("symmetric", True) is True
    assert isinstance(bits, int)
    if format == "pack-quantized":
        return PackedInts(tensors, bits, is_symmetric, rounds_x, size)
    if format in ("int-quantized", "naive-quantized") and bits == 8:
        return Bytes(tensors, rounds_x, size)
    raise CheckpointError(f"its format is {format} with {bits} bits, which is not supported")


def _group_of(module: str, stated: _Config) -> _Config:
    """Return the settings of a module: of the group that names it, else of the one that names its class."""
    groups = stated.get("config_groups")
    tables = [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    for is_named in (True, False):
        for group in tables:
            targets = group.get("targets")
            for target in targets if isinstance(targets, list) else []:
                if _names(str(target), module) if is_named else target == "Linear":
                    return group
    raise CheckpointError(f"no group of its config names {module}")


def _names(target: str, module: str) -> bool:
    """Return whether a target, a name or a regular expression, matches a module."""
    if target.startswith("re:"):
        try:
            return re.match(target[3:], module) is not None
        except re.error as error:
            raise CheckpointError(f"its config has the target {target!r}: {error}") from error
    return module == target or module.endswith(f".{target}")


_READERS: Mapping[str, Callable[[SafetensorsCheckpoint, Tensors, _Config], StoredLinear | None]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed,
}
