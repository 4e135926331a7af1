"""The package that users install: all folders listed, pure Python, C sources and sample texts included, no more."""

import email
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import twofold

tomllib = pytest.importorskip("tomllib")

ROOT = Path(twofold.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OUTSIDE = {"tests", "docs", "benchmarks", "docker", "build", "dist"}
SOURCES = (".py", ".c", ".h")
# Files that come along without being code: texts to calibrate and evaluate with.
DATA = (".txt",)


def in_package(path: Path) -> bool:
    top = path.relative_to(ROOT).parts[0]
    return not (top.startswith(".") or top in OUTSIDE or top.endswith(".egg-info") or "__pycache__" in path.parts)


def source_files(suffixes: tuple[str, ...] = SOURCES) -> set[str]:
    """Every such file of the package, as the path it has once installed."""
    files = (path for path in ROOT.rglob("*") if path.suffix in suffixes and in_package(path))
    return {f"twofold/{path.relative_to(ROOT).as_posix()}" for path in files}


def test_packages_list_equals_the_folders() -> None:
    folders = {Path(name).parent.as_posix() for name in source_files()}
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(name.replace("/", ".") for name in folders)


def test_every_folder_has_an_init() -> None:
    names = [Path(name) for name in source_files()]
    assert {name.parent for name in names} == {name.parent for name in names if name.name == "__init__.py"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist, built from a copy so that no leftover of an earlier build gets in."""
    folder = tmp_path_factory.mktemp("package")
    copy = folder / "source"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "results")
    shutil.copytree(ROOT, copy, ignore=ignored)
    script = "from setuptools import build_meta as b; b.build_sdist('..'); b.build_wheel('..')"
    result = subprocess.run([sys.executable, "-c", script], cwd=copy, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    return folder


def test_wheel_has_exactly_the_sources_and_texts(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    info = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - info == source_files(SOURCES + DATA)
    assert {"calibration.txt", "evaluation.txt"} <= {Path(name).name for name in names}
    assert any(name.endswith("LICENSE") for name in info)
    assert wheel.name == f"twofold-{twofold.__version__}-py3-none-any.whl"


def test_wheel_is_pure_and_names_no_vendor(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        info = f"twofold-{twofold.__version__}.dist-info"
        assert "Root-Is-Purelib: true" in archive.read(f"{info}/WHEEL").decode()
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        assert "twofold = twofold.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    required = " ".join(line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line).lower()
    assert not any(word in required for word in ("nvidia", "cuda", "rocm", "amd", "triton"))
    description = metadata.get_payload(decode=True)
    assert isinstance(description, bytes)
    assert description.decode().strip() == (ROOT / "README.md").read_text().strip()


def test_sdist_can_be_built_again(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    prefix = f"twofold-{twofold.__version__}/"
    with tarfile.open(archive) as packed:
        names = {name.removeprefix(prefix) for name in packed.getnames()}
    assert {name.removeprefix("twofold/") for name in source_files(SOURCES + DATA)} <= names
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names


def test_versions_agree() -> None:
    assert f"## {twofold.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_license_is_apache() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"]["text"] == "Apache-2.0"
