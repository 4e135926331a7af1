"""The formats that quantized models are written in."""

from __future__ import annotations

from ..spec import QuantizeSpec
from .gptq_writer import GPTQWriter
from .write_format import WriteFormat

WRITERS: dict[str, type[WriteFormat]] = {writer.name: writer for writer in (GPTQWriter,)}


def writer_for(spec: QuantizeSpec) -> WriteFormat:
    """The format that a spec names, or its method's own."""
    return WRITERS[spec.format or "gptq"]()
