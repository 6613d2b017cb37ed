"""Where the time of a GRPO step goes, and the same step in TRL's GRPOTrainer, on this machine.

    python benchmarks/speed.py                                # the built-in model, grpo.py alone, by phase
    python benchmarks/speed.py --trl                          # and TRL, installed into .venv-trl on first use
    python benchmarks/speed.py --trl --model FOLDER --file F.jsonl --prompts 4 --group 4 --new_tokens 128 \\
        --random_reward --steps 2 --repeats 1

Both do the same work: prompts x group completions of up to new_tokens, one update on all of them, token-mean loss with
clip 0.2 / 0.28, no KL, AdamW at 1e-6, float32 on a CPU, no gradient checkpointing. They run one after the other, twice, so that
a noisy machine shows. --random_reward gives every group signal: then no row is left out of the update, as in TRL.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent


def matmul_gflops():
    """What float32 matrix multiplication reaches here, in GFLOP/s."""
    import torch
    a, b = torch.randn(2, 2048, 2048)
    a @ b
    began = time.perf_counter()
    for _ in range(5):
        a @ b
    return 5 * 2 * 2048 ** 3 / (time.perf_counter() - began) / 1e9


def run_ours(args):
    """grpo.py as it is, with a clock around the functions that its loop calls."""
    sys.path.insert(0, str(ROOT))
    import torch

    import common
    import grpo
    seconds, completed = Counter(), []

    def clock(owner, name, phase):
        function = getattr(owner, name)

        def timed(*positional, **named):
            began = time.perf_counter()
            try:
                return function(*positional, **named)
            finally:
                seconds[phase(positional) if callable(phase) else phase] += time.perf_counter() - began
        setattr(owner, name, timed)

    if args.random_reward:
        common.score = lambda texts, answers: [float(random.random() < 0.5) for _ in texts]
    clock(common, "score", "reward")
    clock(common.HFEngine, "next_logits", lambda positional: "prefill" if positional[1].shape[1] > 1 else "decode")
    clock(common.Policy, "forward", "log-probs")
    clock(torch.Tensor, "backward", "backward")
    clock(torch.optim.AdamW, "step", "optimizer")
    clock(common.HFEngine, "load_weights", "weight load")
    write = common.RunLog.write

    def note(log, step, metrics):
        completed.append((time.perf_counter(), dict(seconds), metrics))
        write(log, step, metrics)
    common.RunLog.write = note
    common.RunLog.report = common.export = common.save_checkpoint = lambda *_, **__: None
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["grpo.py", "--model", args.model, "--dataset", args.file, "--eval_dataset", args.file,
                    "--prompts_per_step", str(args.prompts), "--group_size", str(args.group),
                    "--max_new_tokens", str(args.new_tokens), "--steps", str(args.steps + 1), "--eval_every", "100000",
                    "--lr", "1e-6", "--lr_schedule", "constant", "--max_prompt_tokens", str(args.prompt_tokens),
                    "--eval_problems", "1", "--run_dir", f"{folder}/run"]
        grpo.main()
    (first, before, _), (last, after, _) = completed[1], completed[-1]      # the first step warms up
    step_s = (last - first) / args.steps
    phases = {phase: (after[phase] - before.get(phase, 0.0)) / args.steps for phase in after}
    length = statistics.mean(metrics["length"] for _, _, metrics in completed[2:])
    return {"step_s": step_s, "tokens_per_s": length * args.prompts * args.group / step_s,
            "phases": {**phases, "other": step_s - sum(phases.values())}}


def run_trl(args):
    """The same in TRL."""
    sys.path.insert(0, str(ROOT))
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    import common
    name = common.resolve_model(args.model)
    tokenizer = common.load_tokenizer(name)
    problems, _ = common.encode_prompts(common.load_problems(args.file, "train"), tokenizer, args.prompt_tokens)
    rows = [{"prompt": tokenizer.decode(common.encode_prompt(p, tokenizer)), "answer": p.answer} for p in problems]
    lengths, times = [], []

    def reward(completions, answer, completion_ids, **_):
        lengths.append(statistics.mean(map(len, completion_ids)))
        if args.random_reward:
            return [float(random.random() < 0.5) for _ in completions]
        return common.score(completions, answer)

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__):
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=args.prompts * args.group, num_generations=args.group,
            max_completion_length=args.new_tokens, max_steps=args.steps + 1, learning_rate=1e-6, beta=0.0,
            loss_type="dapo", scale_rewards="group", epsilon=0.2, epsilon_high=0.28, temperature=1.0, bf16=False,
            gradient_checkpointing=False, use_cpu=not torch.cuda.is_available(), report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        GRPOTrainer(model, reward_funcs=reward, args=config, train_dataset=datasets.Dataset.from_list(rows),
                    processing_class=tokenizer, callbacks=[Clock()]).train()
    step_s = (times[-1] - times[0]) / args.steps
    return {"step_s": step_s, "tokens_per_s": statistics.mean(lengths[1:]) * args.prompts * args.group / step_s}


def trl_python():
    """The interpreter of .venv-trl, made on first use."""
    python = ROOT / ".venv-trl" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", ROOT / ".venv-trl"], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", ROOT / "requirements-cpu.txt", "trl==1.16.0"],
                       check=True)
    return python


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--file", default="arithmetic", help="the problems: a data set's name or a file")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new_tokens", type=int, default=96)
    parser.add_argument("--prompt_tokens", type=int, default=512, help="longer prompts are left out")
    parser.add_argument("--steps", type=int, default=20, help="timed steps, after one to warm up")
    parser.add_argument("--random_reward", action="store_true")
    parser.add_argument("--trl", action="store_true", help="measure TRL too")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--worker", choices=["ours", "trl"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        result = run_ours(args) if args.worker == "ours" else run_trl(args)
        print("RESULT " + json.dumps(result))
        return
    workers = {"ours": sys.executable, **({"trl": trl_python()} if args.trl else {})}
    results = {name: [] for name in workers}
    print(f"float32 matrix multiplication: {matmul_gflops():.0f} GFLOP/s; {os.cpu_count()} cores")
    for _ in range(args.repeats):
        for name, python in workers.items():
            done = subprocess.run([python, __file__, *sys.argv[1:], "--worker", name], capture_output=True, text=True)
            line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
            if line is None:
                raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
            results[name].append(json.loads(line.removeprefix("RESULT ")))
            last = results[name][-1]
            print(f"{name:<5} {last['step_s']:8.3f} s/step  {last['tokens_per_s']:8.0f} tokens/s   "
                  + "  ".join(f"{phase} {s:.3f}" for phase, s in last.get("phases", {}).items()), flush=True)
    if args.trl:
        ours, trl = (min(result["step_s"] for result in results[name]) for name in ("ours", "trl"))
        rate = [max(result["tokens_per_s"] for result in results[name]) for name in ("ours", "trl")]
        print(f"steps per second, ours / TRL: {trl / ours:.2f}; tokens per second, ours / TRL: {rate[0] / rate[1]:.2f}")


if __name__ == "__main__":
    main()
