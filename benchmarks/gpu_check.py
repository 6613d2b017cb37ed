"""Ten steps of every algorithm file on one GPU, with a randomly initialised model of 0.5B size: one table.

    bash benchmarks/gpu_check.sh        # also runs the tests marked cuda; says "no CUDA device" and exits 0 without one

The model can't solve anything, so rewards are drawn at random: speed, memory and numerics are what is looked at.
"""

import json
import random
import runpy
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = ("grpo", "logit_avg_grpo", "mu_grpo", "conspo", "lspo", "popo", "lpo")
FLAGS = ["--dataset", "arithmetic", "--eval_dataset", "arithmetic", "--steps", "10", "--prompts_per_step", "16",
         "--group_size", "8", "--max_prompt_tokens", "64", "--max_new_tokens", "256", "--eval_problems", "8",
         "--eval_every", "100", "--save_every", "100", "--gradient_checkpointing"]


def make_model(folder):
    """Qwen2.5-0.5B's shape, random weights, and the built-in tokenizer: ids beyond it decode to nothing."""
    import common
    tokenizer = common.tiny_tokenizer()
    config = common.Qwen2Config(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                                num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=2048,
                                tie_word_embeddings=True, bos_token_id=None, pad_token_id=0,
                                eos_token_id=tokenizer.eos_token_id)
    common.Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def worker(name, model, run_dir):
    """Run one file in this process with random rewards; prints its peak memory."""
    import torch

    import common
    common.score = lambda texts, answers: [float(random.random() < 0.5) for _ in texts]
    common.RunLog.report = common.save_checkpoint = common.export = lambda *_, **__: None
    updates = ["--updates_per_rollout", "1"] if name == "lpo" else []
    sys.argv = [f"{name}.py", "--model", model, *FLAGS, *updates, "--run_dir", run_dir]
    runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
    print(f"PEAK {torch.cuda.max_memory_allocated() / 2 ** 30:.1f}")


def main():
    sys.path.insert(0, str(ROOT))
    if len(sys.argv) > 1:
        return worker(*sys.argv[1:])
    import torch
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| file | rollout s | update s | tokens/s | peak GiB | engine gap | grad |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        make_model(f"{folder}/model")
        for name in FILES:
            done = subprocess.run([sys.executable, __file__, name, f"{folder}/model", f"{folder}/{name}"], cwd=ROOT,
                                  capture_output=True, text=True)
            peak = [line for line in done.stdout.splitlines() if line.startswith("PEAK ")]
            if not peak:
                print(f"| {name} | failed: {(done.stderr or done.stdout).strip().splitlines()[-1]} | | | | | |")
                continue
            rows = [json.loads(line) for line in open(f"{folder}/{name}/metrics.jsonl")][3:]    # the first ones warm up
            middle = {key: statistics.median(row.get(key, 0.0) for row in rows)
                      for key in ("rollout_s", "update_s", "tokens_per_s", "engine_gap", "grad_norm")}
            print(f"| {name} | {middle['rollout_s']:.2f} | {middle['update_s']:.2f} | {middle['tokens_per_s']:,.0f} | "
                  f"{peak[0].removeprefix('PEAK ')} | {middle['engine_gap']:.4f} | {middle['grad_norm']:.3f} |", flush=True)


if __name__ == "__main__":
    main()
