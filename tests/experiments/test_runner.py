"""The experiments' runner and data: what it lists, writes and refuses; and every experiment there is, in its quick form."""

from __future__ import annotations

import gzip
import importlib
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments.claims import MECHANISM, Claim
from experiments.result import Row, new_figure, number, report, save
from rich.console import Console
from tests.faults.job import QUICK, WHOLE_TORCH
from tests.tiers import marked
from typer.testing import CliRunner

import offbeat
from experiments import __main__ as runner
from experiments import data
from offbeat.errors import ConfigurationError

CHECKOUT = Path(__file__).parents[2]
EXPERIMENTS = runner.find()
LIMIT_S = 480.0
"""For what hangs: the longest takes 70 to 90 s on two cores, and more where something else runs on them, as other tests do."""
IN_CI = {"eager_fig2"}
"""The experiments whose quick runs are CI's. Of the others, which take ten seconds to minutes, CI runs the mechanism where there is one
(test_mutations.py); tests/policies/test_zipline.py judges the search of zipline_table2 by brute force and by a heap."""
ONE_SEED = {"eager_fig13"}
"""Experiments whose quick run has two seeds, of which each alone bears out the claims."""
VMAPPED = {"dbw_fig1"}
"""Experiments that use `torch.func.vmap`, which needs the parts of PyTorch that quick jobs leave out."""
OWN = {"auto", "bias", "ringmaster"}
"""Experiments whose papers have no number for what they measure."""


