from __future__ import annotations
import types
from pathlib import Path
from typing import NamedTuple
import asyncrl_node
ROOT = Path(asyncrl_node.__file__).parent
class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
def load(m):
    text = (ROOT / m.file).read_text()
    assert text.count(m.old) == 1, (m.name, text.count(m.old))
    module = types.ModuleType("mutant_" + m.file.rsplit("/",1)[1][:-3])
    exec(compile(text.replace(m.old, m.new), m.file, "exec"), module.__dict__)
    return module
