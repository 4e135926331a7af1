#!/usr/bin/env bash
# What to run on a machine with a GPU, in under eight minutes and without a network: doctor, the tests marked `gpu`,
# every kernel beside a copy, a matrix product and torch's own kernels, the engine beside transformers; one table at
# the end.
#
#   bash benchmarks/gpu_check.sh            on a GPU
#   bash benchmarks/gpu_check.sh --smoke    the same steps on a CPU, on tiny shapes: does the script itself work?
#
# Needs python3 with torch, triton and transformers, and nothing of the server (starlette, uvicorn, msgspec, pyzmq).
# Twofold need not be installed. PYTHON chooses the interpreter, OUT a folder that keeps the figures.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
out=${OUT:-$work/out}
mkdir -p "$out"
trap 'rm -rf "$work"' EXIT

budget=470 tests=110 kernels=160
device=auto models=8b,1b,70b milliseconds=20 engine=(--model 8b)
if [ "${1:-}" = --smoke ]; then
    budget=500 tests=60 kernels=60
    device=cpu models=tiny milliseconds=1 engine=(--model tiny --batch-sizes 1,2 --input-len 16 --output-len 4)
fi
left() { echo $((budget > SECONDS ? budget - SECONDS : 1)); }

# A folder whose only entry is the package, under its name: the root itself must stay off the path.
ln -s "$root" "$work/twofold"
export PYTHONPATH="$work${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
cd "$work" || exit 1

status=0
echo "== doctor"
timeout 60 "$python" -m twofold doctor --device "$device" || { echo "doctor found problems"; status=1; }

echo "== tests"
# Only files with such tests: others may import what is not installed here.
mapfile -t files < <(grep -rlE --include='test_*.py' 'mark\.gpu' "$root/tests")
if ! "$python" -c 'import pytest' 2>/dev/null; then
    echo "pytest is not installed: the gpu tests were not run"
    status=1
else
    timeout "$tests" "$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" -o addopts=--import-mode=importlib \
        --confcutdir "$root/tests" -p no:cacheprovider -m gpu -q "${files[@]}" || { echo "tests failed"; status=1; }
fi

echo "== kernels"
timeout $((kernels + 40)) "$python" -m twofold bench kernels --device "$device" --models "$models" --selected \
    --milliseconds "$milliseconds" --seconds "$kernels" --json "$out/kernels.json" || status=1

echo "== engine"
timeout "$(left)" "$python" "$root/benchmarks/random_engine.py" "${engine[@]}" --device "$device" \
    --seconds $(($(left) - 10)) >"$out/engine.jsonl" || status=1

echo "== summary"
"$python" "$root/benchmarks/gpu_table.py" "$out/kernels.json" "$out/engine.jsonl" || status=1
echo "took $SECONDS s"
exit $status
