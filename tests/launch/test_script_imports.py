"""What a program imports is found by reading it: installed packages, and those that the user's own modules import; no code is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.launch.program import Program
from offbeat.launch.script_imports import ScriptImports, imports_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def of(folder: Path, text: str, **others: str) -> ScriptImports:
    """Read a script with these modules beside it; ``models_resnet`` is the file ``models/resnet.py``, ``models_`` its ``__init__``."""
    for name, content in {"train": text, **others}.items():
        package, _, module = name.rpartition("_")
        path = folder / package / f"{module or '__init__'}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return imports_of(Program(str(folder / "train.py")))


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


def test_of_a_module_the_packages_above_it_too(folder: Path) -> None:
    for path, text in {"pkg/__init__.py": "import numpy", "pkg/sub/__init__.py": "", "pkg/sub/train.py": "from .. import other"}.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    (folder / "pkg" / "other.py").write_text("import scipy")
    (folder / "pkg" / "sub" / "__main__.py").write_text("from .train import nothing\nimport torch")
    assert imports_of(Program("pkg.sub.train", module=True)).modules == ("numpy", "scipy")
    assert imports_of(Program("pkg.sub", module=True)).modules == ("numpy", "scipy", "torch")
    assert imports_of(Program("nowhere.at", module=True)) == imports_of(Program("missing.py")) == ScriptImports()


def test_what_stands_against_it(folder: Path) -> None:
    """Functions of other modules run later, as a rule; those of the script may run before its imports."""
    late = "import os, sys\ndef f():\n    os.environ['A'] = '1'\n    sys.path.insert(0, 'x')\n"
    assert of(folder, "import helper", helper=late) == ScriptImports()
    assert of(folder, "import helper", helper="import os\nif 1:\n    os.environ['A'] = '1'").sets == (
        "helper.py sets a variable of its environment (line 3)"
    )
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
