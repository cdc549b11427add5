"""The job's secret: where it comes from, and when it is refused; and how tasks of one machine get one by themselves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from offbeat.errors import ConfigurationError
from offbeat.launch import private_folder
from offbeat.launch.rendezvous import Meeting
from offbeat.launch.tasks import Task, task_of
from offbeat.launch.token import given_token
from offbeat.transport.addresses import loopback
from offbeat.transport.base import Address

SECRET = "0123456789abcdef"
SHOWS = """
import os, signal, subprocess, sys
before = open("/proc/self/environ").read()
import offbeat
from offbeat.runtime.job.settings import known_token
def of(pid):
    return open(f"/proc/{pid}/environ").read()
pid = os.fork()
if pid == 0:
    signal.pause()
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
texts = [before, of("self"), of(pid), of(child.pid)]
os.kill(pid, 9)
child.communicate(b"\\n")
print(*(known_token() in text for text in texts), "OFFBEAT_TOKEN=---" in texts[1], os.environ["AFTER"], "AFTER=it" in texts[1])
"""
ALONE = Task(engine="Open MPI", rank=0, size=2, local_size=2, job="one")


def test_the_token_is_erased_from_what_the_system_shows_of_a_process() -> None:
    """Before the import it is there. Not after: of the process itself, of a fork, of a child."""
    environment = {**os.environ, "BEFORE": "it", "OFFBEAT_TOKEN": SECRET, "AFTER": "it"}
    done = subprocess.run([sys.executable, "-c", SHOWS], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "False", "False", "True", "it", "True"], done.stderr


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    return path


def test_where_it_comes_from(file: Path) -> None:
    environment = {"OFFBEAT_TOKEN": "f" * 16}
    assert given_token(environment=environment) == "f" * 16
    assert environment == {}, "children do not inherit it"
    assert given_token(environment=environment) is None
    assert given_token(environment={"OFFBEAT_TOKEN_FILE": str(file)}) == SECRET
    assert given_token(file, {"OFFBEAT_TOKEN": "f" * 16}) == SECRET


def test_the_variable_of_a_command_as_it_is_typed() -> None:
    """The package takes the variable out of the environment when it is imported."""
    program = "from offbeat.launch.token import given_token; import os; print(given_token(), 'OFFBEAT_TOKEN' in os.environ)"
    environment = {**os.environ, "OFFBEAT_TOKEN": SECRET}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == f"{SECRET} False\n"


def test_a_file_that_others_can_read(file: Path) -> None:
    file.chmod(0o640)
    with pytest.raises(ConfigurationError, match=f"--token-file {file}: other users may read or write it .mode 640.; type: chmod 600"):
        given_token(file, {})


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"OFFBEAT_TOKEN_FILE=.*nowhere: cannot read it .* make one: openssl rand -hex 16 >"):
        given_token(environment={"OFFBEAT_TOKEN_FILE": str(tmp_path / "nowhere")})


@pytest.mark.parametrize("token", ["", "short"])
def test_a_token_that_can_be_guessed(token: str, file: Path) -> None:
    file.write_text(token)
    with pytest.raises(ConfigurationError, match=f"the token has {len(token)} characters, and needs at least 16"):
        given_token(file, {})
    with pytest.raises(ConfigurationError, match="OFFBEAT_TOKEN: the token has"):
        given_token(environment={"OFFBEAT_TOKEN": token})


def test_tasks_of_one_machine_agree_on_a_new_token(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    found: list[str] = []
    tasks = [threading.Thread(target=lambda: found.append(Meeting(ALONE, folder=folder).token(None))) for _ in range(8)]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    assert len(set(found)) == 1 and len(found[0]) == 32
    assert folder.stat().st_mode & 0o077 == 0
    Meeting(ALONE, folder=folder).done()
    assert Meeting(ALONE, folder=folder).token(None) != found[0], "the next job has another"


def test_a_folder_that_is_a_link_is_not_trusted(tmp_path: Path) -> None:
    """Whoever made the link can turn it to another folder after it was looked at."""
    (tmp_path / "mine").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "mine")
    for ask in (lambda: Meeting(ALONE, folder=link).token(None), Meeting(ALONE, folder=link).find):
        with pytest.raises(ConfigurationError, match="links are not followed"):
            ask()
    assert not list((tmp_path / "mine").iterdir())


def test_another_folder_in_place_of_the_private_one_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the name between the look at the folder and the token in it."""
    folder, other = tmp_path / "private", tmp_path / "other"
    token = Meeting(ALONE, folder=folder).token(None)
    [file] = folder.iterdir()
    checked = private_folder._checked

    def then_replaced(path: Path) -> int:
        descriptor = checked(path)
        folder.rename(tmp_path / "away")
        other.mkdir(mode=0o700)
        (other / file.name).write_text("0" * 32)
        folder.symlink_to(other)
        return descriptor

    monkeypatch.setattr(private_folder, "_checked", then_replaced)
    assert Meeting(ALONE, folder=folder).token(None) == token


def test_several_machines_need_a_token() -> None:
    task = task_of(nnodes="2", endpoint="node0", environment={})
    with pytest.raises(ConfigurationError, match="the job has several machines, and they need a common secret: type once"):
        Meeting(task).token(None)
    assert Meeting(task).token(SECRET) == SECRET


def test_on_one_machine_torchruns_store_is_not_asked(tmp_path: Path) -> None:
    """Its client is part of PyTorch, which no agent needs: nobody listens at this store's port."""
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    task = task_of(environment={**variables, "TORCHELASTIC_RUN_ID": "run"})
    assert task.store is not None and task.alone
    first, other = Meeting(task, folder=tmp_path / "private"), Meeting(task, folder=tmp_path / "private")
    address = Address("", ("127.0.0.1", 4711), "")
    first.publish(address)
    assert other.find() == address
    other.begin()
    assert first.find() is None, "what an earlier job has left is forgotten"
    apart = task_of(environment={**variables, "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "run"})
    assert not Meeting(apart, folder=tmp_path / "private")._by_file


def test_on_one_machine_the_supervisor_is_where_it_listens_whatever_the_engine_calls_the_machine() -> None:
    ranks = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "node0"}
    apart, alone = task_of(environment=ranks), task_of(environment={**ranks, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert Meeting(apart).find() == Address("", ("node0", 29400), "")
    assert Meeting(alone).find() == Address("", (loopback(), 29400), "")
    assert Meeting(alone, listen="::").find() == Address("", (loopback(), 29400), "")
    assert Meeting(alone, listen="10.0.0.5").find() == Address("", ("10.0.0.5", 29400), "")


def test_tasks_of_one_machine_find_the_supervisor(tmp_path: Path) -> None:
    meeting = Meeting(ALONE, folder=tmp_path / "private")
    assert meeting.token(SECRET) == SECRET  # makes no folder
    assert meeting.find() is None
    address = Address("host", ("127.0.0.1", 4321), "name")
    meeting.publish(address)
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o700
    assert Meeting(ALONE, folder=tmp_path / "private").find() == address
    meeting.done()
    assert meeting.find() is None and list((tmp_path / "private").iterdir()) == []
