"""A worker finds what ``python train.py`` and ``python -m pkg.train`` find, whether it is a fork or a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.launch.waiting import printed, until

from offbeat.errors import ConfigurationError
from offbeat.launch.forkserver import Forkserver
from offbeat.launch.program import Program, module_spec

SHOW = """
import json, sys
epochs: int = 3
if "beside" in sys.argv:
    import beside
by_type = ("__annotate__", "__loader__")
names = {name: type(value).__name__ if name in by_type else repr(value) for name, value in vars().items() if name.startswith("__")}
names["__spec__"] = __spec__ and [__spec__.name, __spec__.origin]
main = sys.modules["__main__"]
mine, annotated = vars() is vars(main), list(main.__annotations__)
print(json.dumps({"argv": sys.argv, "path": sys.path, "names": names, "mine": mine, "annotated": annotated, "pkg": "pkg" in sys.modules}))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pkg" / "runnable").mkdir(parents=True)
    for name in ("pkg/__init__.py", "pkg/beside.py", "pkg/runnable/__init__.py"):
        (tmp_path / name).touch()
    for name in ("pkg/train.py", "pkg/runnable/__main__.py"):
        (tmp_path / name).write_text(SHOW)
    (tmp_path / "link.py").symlink_to("pkg/train.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def alone(program: Program) -> Any:
    result = subprocess.run([sys.executable, *program.command], capture_output=True, text=True, check=True, timeout=60)
    return json.loads(result.stdout)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "program",
    [
        Program("pkg/train.py", ("beside", "--epochs", "3")),
        Program("link.py", ("beside",)),
        Program("pkg.train", ("--epochs", "3"), module=True),
        Program("pkg.runnable", module=True),
    ],
    ids=["script", "link", "module", "package"],
)
def test_a_fork_is_what_python_would_be(program: Program) -> None:
    program.check()
    forkserver = Forkserver(program, ["decimal"], os.environ)
    until("its imports", forkserver.settled)
    child = forkserver.fork(os.environ, program)
    assert child is not None
    forked = json.loads("".join(printed(child)))
    forkserver.child.kill()
    assert forked == alone(program)
    assert forked["mine"] and forked["annotated"] == ["epochs"]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("program", "words"),
    [
        (Program("pkg.tran", module=True), r"-m pkg.tran: there is no module 'pkg.tran' in .* or on sys.path; check its name"),
        (Program("pkg/train.py", module=True), r"-m pkg/train.py: there is no module .* for a script's path leave -m out"),
        (Program("pkg.train.more", module=True), r"there is no module 'pkg.train.more'"),
        (Program("pkg", module=True), r"-m pkg: this is a package without a module __main__"),
        (Program("pkg.train"), r"there is no script 'pkg.train' here .*; for a module write -m before its name"),
        (Program("train.py"), r"there is no script 'train.py' here \([^;]*\)$"),
    ],
)
def test_what_is_not_there(program: Program, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        program.check()


def test_a_link_and_a_module_of_the_library_are_found(folder: Path) -> None:
    Program("link.py").check()
    assert Program("link.py").folder == str(folder / "pkg")
    Program("json.tool", module=True).check()
    assert "pkg" not in sys.modules


def test_a_folder_without_init_inside_a_package_is_a_namespace(tmp_path: Path) -> None:
    """Nothing is imported, so the package above it is not among the imported modules."""
    script = tmp_path / "pkg_of_test" / "space" / "train.py"
    script.parent.mkdir(parents=True)
    (tmp_path / "pkg_of_test" / "__init__.py").touch()
    script.touch()
    spec = module_spec("pkg_of_test.space.train", str(tmp_path))
    assert spec is not None and spec.origin == str(script)
    assert module_spec("pkg_of_test.space.other", str(tmp_path)) is None
