"""The house rules that a tool can check: who may import what, sizes, and what is committed."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "asyncrl_node"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
SOURCES = [*MODULES, ROOT / "launch.py"]

PURE = {
    "__future__", "abc", "bisect", "collections", "collections.abc", "dataclasses", "enum",
    "functools", "heapq", "itertools", "math", "operator", "types", "typing",
}  # fmt: skip
"""The part of the standard library that neither reads a clock nor touches the world."""

TOP_LEVEL = {
    "pyproject.toml", "README.md", "launch.py", "asyncrl_node", "tests", "perf", "docs",
    "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md",
}  # fmt: skip
UNTRACKED = {"__pycache__", "runs", "build", "shared"}

MAX_MODULE_LINES = 700
MAX_FUNCTION_LINES = 80


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> set[str]:
    """All modules that a file imports, wherever in it; `from a import b` is a, and a.b if that is
    a module of ours."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            found.add(node.module)
            below = (f"{node.module}.{alias.name}" for alias in node.names)
            found.update(name for name in below if name in OURS)
    return found


OURS = {name_of(path) for path in MODULES}


def room(folder: str) -> list[Path]:
    files = sorted((PACKAGE / folder).rglob("*.py"))
    assert files, f"no room {folder}"
    return files


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def modules_after(code: str) -> set[str]:
    """Run code in a fresh interpreter; return what it has imported."""
    code += "\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


# -- the core is pure ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", room("core"), ids=name_of)
def test_the_core_imports_nothing_but_itself_and_messages(path: Path) -> None:
    ours = ("asyncrl_node.core", "asyncrl_node.messages", "asyncrl_node.errors")
    foreign = {
        name
        for name in imports_of(path)
        if name not in PURE and not any(inside(name, package) for package in ours)
    }
    assert not foreign


@pytest.mark.parametrize("name", ["messages.py", "errors.py"])
def test_what_the_core_imports_is_pure_too(name: str) -> None:
    assert imports_of(PACKAGE / name) <= PURE | {"msgspec"}


def test_importing_the_core_touches_nothing() -> None:
    names = [name_of(path) for path in room("core")]
    core = "\n".join(f"import {name}" for name in names)
    loaded = modules_after(core)
    assert set(names) <= loaded
    brought = loaded - modules_after("import msgspec")
    forbidden = {
        "torch", "transformers", "numpy", "zmq", "asyncio", "random", "time", "logging", "socket",
        "threading", "subprocess", "sqlite3", "secrets", "datetime", "multiprocessing", "pathlib",
    }  # fmt: skip
    assert not brought & forbidden
    assert not {name for name in brought if inside(name, "asyncrl_node")} - {
        *names,
        "asyncrl_node",
        "asyncrl_node.messages",
        "asyncrl_node.errors",
    }


@pytest.mark.parametrize("path", room("core"), ids=name_of)
def test_the_core_opens_prints_and_asks_nothing(path: Path) -> None:
    called = {
        node.func.id
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"open", "print", "input", "__import__", "id", "hash", "globals"}


# -- rooms ---------------------------------------------------------------------------------------


def test_processes_never_import_each_other() -> None:
    rooms = ("scheduler", "sampler", "learner")
    for here in rooms:
        others = [f"asyncrl_node.{there}" for there in rooms if there != here]
        for path in room(here):
            crossing = [n for n in imports_of(path) if any(inside(n, other) for other in others)]
            assert not crossing, f"{name_of(path)} imports {crossing}"


def test_only_engines_import_vllm() -> None:
    for path in SOURCES:
        if path.parent != PACKAGE / "engines":
            assert not [n for n in imports_of(path) if inside(n, "vllm")], name_of(path)


def test_transport_decides_nothing() -> None:
    """Of the core it may know what lies where in memory, and no decision."""
    layouts = ("rollout", "layout", "shards")
    allowed = {"asyncrl_node.core", *(f"asyncrl_node.core.{name}" for name in layouts)}
    for path in room("transport"):
        core = {name for name in imports_of(path) if inside(name, "asyncrl_node.core")}
        assert core <= allowed, name_of(path)
        processes = ("scheduler", "sampler", "learner", "inspect", "engines", "tasks")
        rooms = tuple(f"asyncrl_node.{name}" for name in processes)
        assert not [n for n in imports_of(path) if any(inside(n, r) for r in rooms)]


