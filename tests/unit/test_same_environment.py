"""Comparison of the ranks' environments at the start.

Only differences are named, with the ranks that have them.
"""

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.jobs import tiny_job
from trainer.comm.protocol import Comm
from trainer.errors import InputError
from trainer.train.same_environment import check_same, code_hash, differences


def test_only_what_differs_is_named_with_the_odd_ranks_and_their_nodes() -> None:
    usual = {"torch": "2.14.1", "code": "abc"}
    odd = {**usual, "torch": "2.13.0"}
    assert list(differences([("n0", usual), ("n0", usual)])) == []
    everyone = [("n0", usual), ("n0", usual), ("n1", odd), ("n2", odd), ("n3", usual)]
    assert list(differences(everyone)) == ["  torch: 2.14.1 on 3 of 5 ranks, 2.13.0 on ranks 2, 3 (n1, n2)"]


def test_what_is_missing_on_a_rank_differs() -> None:
    everyone = [("n0", {"variable NCCL_ALGO": "Ring"}), ("n0", {"variable NCCL_ALGO": "Ring"}), ("n1", {})]
    assert list(differences(everyone)) == [
        "  variable NCCL_ALGO: Ring on 2 of 3 ranks, missing on rank 2 (n1)"
    ]


def test_code_differs_when_a_line_or_a_name_does(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    first = code_hash(tmp_path)
    assert code_hash(tmp_path) == first
    (tmp_path / "a.py").write_text("x = 2\n")
    second = code_hash(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, code_hash(tmp_path)}) == 3


def test_a_process_that_is_not_what_its_image_promises_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: Comm
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert check_same(tiny_job(), alone) == ""
    torch = version("torch").partition("+")[0]
    (tmp_path / "stack.json").write_text(json.dumps({"torch": torch, "nccl": "2.30.7"}))
    assert check_same(tiny_job(), alone) == ""
    (tmp_path / "stack.json").write_text(json.dumps({"torch": "2.1.0"}))
    message = f"their image was built and verified with:\n  torch {torch}, the image has 2.1.0: rank 0"
    with pytest.raises(InputError, match=re.escape(message)):
        check_same(tiny_job(), alone)
    assert message in check_same(tiny_job(health={"same_environment": "warn"}), alone)
    assert check_same(tiny_job(health={"same_environment": "off"}), alone) == ""