def experiments(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m experiments`` with these arguments; what it has started ends with it, whatever happens."""
    command = [sys.executable, "-m", "experiments", *arguments]
    process = subprocess.Popen(
        command,
        cwd=CHECKOUT,
        env={**os.environ, **QUICK, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        pytest.fail(f"{' '.join(command)} took more than {LIMIT_S:.0f} s\n{stdout}\n{stderr}")
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def invoke(*arguments: str) -> Any:
    """The same in this process."""
    return CliRunner().invoke(runner.app, list(arguments))


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("name", marked(list(EXPERIMENTS), night=[*EXPERIMENTS.keys() - IN_CI]))
def test_every_experiment_runs_quickly_and_bears_out_its_claims(name: str, tmp_path: Path) -> None:
    seeds = ("--seeds", "1") if name in ONE_SEED else ()
    done = experiments(name, "--quick", "--check", *seeds, "--out", str(tmp_path), **(WHOLE_TORCH if name in VMAPPED else {}))
    if done.returncode == runner.NO_DATA:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result.keys() == {"experiment", "mode", "paper", "rows", "seed", "version", "wall_s"}
    title = " ".join((name, *seeds))
    assert (result["experiment"], result["mode"], result["version"]) == (title, "quick", offbeat.__version__)
    assert all(row.keys() == set(Row._fields) for row in result["rows"])
    assert name in OWN or any(row["paper"] is not None for row in result["rows"]), "no row has the paper's number beside it"
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize(
    "name", [name for name, path in EXPERIMENTS.items() if re.search(r'^VARIANTS[^}]*"', path.read_text(encoding="utf-8"), re.MULTILINE)]
)
def test_every_other_comparison_that_a_readme_names_runs(name: str, tmp_path: Path) -> None:
    variants = importlib.import_module(f"experiments.{name}").VARIANTS
    for variant, run in variants.items():
        if variant != MECHANISM:  # test_mutations.py runs those
            seeds = ("--seeds", "1") if "seeds" in inspect.signature(run).parameters else ()
            done = experiments(name, "--quick", "--variant", variant, *seeds, "--out", str(tmp_path / variant))
            assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_says_what_it_reproduces_and_what_is_smaller_here(name: str) -> None:
    assert len(runner.paper_of(EXPERIMENTS[name])) > 20
    readme = EXPERIMENTS[name].with_name("README.md")
    assert readme.is_file(), f"{readme} must say what is the same as in the paper and what is smaller here"


def test_the_list_names_all_and_imports_none() -> None:
    listing = "import sys; from experiments.__main__ import app; app(['--list'], standalone_mode=False)"
    code = f"{listing}; print(*sorted(m for m in sys.modules if m == 'torch' or m.startswith('experiments.')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    *lines, loaded = done.stdout.splitlines()
    assert loaded.split() == ["experiments.__main__", "experiments.claims", "experiments.data", "experiments.result"]
    assert "zipline_table2" in EXPERIMENTS
    assert {line.split()[0] for line in lines if line.strip() and not line.startswith(" ")} == set(EXPERIMENTS)


def test_an_unknown_name_is_a_sentence_with_a_guess() -> None:
    done = invoke("zipline_tabel2")
    assert done.exit_code == 2
    assert "there is no experiment 'zipline_tabel2' (did you mean 'zipline_table2'?)" in done.stderr
    done = invoke("zipline_table2", "qqqq")
    assert done.exit_code == 2, "nothing runs when one of the names is wrong"
    assert "there is no experiment 'qqqq'; the known ones are" in done.stderr


def test_results_do_not_go_into_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    done = invoke("zipline_table2", "--quick", "--out", str(tmp_path / "taken"))
    assert done.exit_code == 2 and "--out" in done.stderr


def test_no_name_is_help() -> None:
    assert "--quick" in invoke().output


Make = Callable[[str, str], None]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes experiments of its own for the runner to find."""
    package = tmp_path / "experiments"
    package.mkdir()
    monkeypatch.setattr(runner, "HERE", package)
    monkeypatch.setattr(runner.find, "__defaults__", (package,))
    monkeypatch.setattr("experiments.__path__", [str(package)])
    monkeypatch.chdir(tmp_path)

    def write(name: str, source: str) -> None:
        (package / name).mkdir()
        (package / name / "__init__.py").write_text(source)
        monkeypatch.delitem(sys.modules, f"experiments.{name}", raising=False)

    return write


GOOD = """
from experiments.result import Row, new_figure, save
PAPER: str = "Somebody, Table 1"
SEED = 7
def run(quick, out):
    save(new_figure(), out / f"{__name__.split('.')[1]}.png")
    mode = "quick" if quick else "full"
    return [Row("speed", 2.0, 3.5, "m/s", "a smaller model"), Row("ratio", None, float("inf"), ""), Row("name", "few", mode, "")]
"""


def test_a_run_writes_rows_and_a_picture(make: Make, tmp_path: Path) -> None:
    make("runner_good", GOOD)
    done = invoke("runner_good", "--quick")
    assert done.exit_code == 0, done.output
    assert "runner_good (quick): Somebody, Table 1" in done.stdout
    text = (tmp_path / "out" / "runner_good" / "result.json").read_text()
    result = json.loads(text)
    assert list(result) == sorted(result), "keys are sorted, so that two results can be compared line by line"
    assert result.pop("wall_s") >= 0.0
    assert result == {
        "experiment": "runner_good",
        "mode": "quick",
        "paper": "Somebody, Table 1",
        "rows": [
            {"measured": 3.5, "name": "speed", "note": "a smaller model", "paper": 2.0, "unit": "m/s"},
            {"measured": "inf", "name": "ratio", "note": "", "paper": None, "unit": ""},
            {"measured": "quick", "name": "name", "note": "", "paper": "few", "unit": ""},
        ],
        "seed": 7,
        "version": offbeat.__version__,
    }
    assert (tmp_path / "out" / "runner_good" / "runner_good.png").is_file()


def test_several_names_get_a_folder_each(make: Make, tmp_path: Path) -> None:
    make("runner_one", GOOD)
    make("runner_two", GOOD)
    assert invoke("runner_one", "runner_two", "--out", "there").exit_code == 0
    assert {path.parent.name for path in tmp_path.glob("there/*/result.json")} == {"runner_one", "runner_two"}
    assert invoke("runner_one", "--out", "here").exit_code == 0
    assert (tmp_path / "here" / "result.json").is_file()


CLAIMING = (
    GOOD
    + """
from experiments.claims import Claim
CLAIMS = (Claim(row="speed", at_least=3.0, at_most=4.0, why="a better engine than the paper's"), *[MORE])
"""
)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("Claim(row='speed', at_most=3.4, why='the speed of sound')", "speed is 3.5, claimed is at most 3.4 (the speed of sound)"),
        ("Claim(row='ratio', over='speed', at_most=9.0, why='x')", "ratio / speed is inf, claimed is at most 9 (x)"),
        ("Claim(row='speed', at_least=3.0, at_most=3.0, why='x')", "speed is 3.5, claimed is exactly 3 (x)"),
        ("Claim(row='name', at_least=1.0, why='x')", "name is quick, claimed is at least 1 (x)"),
        ("Claim(row='name', says='full', why='x')", "name is quick, claimed is 'full' (x)"),
        ("Claim(row='sped', at_least=1.0, why='x')", "sped is unknown: there is no row 'sped', claimed is at least 1 (x)"),
        ("", ""),
        ("Claim(row='name', says='full', why='x', mode='full')", ""),
        ("Claim(row='ratio', over='speed', at_least=9.0, why='x'), Claim(row='name', says='quick', why='x', mode='quick')", ""),
    ],
)
def test_a_broken_claim_is_named_and_the_status_is_1(make: Make, tmp_path: Path, broken: str, said: str) -> None:
    make("runner_claims", CLAIMING.replace("MORE", broken))
    done = invoke("runner_claims", "--quick", "--check")
    assert done.exit_code == (1 if said else 0), done.output
    assert "3 to 4" in done.stdout and ("BROKEN" in done.stdout) is bool(said)
    assert done.stderr == (f"runner_claims: broken claim: {said}\n" if said else "")
    assert (tmp_path / "out" / "runner_claims" / "result.json").is_file(), "a broken claim's figures are kept"
    assert invoke("runner_claims", "--quick").exit_code == 0, "claims are looked at with --check only"