def test_the_verifier_shares_no_code_with_what_it_judges() -> None:
    verifier = imports_of(PACKAGE / "inspect" / "verify.py")
    assert not [name for name in verifier if inside(name, "asyncrl_node")]


def test_the_scripted_run_imports_no_torch() -> None:
    heavy = modules_after(
        "import asyncrl_node.scheduler.process, asyncrl_node.sampler.process\n"
        "import asyncrl_node.learner.process, asyncrl_node.supervisor, asyncrl_node.cli\n"
        "from asyncrl_node.config import Config, FakeConfig\n"
        "from asyncrl_node.engines.factory import make_engine\n"
        "from asyncrl_node.learner.process import make_trainer\n"
        "from asyncrl_node.plan import task_of\n"
        "config = Config(engine='fake')\n"
        "engine = make_engine(config, task_of(config))\n"
        "trainer = make_trainer(config)\n"
        "assert type(engine).__name__ == 'FakeEngine', engine\n"
        "assert type(trainer).__name__ == 'FakeTrainer', trainer\n"
    )
    assert "asyncrl_node.engines.fake_engine" in heavy
    assert not heavy & {"torch", "transformers", "tokenizers", "safetensors", "vllm"}


# -- nothing is executed -------------------------------------------------------------------------


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_code_runs_from_bytes(path: Path) -> None:
    dangerous = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    assert not {name.split(".")[0] for name in imports_of(path)} & dangerous
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func)
        assert function not in {"eval", "exec", "compile", "builtins.eval", "builtins.exec"}
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if function == "torch.load":
            assert keywords.get("weights_only") == "True", f"line {node.lineno}"
        assert keywords.get("allow_pickle", "False") == "False", f"line {node.lineno}"
        assert keywords.get("trust_remote_code", "False") == "False", f"line {node.lineno}"
        assert keywords.get("shell", "False") == "False", f"line {node.lineno}"


# -- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_is_too_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_MODULE_LINES
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name}: {length} lines"


def test_no_module_is_a_drawer() -> None:
    names = {path.stem for path in MODULES}
    assert not names & {"utils", "util", "helpers", "misc", "common", "manager"}


# -- what is committed ---------------------------------------------------------------------------


@cache
def committed() -> tuple[Path, ...]:
    """Tracked files; without git, everything that is not obviously generated."""
    try:
        listed = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", "-z", "--cached"],
            capture_output=True,
            check=True,
        ).stdout
        files = [ROOT / name.decode() for name in listed.split(b"\0") if name]
    except (OSError, subprocess.CalledProcessError):
        files = [path for path in ROOT.rglob("*") if path.is_file() and not _generated(path)]
    return tuple(path for path in files if path.exists())


def _generated(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    return parts[0].startswith(".") or any(
        part in UNTRACKED or part.endswith(".egg-info") for part in parts
    )


def test_the_top_level_is_fixed() -> None:
    tops = {path.relative_to(ROOT).parts[0] for path in committed()}
    visible = {top for top in tops if not top.startswith(".")}
    assert visible == TOP_LEVEL


def texts() -> Iterator[tuple[Path, str]]:
    for path in committed():
        try:
            yield path, path.read_text()
        except UnicodeDecodeError:
            assert path.suffix in {".safetensors"}, f"{path} is not text"


def test_committed_files_name_nothing_of_the_machine_they_were_made_on() -> None:
    """Words are put together here, so that this file passes its own test."""
    private = [
        "/" + "work/",
        "/tmp/" + "v/",
        "/opt/" + "pypi",
        "/root/" + r"\w",
        "/home/" + r"\w",
        "py" + r"pi\.org",
        "python" + "hosted",
        "index" + "-url",
        "download.py" + r"torch\.org",
        "--find" + "-links",
    ]
    pattern = re.compile("|".join(private))
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path, text in texts()
        if (match := pattern.search(text))
    ]
    assert not found


def test_source_is_ascii_but_for_what_is_drawn_on_a_screen() -> None:
    drawn = {PACKAGE / "inspect" / "view.py"}
    for path in SOURCES:
        if path not in drawn:
            assert path.read_text().isascii(), name_of(path)


def test_todos_carry_an_issue_number() -> None:
    for path in SOURCES:
        for line in path.read_text().splitlines():
            if re.search(r"\b(TODO|FIXME|XXX)\b", line):
                assert re.search(r"#\d+", line), f"{name_of(path)}: {line.strip()}"
