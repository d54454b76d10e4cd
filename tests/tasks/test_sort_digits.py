"""The demo task, its vocabulary, its splits, and the model that ships with it."""

import asyncio
import random
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl_node.errors import ConfigError
from asyncrl_node.tasks import make_sort_digits_warm as warm
from asyncrl_node.tasks import sort_digits as sd
from asyncrl_node.tasks.base import Outcome
from asyncrl_node.tasks.registry import list_tasks, load_task

TOKENS = st.lists(st.integers(0, len(sd.SYMBOLS) - 1), max_size=20)


@pytest.fixture(scope="module")
def task():
    return sd.SortDigits(seed=0)


# vocabulary


def test_the_vocabulary_is_46_distinct_symbols():
    assert len(sd.SYMBOLS) == len(sd.TOKEN_IDS) == 46
    assert (sd.PAD_TOKEN, sd.EOS_TOKEN) == (0, 1)


@given(TOKENS)
def test_encode_undoes_decode(tokens):
    assert sd.encode(sd.decode(tokens)) == tokens


@pytest.mark.parametrize("text", ["A", "12\n", "<bos>", "<", "1 2"])
def test_text_outside_the_vocabulary_is_refused(text):
    with pytest.raises(ValueError, match="not in the vocabulary"):
        sd.encode(text)


def test_an_id_outside_the_vocabulary_shows_as_its_number(task):
    assert task.decode([sd.TOKEN_IDS["1"], 46, -1]) == "1<46><-1>"


