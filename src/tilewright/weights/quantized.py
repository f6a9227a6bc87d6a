"""The names of quantised formats of safetensors, so that a checkpoint that is not read is refused by its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping

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
# Endings of tensors that a format adds, for configs that say nothing; a format whose mark is another's too comes later.
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
    """The name of the quantised format of a checkpoint, by its config or by the tensors it has; None: there is none."""
    if (method := _method(config)) is not None:
        return METHODS.get(method, method)
    for name, endings in _MARKS:
        if any(tensor.endswith(endings) for tensor in tensor_names):
            return name
    return None


def quantization_of(config: Mapping[str, object]) -> Mapping[str, object] | None:
    """What a config says of the quantisation, of the whole model or of its text part; None: nothing."""
    for table in (config, config.get("text_config")):
        if isinstance(table, Mapping):
            stated = table.get("quantization_config") or table.get("compression_config")
            if isinstance(stated, Mapping):
                return stated
    return None


def _method(config: Mapping[str, object]) -> str | None:
    if (stated := quantization_of(config)) is not None:
        # Older bitsandbytes configs have no method, but say how they load.
        return str(stated.get("quant_method") or ("bitsandbytes" if _loads_bits(stated) else "unnamed"))
    tables = [config, config.get("text_config")]
    return "MLX" if any(isinstance(table, Mapping) and "quantization" in table for table in tables) else None


def _loads_bits(stated: Mapping[str, object]) -> bool:
    return any(key.startswith(("load_in_", "bnb_", "_load_in_")) for key in stated)