SEEDED = (
    GOOD.replace("def run(quick, out):", "def run(quick, out, *, seeds=1, speed=3.5):").replace('3.5, "m/s"', 'speed * seeds, "m/s"')
    + """
def faster(quick, out):
    return run(quick, out, speed=7.0)
VARIANTS = {"faster": faster}
from experiments.claims import Claim
CLAIMS = (Claim(row="speed", at_most=4.0, why="x"), Claim(row="speed", at_least=7.0, why="x", variant="faster"))
"""
)


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ((), 0, ""),
        (("--seeds", "2"), 1, "broken claim: speed is 7, claimed is at most 4 (x)"),
        (("--variant", "faster"), 0, ""),
        (("--variant", "fast"), 1, "runner_seeds has no variant 'fast'; the known ones are faster"),
        (
            ("--variant", "faster", "--seeds", "2"),
            1,
            "runner_seeds --variant faster --seeds 2: it takes no number of seeds; leave out --seeds",
        ),
    ],
)
def test_seeds_and_variants_are_the_experiments_own(make: Make, tmp_path: Path, options: tuple[str, ...], status: int, said: str) -> None:
    make("runner_seeds", SEEDED)
    done = invoke("runner_seeds", "--quick", "--check", *options)
    assert (done.exit_code, said in done.stderr) == (status, True), done.output
    if "claimed" in said or not said:
        result = json.loads((tmp_path / "out" / "runner_seeds" / "result.json").read_text())
        assert result["experiment"] == " ".join(("runner_seeds", *options)), "what was run can be typed again"


def test_what_claims_nothing_cannot_be_checked(make: Make) -> None:
    make("runner_modest", GOOD)
    done = invoke("runner_modest", "--quick", "--check")
    assert done.exit_code == 1 and "runner_modest claims nothing in quick mode" in done.stderr


@pytest.mark.parametrize("bad", [{}, {"at_least": 1.0, "says": "one"}, {"at_least": 2.0, "at_most": 1.0}])
def test_a_claim_without_a_bound_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="needs either words or bounds"):
        Claim(row="a", why="x", **bad)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("raise RuntimeError('it broke')", 1, "failed: RuntimeError: it broke"),
        ("raise ConfigurationError('b must be less than n')", 1, "failed: b must be less than n"),
        ("return [Row('a', 1.0, 1.0, '')]", 1, "drew no"),
        ("save(new_figure(), out / 'runner_bad.png'); return []", 1, "no rows; run() must return at least one Row"),
        ("save(new_figure(), out / 'runner_bad.png'); return [Row('a', 1, 1, '')] * 2", 1, "two rows named 'a'"),
        ("from experiments.data import locate; locate('nowhere')", 3, "set OFFBEAT_DATA to the folder that holds nowhere"),
    ],
)
def test_what_fails_says_so_and_the_others_still_run(
    make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str], body: str, status: int, said: str
) -> None:
    start = "from offbeat.errors import ConfigurationError\nfrom experiments.result import Row, new_figure, save\nPAPER = 'x'\n"
    make("runner_bad", f"{start}def run(quick, out):\n    {body}\n")
    make("runner_good", GOOD)
    done = invoke("runner_bad", "runner_good")
    assert done.exit_code == status, done.output
    assert "runner_bad" in done.stderr and said in done.stderr
    assert (tmp_path / "out" / "runner_good" / "result.json").is_file()
    assert not (tmp_path / "out" / "runner_bad" / "result.json").exists()


def test_a_package_without_a_paper_is_named_and_shared_code_is_not_listed(make: Make) -> None:
    make("runner_silent", "PAPERS = 1\n")
    make("_shared", "")
    done = invoke("--list")
    assert done.exit_code == 0
    assert 'write PAPER = "..."' in " ".join(done.stdout.split())
    assert "_shared" not in done.stdout
    assert invoke("_shared").exit_code == 2


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r'pip install "offbeat\[plots\]"'):
        new_figure()


