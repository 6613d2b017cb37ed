"""Fixtures that several test files share."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")        # a test that reaches for the network should fail at once
os.environ.setdefault("OMP_NUM_THREADS", "1")       # for child processes: two of them share the machine

import torch  # noqa: E402

import common  # noqa: E402

torch.set_num_threads(1)


def run(*command, processes=1, timeout=240, **kwargs):
    """Run a script of the repository to its end; returns the completed process, output and errors together."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return subprocess.run([*launcher, *map(str, command)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=timeout, **kwargs)


def metrics_of(run_dir, seconds=False):
    """The rows of metrics.jsonl; without the entries that no two runs share, unless seconds."""
    rows = [json.loads(line) for line in open(Path(run_dir) / "metrics.jsonl")]
    if not seconds:
        rows = [{k: v for k, v in row.items() if not k.endswith("_s") and k != "tokens_per_s"} for row in rows]
    return rows


@pytest.fixture(scope="session")
def tiny():
    """(folder, tokenizer) of the built-in model, pre-trained once per machine."""
    folder = common.tiny_model()
    return folder, common.load_tokenizer(folder)
