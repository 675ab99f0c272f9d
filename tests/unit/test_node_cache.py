"""Folders on the node's own disk: only one that this user alone can enter is used."""

import os
import stat
from pathlib import Path

import pytest

from trainer.model import compile as compile_module
from trainer.model.compile import keep_kernels
from trainer.sysinfo.user_cache import node_cache


def own(disk: Path) -> Path:
    return disk / f"clipship-{os.geteuid()}"


def test_the_folder_is_made_for_this_user_alone_and_found_again(tmp_path: Path) -> None:
    folder = node_cache("kernels", (tmp_path,))
    assert folder == own(tmp_path) / "kernels"
    assert stat.S_IMODE(own(tmp_path).stat().st_mode) == 0o700
    (folder / "kernel").touch()
    assert node_cache("kernels", (tmp_path,)) == folder
    assert (folder / "kernel").exists()


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
    assert node_cache("kernels", (bad, good)) == own(good) / "kernels"
    assert node_cache("kernels", (bad,)) is None
    assert list(elsewhere.iterdir()) == []


def test_kernels_are_kept_there_unless_the_environment_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_module, "node_cache", lambda name: node_cache(name, (tmp_path,)))
    env: dict[str, str] = {}
    folder = own(tmp_path) / "kernels"
    assert keep_kernels(env) == str(folder)
    kept = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    assert env == kept
    given = {"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}
    assert keep_kernels(given) == "/elsewhere"
    assert given == {"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}
