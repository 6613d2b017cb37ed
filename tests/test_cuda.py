"""What only a GPU can show. Run by benchmarks/gpu_check.sh; skipped elsewhere."""

import pytest
import torch
from conftest import metrics_of, run

import common

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_bf16_engine_and_trainer_agree(tiny):
    folder, tokenizer = tiny
    device = torch.device("cuda")
    engine = common.HFEngine(common.load_model(folder, torch.bfloat16), tokenizer, device)
    policy = common.Policy(common.load_model(folder)).to(device)
    rollout = engine.generate([tokenizer("7+9-3=?\n").input_ids] * 8, 8, 64)
    batch = rollout.select(list(range(64)), device)
    logp_BT = policy(batch.tokens_BL, batch.prompt_len_B, batch.completion_len_B)
    assert logp_BT.dtype == torch.float32
    assert ((logp_BT - batch.logp_BT).abs() * batch.mask_BT).sum() / batch.mask_BT.sum() < 0.1


def test_weights_move_at_a_small_learning_rate(tmp_path):
    done = run("grpo.py", "--model", "tiny", "--engine", "hf", "--steps", 2, "--lr", 1e-6, "--warmup_steps", 0,
               "--run_dir", tmp_path / "run")
    assert done.returncode == 0, done.stdout
    assert all(row["grad_norm"] > 0 for row in metrics_of(tmp_path / "run")[1:])
