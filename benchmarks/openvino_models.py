"""Exports for OpenVINO from GGUF files, run by the Python that has it: `openvino_models.py TARGET FILE.gguf ...`.

Each FILE becomes TARGET/NAME by openvino-genai's own reader (F16, Q4_0, Q8_0 and others). A file of 16 bits gives
nncf_int8 (symmetric, a scale for each row) and nncf_int4 (symmetric, groups of 32) as well, by nncf, where it is
installed.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

MODEL = "openvino_model.xml"


def main() -> None:
    """Write what is not there yet."""
    target, files = Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]
    for file in files:
        folder = target / file.stem
        if not (folder / MODEL).exists():
            from_gguf(file, folder)
        if file.stem in ("f16", "f32"):
            compress(folder, target)


def from_gguf(file: Path, folder: Path) -> None:
    """The reader writes beside the file that it reads, so it gets a link in ``folder``."""
    import openvino_genai

    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "model.gguf"
    link.unlink(missing_ok=True)
    link.symlink_to(file.resolve())
    try:
        openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
    finally:
        link.unlink()


def compress(source: Path, target: Path) -> None:
    """int8 and int4 of the export in ``source``."""
    import nncf
    import openvino

    modes = {
        "nncf_int8": {"mode": nncf.CompressWeightsMode.INT8_SYM},
        "nncf_int4": {"mode": nncf.CompressWeightsMode.INT4_SYM, "group_size": 32, "ratio": 1.0, "all_layers": False},
    }
    for name, options in modes.items():
        folder = target / name
        if (folder / MODEL).exists():
            continue
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("openvino_model.*"), dirs_exist_ok=True)
        model = nncf.compress_weights(openvino.Core().read_model(source / MODEL), **options)
        openvino.save_model(model, folder / MODEL, compress_to_fp16=False)


if __name__ == "__main__":
    main()
