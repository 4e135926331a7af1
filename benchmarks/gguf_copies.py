"""The same model in other types of GGUF: `gguf_copies.py FILE.gguf TARGET [--types q4_0,q8_0,f16,f32]`.

Writes TARGET/{q4_0,q8_0,f16,f32}.gguf with the metadata of FILE. Norms stay in float32, and the embedding of q4_0 is in
Q8_0: where head and embedding are tied, that is what llama.cpp's own tool is asked for as well.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize, quantize
from random_model import TYPES

_TYPES = TYPES | {"f32": (GGMLQuantizationType.F32, 0)}


def main() -> None:
    """Write what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="FILE.gguf")
    parser.add_argument("target", type=Path, metavar="TARGET")
    parser.add_argument("--types", default=",".join(_TYPES), help="comma list of " + ", ".join(_TYPES))
    args = parser.parse_args()
    args.target.mkdir(parents=True, exist_ok=True)
    for name in args.types.split(","):
        target = args.target / f"{name}.gguf"
        if not target.exists():
            copy(args.source, target, *_TYPES[name])


def copy(source: Path, target: Path, kind: GGMLQuantizationType, file_type: int) -> None:
    """One file; it bears its name only when it is whole."""
    reader = GGUFReader(source)
    part = target.with_suffix(".part")
    writer = GGUFWriter(part, str(reader.fields["general.architecture"].contents()))
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        item = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], item)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
            continue
        own = kind
        if kind == GGMLQuantizationType.Q4_0 and tensor.name.startswith("token_embd"):
            own = GGMLQuantizationType.Q8_0
        writer.add_tensor(tensor.name, quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)


if __name__ == "__main__":
    main()
