"""What is imported once for all workers: PyTorch, and what the program imports, found by reading it; no code of it is run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from offbeat.errors import ConfigurationError
from offbeat.launch.preload import Preload, chosen
from offbeat.launch.program import Program
from offbeat.launch.script_imports import ScriptImports, imports_of

DEFAULT = ("torch._dynamo",)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder: Path, text: str, **others: str) -> Program:
    """A script with these modules beside it; ``models_resnet`` is the file ``models/resnet.py``, ``models_`` its ``__init__``."""
    for name, content in {"train": text, **others}.items():
        package, _, module = name.rpartition("_")
        path = folder / package / f"{module or '__init__'}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return Program(str(folder / "train.py"))


def of(folder: Path, text: str, **others: str) -> ScriptImports:
    return imports_of(written(folder, text, **others))


# What a program imports.


def test_installed_packages_in_the_order_of_the_script(folder: Path) -> None:
    text = """
import argparse, json
import torch.nn as nn
from torch.utils.data import DataLoader
from numpy import *
from torch.utils.data import TensorDataset
import not_installed_anywhere
import offbeat
"""
    assert of(folder, text) == ScriptImports(("torch.nn", "torch.utils.data:DataLoader,TensorDataset", "numpy"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("try:\n    import scipy\nexcept ImportError:\n    import numpy", ("scipy",)),
        ("if True:\n    import scipy", ()),
        ("def main():\n    import scipy", ()),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import scipy", ()),
        ("if __name__ == '__main__':\n    import scipy", ("scipy",)),
        ("with open('x'):\n    import scipy", ("scipy",)),
        ("1 +", ()),
    ],
)
def test_only_what_is_always_imported(folder: Path, text: str, found: tuple[str, ...]) -> None:
    assert of(folder, text).modules == found


def test_the_users_own_modules_are_read_and_not_imported(folder: Path) -> None:
    """Each says what it is for by failing if it were run."""
    found = of(
        folder,
        "import helper, numpy\nfrom models import resnet\nfrom models.vit import Model",
        helper="import scipy.stats\nraise SystemExit('this must not run')\n",
        models_="from .base import Base\n",
        models_base="from ..helper import nothing\nimport torch\n",
        models_resnet="if __name__ == '__main__':\n    import pandas\nfrom . import base\n",
        models_vit="from .base import Base\nfrom sklearn import datasets\nimport train\n",
    )
    assert found == ScriptImports(("scipy.stats", "numpy", "torch", "sklearn:datasets"))


def test_a_name_beside_the_script_is_the_users_even_if_installed(folder: Path) -> None:
    assert of(folder, "import numpy\nimport scipy", numpy="import torch").modules == ("torch", "scipy")


@pytest.mark.parametrize(("metadata", "found"), [("another-1.0.dist-info", ("another",)), ("other", ("scipy",))])
def test_a_package_that_pip_has_put_into_pythonpath_is_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, metadata: str, found: tuple[str, ...]
) -> None:
    """As by ``pip install --target``: PyTorch there was read as the user's own code for seconds, and every worker imported it."""
    deps = folder / "deps"
    (deps / metadata).mkdir(parents=True)
    (deps / "another.py").write_text("import scipy")
    (folder / "own-1.0.dist-info").mkdir()  # the script's own folder is the user's in any case
    monkeypatch.setattr("sys.path", [str(deps), *sys.path])
    assert of(folder, "import another, helper", helper="").modules == found


def test_of_a_module_its_file_and_the_packages_above_it(folder: Path) -> None:
    for path, text in {"pkg/__init__.py": "import numpy", "pkg/sub/__init__.py": "", "pkg/sub/train.py": "from .. import other"}.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    (folder / "pkg" / "other.py").write_text("import scipy")
    (folder / "pkg" / "sub" / "__main__.py").write_text("from .train import nothing\nimport torch, os\nos.environ['A'] = '1'")
    assert imports_of(Program("pkg.sub.train", module=True)) == ScriptImports(("numpy", "scipy"))
    found = imports_of(Program("pkg.sub", module=True))
    assert found.modules == ("numpy", "scipy", "torch") and "(line 3)" in str(found.sets)
    assert imports_of(Program("nowhere.at", module=True)) == imports_of(Program("missing.py")) == ScriptImports()


