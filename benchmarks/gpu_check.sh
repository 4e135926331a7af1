#!/usr/bin/env bash
# What to run on a machine with a GPU: the tests marked `gpu`, then a table of kernel times. Under eight minutes.
#
# Needs python3 with torch, triton and transformers, and nothing of the server (starlette, uvicorn, msgspec, pyzmq).
# Twofold need not be installed. PYTHON chooses the interpreter.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A folder whose only entry is the package, under its name: the root itself must stay off the path.
ln -s "$root" "$work/twofold"
export PYTHONPATH="$work" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
cd "$work" || exit 1

timeout 60 "$python" -m twofold doctor || echo "doctor found problems"

status=0
# Only files with such tests: others may import what is not installed here.
mapfile -t files < <(grep -rlE --include='test_*.py' 'mark\.gpu' "$root/tests")
if [ ${#files[@]} -eq 0 ]; then
    echo "no test is marked gpu"
elif ! "$python" -c 'import pytest' 2>/dev/null; then
    echo "pytest is not installed: the gpu tests were not run"
    status=1
else
    timeout 240 "$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" -o addopts=--import-mode=importlib \
        --confcutdir "$root/tests" -p no:cacheprovider -m gpu -q "${files[@]}"
    status=$?
fi

timeout 180 "$python" "$root/benchmarks/kernels.py" --seconds 120 "$@" || status=1
exit $status
