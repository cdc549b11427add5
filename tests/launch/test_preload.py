"""PyTorch is imported once for all workers, unless the script sets variables that matter when it is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.errors import ConfigurationError
from offbeat.launch import preload
from offbeat.launch.preload import Preload, chosen
from offbeat.launch.program import Program
from offbeat.launch.script_imports import imports_of

DEFAULT = ("torch._dynamo",)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").touch()
    path = tmp_path / "script.py"
    path.touch()
    return path


def of(script: Path, *named: str, none: bool = False) -> Preload:
    return chosen(named, Program(str(script)), none=none)


def test_modules(script: Path) -> None:
    assert of(script) == Preload(DEFAULT)
    assert of(script, "json", "beside", "sys") == Preload(("json", "beside", "sys", "torch._dynamo"))
    assert of(script, *DEFAULT) == Preload(DEFAULT)
    assert of(script, none=True) == of(script, "json", none=True) == Preload()


def test_what_cannot_be_there_is_told_before_anything_starts(script: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--preload tosch.nn: there is no module 'tosch' that .*script.py could import"):
        of(script, "tosch.nn")


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


@pytest.mark.parametrize("text", CHANGES)
def test_a_script_that_sets_variables_imports_for_itself(script: Path, text: str) -> None:
    script.write_text(text)
    assert of(script).modules == ()
    assert f"script.py sets a variable of its environment (line {text.count(chr(10)) + 1})" in str(of(script).note)
    assert of(script, "json") == Preload(("json", *DEFAULT)), "the user knows better"


@pytest.mark.parametrize("text", READS)
def test_a_script_that_reads_variables_does_not_matter(script: Path, text: str) -> None:
    script.write_text(text)
    assert of(script) == Preload(DEFAULT)


def test_of_a_module_its_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "__main__.py").write_text(CHANGES[0])
    (tmp_path / "package" / "train.py").write_text(READS[0])
    assert "(line 2)" in str(imports_of(Program("package", module=True)).sets)
    assert imports_of(Program("package.train", module=True)).sets is None


def test_what_the_script_imports_beside(script: Path) -> None:
    script.write_text("import sys, numpy\nimport scipy\nimport beside\n")
    assert of(script) == Preload(DEFAULT, ("numpy", "scipy"))
    script.write_text("import sys\nsys.path.insert(0, '.')\nimport scipy\nimport torch\n")
    note = f"{script} changes where modules are searched (line 2): each worker imports scipy for itself; --preload MODULE names more"
    assert of(script) == Preload(DEFAULT, note=note)
    assert of(script, "json") == Preload(("json", *DEFAULT)), "the user knows better"


def test_elsewhere_nothing_is_imported(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "POSSIBLE", False)
    assert of(script) == Preload()
    assert of(script, "json") == Preload(note="--preload works on Linux only: here every worker imports for itself")
