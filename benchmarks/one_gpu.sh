#!/bin/bash
# On a machine with one Hopper GPU: layer and matmul benchmarks, then the tests that need the GPU, then the suite on
# its CPU cores. Results go to $OUT (default: benchmarks/results). Each step has a limit, so that a short lease fits.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
out=${OUT:-benchmarks/results}
export PYTHONPATH=.:tests XLA_PYTHON_CLIENT_PREALLOCATE=false COLUMNS=110
t() { echo "== $SECONDS s: $*"; }
t layer
timeout 120 python3 -m jaxmoe.cli bench layer --json "$out/h200.json" --plot "$out/layer.png" 2>&1 | tail -60
t matmul
timeout 150 python3 -m jaxmoe.cli bench matmul --json "$out/h200.json" --plot "$out/matmul.png" 2>&1 | tail -70
t tests on the GPU
JAXMOE_TEST_PLATFORM=gpu timeout 140 python3 -m pytest -o minversion=8 -q -x -m gpu tests 2>&1 | tail -25
JAXMOE_TEST_PLATFORM=gpu timeout 60 python3 -m pytest -o minversion=8 -q -k "pallas and poison" tests/contract/test_experts.py 2>&1 | tail -8
if [ -n "${SUITE:-}" ]; then
    t the suite
    CUDA_VISIBLE_DEVICES= timeout "$SUITE" python3 -m pytest -o minversion=8 -n 12 -q tests 2>&1 | tail -25
fi
t end
