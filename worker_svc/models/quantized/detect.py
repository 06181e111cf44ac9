"""Which format a checkpoint has, by its config.json alone."""

from __future__ import annotations

from collections.abc import Callable

from worker_svc.models.quantized.awq import read_awq
from worker_svc.models.quantized.checkpoint_format import CheckpointFormat
from worker_svc.models.quantized.compressed_format import read_compressed
from worker_svc.models.quantized.fp8_format import read_fp8
from worker_svc.models.quantized.gptq_format import read_gptq
from worker_svc.models.quantized.mxfp4 import read_mxfp4
from worker_svc.models.raw_config import RawConfig

_METHODS: dict[str, Callable[[RawConfig], CheckpointFormat | None]] = {
    "awq": read_awq,
    "compressed-tensors": read_compressed,
    "fbgemm_fp8": read_fp8,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
}


def detect_format(raw: RawConfig) -> CheckpointFormat | None:
    """None for plain weights. Raises ModelError for a format that is not read."""
    described = raw.part("quantization_config")
    if not described:
        described = raw.part("compression_config").merged(quant_method="compressed-tensors")
        if "config_groups" not in described:
            return None
    method = str(described.get("quant_method") or "").lower().replace("_", "-")
    method = {"fbgemm-fp8": "fbgemm_fp8"}.get(method, method)
    if method not in _METHODS:
        what = repr(described.get("quant_method", "quantization_config"))
        if described.flag("load_in_4bit"):
            what += f" ({described.get('bnb_4bit_quant_type', '4 bits')})"
        raise raw.error(f"weights quantised by {what} are not read; read are {', '.join(_METHODS)} and GGUF")
    return _METHODS[method](described)
