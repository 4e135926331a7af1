"""The folder of a quantized model: everything but the weights, and how it comes into being in one step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ..engine.model_config import generation_config, raw_config
from ..engine.sources import ModelFiles
from ..errors import ConfigError, StorageError
from ..storage import is_writable, not_writable, room_remedy
from .report import size_in_words
from .work_folder import partial_folder

WEIGHT_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".npz", ".tflite"}
)
REPLACED = frozenset({"config.json", "quantize_config.json", "quant_config.json"})
# Folders beside the weights that belong to the tokenizer side; any other may hold weights in another form.
SIDE_FOLDERS = ("additional_chat_templates",)


def check_output(output: Path, source: Path, *, overwrite: bool) -> None:
    """ConfigError when the result must not go to ``output``.

    A folder that is not empty is only replaced when asked for, only if it is a model, and never if it holds the source.
    """
    target, origin = output.resolve(), source.resolve()
    if target == origin or target in origin.parents:
        raise ConfigError(f"output {output} is or contains the model itself ({source}); choose another folder")
    if origin in target.parents:
        raise ConfigError(f"output {output} lies inside the model ({source}); choose a folder elsewhere")
    existing = _existing_parent(target.parent)
    if not existing.is_dir():
        raise ConfigError(f"output {output} lies below a file; choose a folder")
    if not is_writable(existing):
        raise ConfigError(f"output {output} cannot be made: {not_writable(existing)}")
    if not output.exists():
        return
    if not output.is_dir():
        raise ConfigError(f"output {output} is a file; choose a folder")
    if not any(output.iterdir()):
        return
    if not overwrite:
        raise ConfigError(
            f"output {output} is not empty; choose another folder, or --overwrite to replace a model there"
        )
    if not (output / "config.json").is_file():
        raise ConfigError(f"output {output} is not empty and holds no model; --overwrite only replaces a model")


def check_space(output: Path, needed: int) -> None:
    """StorageError when the disk has less than ``needed`` bytes free; what an interrupted run holds counts as free."""
    free = shutil.disk_usage(_existing_parent(output.resolve())).free + sum(
        path.stat().st_blocks * 512 for path in partial_folder(output).rglob("*") if path.is_file()
    )
    if free < needed:
        raise StorageError(
            f"output {output} needs {size_in_words(needed)} and its disk has {size_in_words(free)} free; "
            f"{room_remedy(output.parent)}"
        )


def write_side_files(
    files: ModelFiles,
    folder: Path,
    quantization: dict[str, Any],
    dtype: str,
    side_config: str | None,
    changes: dict[str, Any] | None = None,
) -> None:
    """config.json with the quantization, a ``side_config`` of it alone, and all side files of the model, byte for byte.

    ``changes`` are further values of config.json.
    Code of the model (``*.py``) is copied like any other file; Twofold never runs it.
    """
    if files.kind == "gguf":
        _write_gguf_side_files(files, folder)
    else:
        _copy_side_files(files.path, folder)
    config = raw_config(files)
    config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    config["quantization_config"] = quantization
    config |= changes or {}
    _write_json(folder / "config.json", config)
    if side_config is not None:
        _write_json(folder / side_config, quantization)


def source_dtype(files: ModelFiles) -> str:
    """The element type that the model's config names, else float32."""
    config = raw_config(files)
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def weight_bytes(files: ModelFiles) -> int:
    """Size of a model's weight files."""
    if files.kind == "gguf":
        return files.path.stat().st_size
    return sum(path.stat().st_size for path in files.path.glob("*.safetensors"))


def _copy_side_files(source: Path, folder: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.is_file() and _is_side_file(path):
            shutil.copyfile(path, folder / path.name)
        elif path.is_dir() and path.name in SIDE_FOLDERS:
            shutil.copytree(path, folder / path.name)


def _is_side_file(path: Path) -> bool:
    name = path.name
    is_weight = path.suffix in WEIGHT_SUFFIXES or name.endswith(".index.json")
    return not is_weight and name not in REPLACED and not name.startswith(".")


def _write_gguf_side_files(files: ModelFiles, folder: Path) -> None:
    from ..engine.tokenizer import load_tokenizer

    load_tokenizer(files).save(folder)
    config = raw_config(files)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None}
    _write_json(folder / "generation_config.json", ids | generation_config(files))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _existing_parent(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
