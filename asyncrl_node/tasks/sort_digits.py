"""The demo task: sort 3 to 8 digits.

    prompt  5391>          answer  1359<eos>          reward  1.0 if exactly that, else 0.0

Held-out problems stay held out by construction: which split a digit string belongs to is a fixed
function of the *multiset* of its digits (`split_of`), whatever the seed. So no eval prompt, nor any
reordering of one, is ever drawn for training or for the warm-up, which draw with the same function.

The sampler imports this file: neither torch nor transformers may be reached from here.
"""

from __future__ import annotations

import json
import random
import re
import string
import zlib
from pathlib import Path

from asyncrl_node.tasks.base import Environment, Outcome, Split, Task

PAD = "<pad>"
EOS = "<eos>"
SYMBOLS = (PAD, EOS, *string.digits, ">", *string.ascii_lowercase, *"+-*/=,.")
"""The 46 symbols; a symbol's place is its token id. "<" is not one, so no text spells a special."""
TOKEN_IDS = {symbol: token for token, symbol in enumerate(SYMBOLS)}
PAD_TOKEN = TOKEN_IDS[PAD]
EOS_TOKEN = TOKEN_IDS[EOS]

MIN_DIGITS = 3
MAX_DIGITS = 8

_SYMBOL = re.compile(r"<[a-z]+>|[\s\S]")


def encode(text: str) -> list[int]:
    """Token ids of text, which may hold `<pad>` and `<eos>`.

    Raises: ValueError for a character outside the vocabulary.
    """
    try:
        return [TOKEN_IDS[symbol] for symbol in _SYMBOL.findall(text)]
    except KeyError as unknown:
        raise ValueError(f"not in the vocabulary: {unknown}") from None


def decode(tokens: list[int]) -> str:
    """Text of token ids; an id outside the vocabulary shows as its number, `<99>`."""
    return "".join(
        SYMBOLS[token] if 0 <= token < len(SYMBOLS) else f"<{token}>" for token in tokens
    )


def prompt_of(digits: str) -> str:
    """What the model is shown."""
    return digits + ">"


def answer_of(digits: str) -> str:
    """The only text that earns the reward."""
    return "".join(sorted(digits)) + EOS


def grade(digits: str, completion_tokens: list[int]) -> float:
    """1.0 if the text up to and including the first EOS is the answer, else 0.0."""
    said, eos, _ = decode(completion_tokens).partition(EOS)
    return float(said + eos == answer_of(digits))


def split_of(digits: str) -> Split:
    """The split that a digit string belongs to: 1 multiset in 8 is for evaluation only."""
    return "eval" if zlib.crc32("".join(sorted(digits)).encode()) % 8 == 0 else "train"


def draw_digits(rng: random.Random, split: Split) -> str:
    """Draw from a split: a uniform length, then uniform digits, again until the split is right."""
    while True:
        length = rng.randint(MIN_DIGITS, MAX_DIGITS)
        digits = "".join(rng.choices(string.digits, k=length))
        if split_of(digits) == split:
            return digits


def check_model(folder: Path) -> str | None:
    """Say why the model in a folder does not speak this vocabulary, or None if it does."""
    try:
        tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
        num_rows = json.loads((folder / "config.json").read_bytes())["vocab_size"]
        added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
        token_ids = {**tokenizer["model"]["vocab"], **added}
    except OSError as error:
        return f"{Path(error.filename).name} must be readable: {error.strerror}"
    except (KeyError, TypeError, ValueError, RecursionError):
        return "tokenizer.json must be one of the tokenizers library, config.json with vocab_size"
    if token_ids != TOKEN_IDS:
        return f"tokenizer.json must hold exactly the task's {len(SYMBOLS)} symbols, see SYMBOLS"
    if not isinstance(num_rows, int) or num_rows < len(SYMBOLS):
        return f"vocab_size must be at least {len(SYMBOLS)}, and is {num_rows}"
    return None


class SortDigitsEnvironment(Environment):
    """One attempt: one prompt, one answer, graded."""

    def __init__(self, digits: str) -> None:
        self._digits = digits

    async def reset(self) -> list[int]:
        """Return the prompt, e.g. the ids of `5391>`."""
        return encode(prompt_of(self._digits))

    async def step(self, completion_tokens: list[int]) -> list[int] | Outcome:
        """Grade the answer; there is no second turn."""
        return Outcome(reward=grade(self._digits, completion_tokens))

    async def grade_partial(self, completion_tokens: list[int]) -> Outcome:
        """Grade what there is as any answer; without its EOS it earns nothing."""
        return Outcome(reward=grade(self._digits, completion_tokens))


class SortDigits(Task):
    """Sort digits; the problems depend on the seed, their split does not (see `split_of`)."""

    name = "sort_digits"
    num_train_problems = 100_000
    num_eval_problems = 512
    max_prompt_tokens = MAX_DIGITS + 1
    max_new_tokens = 10
    max_turns = 1
    stop_token_ids = (EOS_TOKEN,)

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._eval_digits = _distinct_eval_digits(seed, self.num_eval_problems)

    def digits(self, split: Split, index: int) -> str:
        """Digits of problem `index`. Eval problems are distinct; short train ones recur.

        Raises: IndexError outside the split.
        """
        num_problems = self.num_train_problems if split == "train" else self.num_eval_problems
        if not 0 <= index < num_problems:
            raise IndexError(f"{split} problem {index} of {num_problems}")
        if split == "eval":
            return self._eval_digits[index]
        return draw_digits(random.Random(f"sort_digits train {self._seed} {index}"), "train")

    def environment(self, split: Split, index: int) -> Environment:
        """Make the environment of problem `index`.

        Raises: IndexError outside the split.
        """
        return SortDigitsEnvironment(self.digits(split, index))

    def check_model(self, folder: Path) -> str | None:
        """Say why the model in a folder does not fit, or None if it does."""
        return check_model(folder)

    def decode(self, tokens: list[int]) -> str:
        """Text of token ids, specials included."""
        return decode(tokens)


def _distinct_eval_digits(seed: int, num_problems: int) -> list[str]:
    rng = random.Random(f"sort_digits eval {seed}")
    drawn: dict[str, None] = {}
    while len(drawn) < num_problems:
        drawn[draw_digits(rng, "eval")] = None
    return list(drawn)
