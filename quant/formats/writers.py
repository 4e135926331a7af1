"""The formats that quantized models are written in."""

from __future__ import annotations

from ...errors import ConfigError
from ..scheme import Fp8, WeightOnly
from ..spec import QuantizeSpec
from .awq_writer import BITS as AWQ_BITS
from .awq_writer import AWQWriter
from .compressed_tensors_writer import CompressedTensorsWriter
from .fp8_writer import Fp8Writer
from .gptq_writer import GPTQv2Writer, GPTQWriter
from .write_format import WriteFormat

WRITERS: dict[str, type[WriteFormat]] = {
    writer.name: writer for writer in (GPTQWriter, GPTQv2Writer, AWQWriter, CompressedTensorsWriter, Fp8Writer)
}


def writer_for(spec: QuantizeSpec) -> WriteFormat:
    """The format that a spec names, or its method's own. ConfigError when it cannot hold what the method makes."""
    name = spec.format or default_format(spec)
    reason = _refusal(WRITERS[name](), spec)
    if reason is None:
        return WRITERS[name]()
    others = [other for other, writer in WRITERS.items() if _refusal(writer(), spec) is None]
    remedy = f"formats that can: {', '.join(others)}" if others else "no format can"
    if isinstance(spec.scheme, WeightOnly) and spec.scheme.act_order:
        remedy += "; or another --order"
    raise ConfigError(f"format {name} cannot hold {spec.description}: {reason}; {remedy}")


def default_format(spec: QuantizeSpec) -> str:
    """The format of a spec that names none: the one that most tools read its scheme from."""
    scheme = spec.scheme
    if not isinstance(scheme, WeightOnly):
        is_block = isinstance(scheme, Fp8) and Fp8Writer().cannot_hold(scheme) is None
        return Fp8Writer.name if is_block else CompressedTensorsWriter.name
    if spec.kv_cache is not None:
        return CompressedTensorsWriter.name
    if spec.method == "awq" and scheme.bits == AWQ_BITS:
        return AWQWriter.name
    return GPTQWriter.name if scheme.symmetric else GPTQv2Writer.name


def _refusal(writer: WriteFormat, spec: QuantizeSpec) -> str | None:
    """Why ``writer`` cannot hold what a spec asks for, whatever the model."""
    schemes = spec.schemes
    if len(schemes) > 1 and not writer.mixes:
        return "all its layers have the same bits and group size"
    if spec.kv_cache is not None and spec.kv_cache not in writer.kv_caches:
        return f"its config has no place for scales of an {spec.kv_cache} KV cache"
    reasons = [writer.cannot_hold(scheme) for scheme in schemes]
    return None if None in reasons else reasons[0]