def test_the_table_shows_everything(tmp_path: Path) -> None:
    screen = Console(width=120, file=io.StringIO(), record=True)
    rows = [Row("a [b]", 2.38e6, np.float32(0.5), "µs"), Row("c", None, "not reached", "s", "fewer seeds")]  # type: ignore[arg-type]
    path = report("one", "Table [1]", rows, tmp_path, quick=False, wall_s=1.0, seed=0, screen=screen)
    shown = screen.export_text()
    assert all(word in shown for word in ("one: Table [1]", "a [b]", "2,380,000", "0.5", "not reached", "fewer seeds"))
    assert json.loads(path.read_text())["rows"][0]["measured"] == 0.5


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (60, "60"), (1.6, "1.6"), (-2.345678, "-2.346"), (123456.7, "123,457"), (1e12, "1e+12"), (0.05, "0.05")],
)
def test_numbers_for_people(value: float, shown: str) -> None:
    assert number(value) == shown


def test_pictures_of_one_thing_are_equal(tmp_path: Path) -> None:
    for name in ("a", "b"):
        figure = new_figure()
        figure.subplots().plot([1, 2], [3, 4])
        save(figure, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_mnist_as_published() -> None:
    if not (data.root() / "mnist").exists():
        pytest.skip(f"there is no {data.root() / 'mnist'}")
    images = data.mnist(train=600, test=100)
    assert images.train_x.shape == (600, 1, 28, 28) and images.test_x.shape == (100, 1, 28, 28)
    assert images.test_y[:5].tolist() == [7, 2, 1, 0, 4]
    assert abs(float(images.train_x.mean())) < 0.05 and abs(float(images.train_x.std()) - 1.0) < 0.05


def test_data_that_is_absent_names_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(data.VARIABLE, str(tmp_path))
    with pytest.raises(data.MissingDataError, match=r"there is no .*traces: set OFFBEAT_DATA to the folder that holds traces"):
        data.locate("traces")
    (tmp_path / "traces").mkdir()
    assert data.locate("traces") == tmp_path / "traces"


@pytest.mark.parametrize("content", [b"", b"\0\0\x08\x01\0\0\0\x05abc", b"\0\0\x09\x01\0\0\0\x01a"])
def test_a_broken_idx_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(ConfigurationError, match="no idx file"):
        data.read_idx(path)
    path.write_bytes(gzip.compress(content)[:-9])
    with pytest.raises(ConfigurationError, match="not gzipped, or cut short"):
        data.read_idx(path)


def batch(images: int, label: int) -> bytes:
    """A file of CIFAR-10 as its authors' Python 2 wrote it, opcode by opcode: ``data``, uint8 (images, 3072), and ``labels``."""
    array = f"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n(I{images}\nI3072\nt"
    kind = "cnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntb"
    labels = "(l" + f"I{label}\na" * images
    return f"(dS'data'\n{array}{kind}I00\nS'{chr(65 + label) * (images * 3072)}'\ntbsS'labels'\n{labels}s.".encode()


def test_cifar10_is_unpacked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(data.VARIABLE, str(tmp_path))
    monkeypatch.setattr(data, "CHECKOUT", tmp_path)
    monkeypatch.setattr(data, "_cifar10", data._cifar10.__wrapped__)
    archive = tmp_path / data.CIFAR_FILE
    archive.parent.mkdir()
    with tarfile.open(archive, "w:xz") as made:
        for name in ("readme.html", *(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
            content = b"words" if name == "readme.html" else batch(2, 0 if name == "test_batch" else int(name[-1]))
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    images = data.cifar10(train=7)
    archive.unlink()
    again = data.cifar10(train=7)
    for found in (images, again):
        assert found.train_y.tolist() == [1, 1, 2, 2, 3, 3, 4] and found.test_y.tolist() == [0, 0]
        assert found.train_x.shape == (7, 3, 32, 32) and found.train_x[6, 0, 0, 0] == pytest.approx((69 / 255 - 0.4914) / 0.2470, rel=1e-4)


@pytest.mark.parametrize("name", ["os system", "builtins eval", "numpy fromfile", "numpy.core.multiarray scalar"])
def test_a_data_file_runs_nothing(name: str) -> None:
    program = f"c{name.replace(' ', chr(10))}\n(S'true'\ntR.".encode()
    with pytest.raises(ConfigurationError, match="a data file asks for " + name.replace(" ", ".")):
        data.load_arrays(io.BytesIO(program))
