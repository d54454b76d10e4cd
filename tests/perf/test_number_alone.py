"""The task of perf/smollm2.py: what earns a reward, and which sums are held out."""

from __future__ import annotations

import pytest

from perf.number_alone import LARGEST, grade, prompt_of, split_of


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("12<|im_end|>", 1.0),
        ("13<|im_end|>", 0.25),
        ("12", 0.0),  # cut off
        (" 12<|im_end|>", 0.0),
        ("12.<|im_end|>", 0.0),
        ("The answer is 12<|im_end|>", 0.0),
        ("<|im_end|>", 0.0),
        ("٣<|im_end|>", 0.0),  # a digit, but not one of ours
        ("012<|im_end|>", 0.25),
    ],
)
def test_only_the_number_alone_earns_the_whole_reward(text: str, reward: float) -> None:
    assert grade(text, 12) == reward


def test_a_held_out_sum_is_held_out_in_both_orders() -> None:
    numbers = range(1, LARGEST + 1)
    pairs = [(left, right) for left in numbers for right in numbers]
    assert all(split_of(left, right) == split_of(right, left) for left, right in pairs)
    held_out = [pair for pair in pairs if split_of(*pair) == "eval"]
    assert len(held_out) == 28
    assert (2, 2) not in held_out, "the solved example in the prompt"


def test_the_question_is_the_last_thing_said_before_the_answer() -> None:
    assert prompt_of(7, 5).endswith("7 + 5 =<|im_end|>\n<|im_start|>assistant\n")
