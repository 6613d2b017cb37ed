"""Where the time of a GRPO step goes, and the same step in TRL's GRPOTrainer, on this machine.

    python benchmarks/speed.py                                # the built-in model, grpo.py alone, by phase
    python benchmarks/speed.py --trl                          # and TRL, installed into .venv-trl on first use
    python benchmarks/speed.py --trl --model FOLDER --file F.jsonl --prompts 4 --group 4 --new_tokens 128 \\
        --random_reward --steps 2 --repeats 1
    python benchmarks/speed.py --scaling                      # time and memory against completions, length, model size

Both do the same work: prompts x group completions of up to new_tokens, one update on all of them, token-mean loss with
clip 0.2 / 0.28, no KL, AdamW at 1e-6, float32 on a CPU, no gradient checkpointing. They run one after the other, twice,
so that a noisy machine shows; the output is kept as benchmarks/results/speed_trl_MODEL.txt. --random_reward gives every
group signal: then no row is left out of the update, as in TRL.

--scaling steps grpo.py alone, with random rewards, each line in a process of its own, and writes
benchmarks/results/speed_scaling.md. Beside the built-in model it uses untrained ones that hardly ever stop, so that
every completion has full length. The update's share of the peak is 6 FLOP for each token and parameter that it meets, over
the seconds of log-probs and backward, over what matrix multiplication reaches in the same process on as many threads.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# --scaling's untrained models: parameters of the table, (width, layers, heads, key-value heads, MLP width), as SmolLM2
SHAPES = {"4M": (64, 2, 2, 2, 256), "13M": (192, 6, 3, 3, 512), "37M": (384, 10, 6, 2, 1024), "135M": (576, 30, 9, 3, 1536)}
# name of a line's group: (model, prompts, completions per prompt, new tokens) of its lines
SCALING = {"completions": [("tiny", rows // 8, 8, 96) for rows in (64, 256, 1024, 4096)],
           "length": [("4M", 2, 8, tokens) for tokens in (64, 128, 256, 512, 1024)],
           "model": [(model, 4, 4, 64) for model in ("tiny", *SHAPES)]}


def matmul_gflops():
    """What float32 matrix multiplication reaches here, in GFLOP/s."""
    import torch
    a, b = torch.randn(2, 2048, 2048)
    a @ b
    began = time.perf_counter()
    for _ in range(5):
        a @ b
    return 5 * 2 * 2048 ** 3 / (time.perf_counter() - began) / 1e9


def untrained_model(shape, folder):
    """Saves a Qwen2 of random weights and 49,152 tokens, with the built-in model's tokenizer; returns its folder."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    import common
    tokenizer = common.tiny_tokenizer()     # of 18 tokens; ids above them are sampled, too, and decode to nothing
    width, layers, heads, kv_heads, mlp = shape
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=49152, hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=2048,
        tie_word_embeddings=True, bos_token_id=None, pad_token_id=0, eos_token_id=tokenizer.eos_token_id))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_ours(args):
    """grpo.py as it is, with a clock around the functions that its loop calls."""
    sys.path.insert(0, str(ROOT))
    import torch
    from transformers import AutoModelForCausalLM

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
    rows = args.prompts * args.group
    result = {"step_s": step_s, "tokens_per_s": length * rows / step_s,
              "phases": {**phases, "other": step_s - sum(phases.values())}}
    if args.scaling:
        # Of this process alone: resource's ru_maxrss starts from that of the process which started it.
        peak_kb = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
        model = AutoModelForCausalLM.from_pretrained(common.resolve_model(args.model))
        parameters, head = model.num_parameters(), model.get_output_embeddings().weight.numel()
        body = parameters - model.get_input_embeddings().weight.numel() - head * (not model.config.tie_word_embeddings)
        prompt = statistics.mean(map(len, common.encode_prompts(
            common.load_problems(args.file, "train"), common.load_tokenizer(common.resolve_model(args.model)), 64)[1]))
        flop = 6 * rows * (body * (prompt + length) + head * length)
        result |= {"parameters": parameters, "length": length, "threads": torch.get_num_threads(),
                   "memory_mb": peak_kb / 1024,
                   "peak_share": flop / (phases["log-probs"] + phases["backward"]) / matmul_gflops() / 1e9}
    return result


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