# What stands against it.

CHANGES = [
    'import os\nos.environ["OMP_NUM_THREADS"] = "1"',
    'import os\ndef main():\n    os.environ.setdefault("TORCH_LOGS", "")',
    "from os import environ\nenviron.update(A='1')",
    "import os\nos.putenv('A', '1')",
    "import os\ndel os.environ['A']",
    "import os as system\nsystem.environ['A'] += '1'",
]
READS = [
    'import os\nprint(os.environ["HOME"], os.environ.get("A"), os.getenv("B"))',
    "config = {}\nconfig['environ'] = 1\nconfig.update(a=1)",
    "1 +",
]


@pytest.mark.parametrize("text", [*CHANGES, *READS])
def test_a_script_that_sets_variables_imports_for_itself(folder: Path, text: str) -> None:
    script = written(folder, text)
    found = chosen([], script, none=False)
    if text in READS:
        assert found == Preload(DEFAULT)
        return
    assert found.modules == () and f"train.py sets a variable of its environment (line {text.count(chr(10)) + 1})" in str(found.note)
    assert chosen(["json"], script, none=False) == Preload(("json", *DEFAULT)), "the user knows better"


def test_functions_of_other_modules_run_later_as_a_rule_and_those_of_the_script_before_its_imports(folder: Path) -> None:
    late = "import os, sys\ndef f():\n    os.environ['A'] = '1'\n    sys.path.insert(0, 'x')\n"
    assert of(folder, "import helper", helper=late) == ScriptImports()
    assert of(folder, "import helper", helper="import os\nif 1:\n    os.environ['A'] = '1'").sets == (
        "helper.py sets a variable of its environment (line 3)"
    )


def test_a_script_that_changes_where_modules_are_searched(folder: Path) -> None:
    for text, told in {
        "sys.path.insert(0, 'x')": True,
        "sys.path[0:0] = ['x']": True,
        "sys.path = []": True,
        "sys.modules['numpy'] = None": True,
        "sys.path.append('x')": False,
        "print(sys.path)": False,
    }.items():
        found = of(folder, f"import sys\n{text}\nimport numpy").searches
        assert found == (f"{folder / 'train.py'} changes where modules are searched (line 2)" if told else None), text


# What is chosen.


def test_the_modules_that_the_user_names_and_those_of_the_script(folder: Path) -> None:
    script = written(folder, "", beside="")
    assert chosen([], script, none=False) == chosen(DEFAULT, script, none=False) == Preload(DEFAULT)
    assert chosen(["json", "beside", "sys"], script, none=False) == Preload(("json", "beside", "sys", *DEFAULT))
    assert chosen([], script, none=True) == chosen(["json"], script, none=True) == Preload()
    script = written(folder, "import sys, numpy\nimport scipy\nimport beside\n")
    assert chosen([], script, none=False) == Preload(DEFAULT, ("numpy", "scipy"))
    script = written(folder, "import sys\nsys.path.insert(0, '.')\nimport scipy\nimport torch\n")
    note = f"{script.name} changes where modules are searched (line 2): each worker imports scipy for itself; --preload MODULE names more"
    assert chosen([], script, none=False) == Preload(DEFAULT, note=note)
    assert chosen(["json"], script, none=False) == Preload(("json", *DEFAULT)), "the user knows better"


def test_what_cannot_be_there_is_told_before_anything_starts(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--preload tosch.nn: there is no module 'tosch' that .*train.py could import"):
        chosen(["tosch.nn"], written(folder, ""), none=False)
