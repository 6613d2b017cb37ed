#!/usr/bin/env bash
# One GPU, under eight minutes: the tests marked cuda, then ten steps of every file (benchmarks/gpu_check.py).
set -euo pipefail
cd "$(dirname "$0")/.."
if ! python3 -c "import torch, sys; sys.exit(not torch.cuda.is_available())"; then
    echo "no CUDA device"
    exit 0
fi
if python3 -c "import pytest" 2>/dev/null; then
    python3 -m pytest -q -m cuda tests
fi
python3 benchmarks/gpu_check.py