def scaling(args):
    """Runs the lines of SCALING and writes them as a table."""
    sys.path.insert(0, str(ROOT))
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        folders = {name: untrained_model(shape, Path(temporary) / name) for name, shape in SHAPES.items()}
        for name, settings in SCALING.items():
            for model, prompts, group, new_tokens in settings:
                found = worker("ours", sys.executable, [
                    "--scaling", "--random_reward", "--model", folders.get(model, model), "--prompts", prompts, "--group",
                    group, "--new_tokens", new_tokens, "--prompt_tokens", 64, "--steps", 3])
                phases = Counter(found["phases"])
                decode = phases.pop("prefill") + phases.pop("decode")
                named = [phases.pop(phase) for phase in ("log-probs", "backward")]
                lines.append([name, f"{found['parameters'] / 1e6:.1f}M", prompts * group, f"{found['length']:.0f}",
                              *(f"{value:.3f}" for value in (found["step_s"], decode, *named, sum(phases.values()))),
                              f"{found['tokens_per_s']:,.0f}", f"{found['memory_mb']:,.0f}",
                              f"{found['peak_share']:.0%} of {found['threads']}"])
                print("  ".join(map(str, lines[-1])), flush=True)
    header = ["grows", "parameters", "completions", "tokens each", "s a step", "engine's forward", "log-probs", "backward",
              "the rest", "tokens/s", "peak memory, MB", "update's share of the matmul peak, threads"]
    (ROOT / "benchmarks" / "results" / "speed_scaling.md").write_text(
        f"`python benchmarks/speed.py --scaling`, {os.cpu_count()} CPU cores, float32; 3 steps of grpo.py after one to warm "
        "up, random rewards. Memory is that of the whole process, libraries included.\n\n"
        + "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in (header, ["---"] * len(header), *lines)) + "\n")


def worker(name, python, flags):
    """Runs this file as a worker; returns its result."""
    command = [python, __file__, *map(str, flags), "--worker", name]
    done = subprocess.run(command, capture_output=True, text=True)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return json.loads(line.removeprefix("RESULT "))


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
    parser.add_argument("--scaling", action="store_true", help="how time and memory grow; grpo.py alone")
    parser.add_argument("--worker", choices=["ours", "trl"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        result = run_ours(args) if args.worker == "ours" else run_trl(args)
        print("RESULT " + json.dumps(result))
        return
    if args.scaling:
        return scaling(args)
    workers = {"ours": sys.executable, **({"trl": trl_python()} if args.trl else {})}
    results = {name: [] for name in workers}
    lines = [f"float32 matrix multiplication: {matmul_gflops():.0f} GFLOP/s; {os.cpu_count()} cores"]
    print(lines[0])
    for _ in range(args.repeats):
        for name, python in workers.items():
            results[name].append(worker(name, python, sys.argv[1:]))
            last = results[name][-1]
            lines.append(f"{name:<5} {last['step_s']:8.3f} s/step  {last['tokens_per_s']:8.0f} tokens/s   "
                         + "  ".join(f"{phase} {s:.3f}" for phase, s in last.get("phases", {}).items()))
            print(lines[-1], flush=True)
    if args.trl:
        ours, trl = (min(result["step_s"] for result in results[name]) for name in ("ours", "trl"))
        rate = [max(result["tokens_per_s"] for result in results[name]) for name in ("ours", "trl")]
        lines.append(f"steps per second, ours / TRL: {trl / ours:.2f}; tokens per second, ours / TRL: {rate[0] / rate[1]:.2f}")
        print(lines[-1])
        path = ROOT / "benchmarks" / "results" / f"speed_trl_{Path(args.model).name}.txt"
        flags = [Path(flag).name if "/" in flag else flag for flag in sys.argv[1:]]      # a reader has other folders
        path.write_text("\n".join([f"python benchmarks/speed.py {' '.join(flags)}", *lines]) + "\n")


if __name__ == "__main__":
    main()
