"""Folders on the node's own disk: only one that this user alone can enter is used."""

import os
import tempfile
from pathlib import Path

import pytest

from tests.support.jobs import tiny_job
from trainer.errors import MachineError
from trainer.launch import local
from trainer.model.compile import keep_kernels
from trainer.sysinfo import user_cache


def own(disk: Path) -> Path:
    return disk / f"clipship-{os.geteuid()}"


def test_the_folder_is_made_for_this_user_alone_and_found_again(tmp_path: Path) -> None:
    folder = user_cache.node_cache("kernels", (tmp_path,))
    assert folder == own(tmp_path) / "kernels"
    assert own(tmp_path).stat().st_mode & 0o777 == 0o700
    assert user_cache.node_cache("kernels", (tmp_path,)) == folder


@pytest.mark.parametrize("trap", ["link", "file", "open", "missing disk"])
def test_a_folder_that_another_may_have_made_is_passed_over(tmp_path: Path, trap: str) -> None:
    bad, good, elsewhere = (tmp_path / name for name in ("bad", "good", "elsewhere"))
    good.mkdir()
    elsewhere.mkdir(mode=0o700)
    if trap != "missing disk":
        bad.mkdir()
    if trap == "link":
        own(bad).symlink_to(elsewhere)
    elif trap == "file":
        own(bad).touch()
    elif trap == "open":
        own(bad).mkdir()
        own(bad).chmod(0o777)
    assert user_cache.node_cache("kernels", (bad, good)) == own(good) / "kernels"
    assert user_cache.node_cache("kernels", (bad,)) is None
    assert list(elsewhere.iterdir()) == []


def test_the_folder_of_temporary_files_is_looked_for_when_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    looked_in: list[str] = []
    private = user_cache.private_folder

    def elsewhere(place: Path) -> Path:
        if place == Path("/var/tmp"):
            raise PermissionError(place)
        return private(place)

    monkeypatch.setattr(user_cache, "private_folder", elsewhere)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: looked_in)
    assert user_cache.node_cache("kernels") is None
    looked_in.append(str(tmp_path))
    assert user_cache.node_cache("kernels") == own(tmp_path) / "kernels"


def test_a_machine_without_a_folder_for_temporary_files_is_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    with pytest.raises(MachineError, match=r"no temporary folder can be made.*TMPDIR"):
        local.start_ranks(["true"], tiny_job(), nproc=1, hosts=None)


def test_kernels_are_kept_there_unless_the_environment_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_cache = user_cache.node_cache
    monkeypatch.setattr("trainer.model.compile.node_cache", lambda name: node_cache(name, (tmp_path,)))
    env: dict[str, str] = {}
    folder = own(tmp_path) / "kernels"
    assert keep_kernels(env) == str(folder)
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    assert env == kept
    given = {"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}
    assert keep_kernels(given) == "/elsewhere"
    assert given == {"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}


@pytest.mark.parametrize("trap", ["link", "open", "no home"])
def test_a_cache_in_which_others_may_write_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    folder = user_cache.user_cache("search")
    assert folder == tmp_path / ".cache" / "clipship" / "search"
    folder.mkdir(mode=0o700, parents=True)
    assert user_cache.user_cache("search") == folder
    if trap == "link":
        folder.rename(tmp_path / "other")
        folder.symlink_to(tmp_path / "other")
    elif trap == "open":
        folder.chmod(0o777)
    else:
        monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    assert user_cache.user_cache("search") is None