# reward


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("1359<eos>", 1.0),
        ("1359<eos>7", 1.0),
        ("1359<eos><pad><eos>", 1.0),
        ("1359", 0.0),
        ("1359<pad>", 0.0),
        ("1359<pad><eos>", 0.0),
        ("9531<eos>", 0.0),
        ("5391<eos>", 0.0),
        ("135<eos>", 0.0),
        ("135<eos>9<eos>", 0.0),
        ("13599<eos>", 0.0),
        ("1359>1359<eos>", 0.0),
        ("<eos>", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_exact_answer_is_rewarded(said, reward):
    environment = sd.SortDigitsEnvironment("5391")
    completion = sd.encode(said)
    assert asyncio.run(environment.step(completion)) == Outcome(reward=reward)
    assert asyncio.run(environment.grade_partial(completion)) == Outcome(reward=reward)


def test_equal_digits_are_all_kept():
    assert sd.grade("212", sd.encode("122<eos>")) == 1.0
    assert sd.grade("212", sd.encode("12<eos>")) == 0.0


def test_an_id_outside_the_vocabulary_earns_nothing():
    assert sd.grade("21", [*sd.encode("12"), 46, sd.EOS_TOKEN]) == 0.0


# problems


@pytest.mark.parametrize("split", ["train", "eval"])
def test_prompts_and_answers_fit_the_budgets(task, split):
    lengths = set()
    for index in range(task.num_eval_problems):
        prompt = asyncio.run(task.environment(split, index).reset())
        digits = task.digits(split, index)
        assert task.decode(prompt) == digits + ">"
        assert len(prompt) <= task.max_prompt_tokens
        assert len(sd.encode(sd.answer_of(digits))) < task.max_new_tokens
        lengths.add(len(prompt))
    assert lengths == set(range(4, task.max_prompt_tokens + 1))


def test_a_problem_is_always_the_same_problem(task):
    again = sd.SortDigits(seed=0)
    for split in ("train", "eval"):
        backwards = [again.digits(split, index) for index in reversed(range(50))]
        assert [task.digits(split, index) for index in range(50)] == backwards[::-1]
    # pinned: a run resumed by another version of this file must see the same problems
    assert [task.digits("train", index) for index in range(4)] == [
        "803",
        "4067",
        "227800",
        "40763151",
    ]
    assert [task.digits("eval", index) for index in range(4)] == [
        "01267622",
        "087",
        "3054",
        "5319095",
    ]


def test_the_seed_changes_the_problems(task):
    other = sd.SortDigits(seed=1)
    for split in ("train", "eval"):
        assert [task.digits(split, i) for i in range(9)] != [
            other.digits(split, i) for i in range(9)
        ]


@pytest.mark.parametrize("split", ["train", "eval"])
def test_an_index_outside_the_split_is_refused(task, split):
    num_problems = task.num_train_problems if split == "train" else task.num_eval_problems
    task.environment(split, num_problems - 1)
    for index in (-1, num_problems):
        with pytest.raises(IndexError, match=split):
            task.environment(split, index)


# splits


def test_reordered_digits_stay_in_their_split():
    rng = random.Random(0)
    for _ in range(1000):
        digits = sd.draw_digits(rng, rng.choice(["train", "eval"]))
        assert sd.split_of("".join(rng.sample(digits, len(digits)))) == sd.split_of(digits)


def test_no_eval_problem_occurs_in_train_whatever_the_seeds(task):
    held_out = {
        "".join(sorted(other.digits("eval", i)))
        for other in map(sd.SortDigits, range(4))
        for i in range(other.num_eval_problems)
    }
    trained = {"".join(sorted(task.digits("train", i))) for i in range(task.num_train_problems)}
    assert not held_out & trained


def test_no_eval_problem_occurs_in_the_warm_up(task):
    held_out = {task.digits("eval", index) for index in range(task.num_eval_problems)}
    rng = random.Random("sort_digits warm-up 0")
    for _ in range(50):
        tokens, _ = warm.draw_batch(rng)
        prompts = {sd.decode(row).partition(">")[0] for row in tokens.tolist()}
        assert not prompts & held_out


def test_eval_problems_are_distinct(task):
    digits = [task.digits("eval", index) for index in range(task.num_eval_problems)]
    assert len(set(digits)) == len(digits) >= 256


# warm-up rows


def test_a_warm_up_row_trains_its_answer_and_nothing_else():
    tokens, labels = warm.draw_batch(random.Random(0))
    shown = {"sort": 0, "reverse": 0, "copy": 0}
    for row, row_labels in zip(tokens.tolist(), labels.tolist(), strict=True):
        digits, _, rest = sd.decode(row).partition(">")
        answer = rest.replace(sd.PAD, "")
        trained = [token for token in row_labels if token != warm.IGNORED_LABEL]
        assert sd.decode(trained) == answer
        start = len(digits) + 1
        assert row_labels[start : start + len(trained)] == trained
        shown["sort"] += answer == sd.answer_of(digits)
        shown["reverse"] += answer == "".join(sorted(digits, reverse=True)) + sd.EOS
        shown["copy"] += answer == digits + sd.EOS
    assert sum(shown.values()) >= warm.ROWS_PER_STEP
    assert min(shown.values()) > 0.15 * warm.ROWS_PER_STEP


# registry


def test_the_registry_makes_the_task():
    assert "sort_digits" in list_tasks()
    loaded = load_task("sort_digits", seed=3)
    assert loaded.name == "sort_digits"
    assert loaded.digits("train", 0) == sd.SortDigits(3).digits("train", 0)


def test_an_unknown_task_is_refused():
    with pytest.raises(ConfigError, match=r"task: must be one of .*sort_digits.* \(got sort\)"):
        load_task("sort", seed=0)


def test_the_sampler_side_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from asyncrl_node.tasks.registry import load_task; "
        "load_task('sort_digits', 0); "
        "sys.exit(' '.join({'torch', 'transformers', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# the shipped model


@pytest.fixture(scope="module")
def model():
    model, loading = AutoModelForCausalLM.from_pretrained(
        warm.WARM_MODEL_DIR, output_loading_info=True
    )
    assert not any(loading.values()), loading
    return model


def test_the_shipped_model_is_the_one_the_script_makes(model):
    expected = warm.build_model()
    shapes = {name: (p.shape, p.dtype) for name, p in expected.named_parameters()}
    assert {name: (p.shape, p.dtype) for name, p in model.named_parameters()} == shapes
    assert model.num_parameters() == 220_064
    assert (model.config.pad_token_id, model.config.eos_token_id) == (sd.PAD_TOKEN, sd.EOS_TOKEN)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_the_shipped_model_leaves_room_to_learn(model):
    assert 0.15 <= warm.held_out_reward(model, seed=0) <= 0.30


def test_the_shipped_tokenizer_is_the_task_vocabulary(task):
    path = warm.WARM_MODEL_DIR / "tokenizer.json"
    assert path.read_text() == warm.build_tokenizer().backend_tokenizer.to_str(pretty=True)
    tokenizer = Tokenizer.from_file(str(path))
    assert tokenizer.get_vocab() == sd.TOKEN_IDS
    for text in ["5391>1359<eos><pad>", "a+b=c,/.*-z>", ""]:
        assert tokenizer.encode(text).ids == sd.encode(text)
        assert tokenizer.decode(sd.encode(text), skip_special_tokens=False) == text


def test_auto_tokenizer_reads_the_shipped_folder():
    tokenizer = AutoTokenizer.from_pretrained(warm.WARM_MODEL_DIR)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (sd.PAD_TOKEN, sd.EOS_TOKEN)
    assert tokenizer("5391>")["input_ids"] == sd.encode("5391>")
    assert tokenizer.decode(sd.encode("1359<eos>")) == "1359<eos>"


def test_the_shipped_folder_names_no_place_on_the_machine_that_made_it():
    for path in warm.WARM_MODEL_DIR.iterdir():
        if path.suffix == ".json":
            text = path.read_text()
            assert "_name_or_path" not in text
            assert not re.search(r'"/\w', text)
