"""Make the small model that the sort_digits demo starts from.

    python -m asyncrl_node.tasks.make_sort_digits_warm [--out DIR] [--seed 0]

    draw_batch -> train -> held_out_reward (printed) -> save

The warm-up trains on three behaviours at once: sort, sort in reverse, copy. Only the first earns
the reward, and only CORRECT_SHARE of the rows show it. It is long enough that the model sorts well
when it does sort, so at temperature 1 it is right nearly that often: something for RL to select.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from asyncrl_node.tasks import sort_digits
from asyncrl_node.tasks.sort_digits import EOS, EOS_TOKEN, PAD, PAD_TOKEN, SYMBOLS

WARM_MODEL_DIR = Path(__file__).parent / "sort_digits_warm"

NUM_STEPS = 900
ROWS_PER_STEP = 128
CORRECT_SHARE = 0.25
LEARNING_RATE = 3e-3
NUM_LR_WARMUP_STEPS = 10
FINAL_LR_SHARE = 0.1
MAX_GRAD_NORM = 1.0
NUM_HELD_OUT = 256
IGNORED_LABEL = -100


def build_model() -> Qwen3ForCausalLM:
    """Make the model with random weights: 220,064 parameters, 0.9 MB in float32."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(SYMBOLS),
            hidden_size=96,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=32,
            intermediate_size=288,
            max_position_embeddings=128,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=EOS_TOKEN,
            pad_token_id=PAD_TOKEN,
            dtype="float32",
        )
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make the Hugging Face form of the task's own vocabulary: one token per character."""
    tokenizer = Tokenizer(models.WordLevel(dict(sort_digits.TOKEN_IDS)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )


def draw_batch(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw rows of the train split, padded on the right.

    Returns: tokens [ROWS_PER_STEP, T] int64, and labels of the same shape, which are the tokens
    where the row's answer and its EOS stand and IGNORED_LABEL elsewhere.
    """
    tokens, labels = [], []
    for _ in range(ROWS_PER_STEP):
        digits = sort_digits.draw_digits(rng, "train")
        prompt = sort_digits.encode(sort_digits.prompt_of(digits))
        answer = sort_digits.encode(_shown_answer(digits, rng.random()))
        num_pads = sort_digits.MAX_DIGITS - len(digits)
        tokens.append(prompt + answer + [PAD_TOKEN] * 2 * num_pads)
        labels.append([IGNORED_LABEL] * len(prompt) + answer + [IGNORED_LABEL] * 2 * num_pads)
    return torch.tensor(tokens), torch.tensor(labels)


def _shown_answer(digits: str, uniform: float) -> str:
    if uniform < CORRECT_SHARE:
        return sort_digits.answer_of(digits)
    if uniform < (1 + CORRECT_SHARE) / 2:
        return "".join(sorted(digits, reverse=True)) + EOS
    return digits + EOS


def train(model: Qwen3ForCausalLM, seed: int) -> None:
    """Train on next-token cross-entropy of the answers, the learning rate falling linearly."""
    rng = random.Random(f"sort_digits warm-up {seed}")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _lr_share)
    model.train()
    for _ in track(range(NUM_STEPS), description="warm-up"):
        tokens, labels = draw_batch(rng)
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def _lr_share(step: int) -> float:
    rise = (step + 1) / NUM_LR_WARMUP_STEPS
    fall = 1 - (1 - FINAL_LR_SHARE) * step / NUM_STEPS
    return min(rise, fall)


@torch.no_grad()
def held_out_reward(model: Qwen3ForCausalLM, seed: int) -> float:
    """Mean reward on the first NUM_HELD_OUT eval problems, one sample each at temperature 1."""
    task = sort_digits.SortDigits(seed)
    held_out = [task.digits("eval", index) for index in range(NUM_HELD_OUT)]
    torch.manual_seed(seed)
    model.eval()
    total = 0.0
    # one batch per prompt length, so that nothing is padded
    for length in range(sort_digits.MIN_DIGITS, sort_digits.MAX_DIGITS + 1):
        problems = [digits for digits in held_out if len(digits) == length]
        prompts = [sort_digits.encode(sort_digits.prompt_of(digits)) for digits in problems]
        tokens = torch.tensor(prompts)
        sampled = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=task.max_new_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
        completions = sampled[:, tokens.shape[1] :].tolist()
        total += sum(map(sort_digits.grade, problems, completions))
    return total / NUM_HELD_OUT


def save(model: Qwen3ForCausalLM, out: Path) -> None:
    """Write a complete Hugging Face folder: configuration, weights and tokenizer."""
    model.save_pretrained(out)
    build_tokenizer().save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors writes 0600; a package needs readers


def main() -> None:
    """Make the model and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=WARM_MODEL_DIR)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a model this small only loses time to more threads
    disable_progress_bar()
    torch.manual_seed(options.seed)
    model = build_model()
    train(model, options.seed)
    reward = held_out_reward(model, options.seed)
    save(model, options.out)
    Console().print(
        f"held-out reward at temperature 1, {NUM_HELD_OUT} problems: {reward:.3f}\n"
        f"wrote {options.out}"
    )


if __name__ == "__main__":
    main()
