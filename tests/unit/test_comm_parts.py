"""Ranks meet and part, and nothing that they send each other changes or is executed."""

import json
import math
import pickle
import re
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.torch_version import TorchVersion

from tests.support.jobs import tiny_job
from tests.support.thread_ranks import run_ranks
from trainer.comm import reach, torch_backend
from trainer.comm.buckets import buckets_of
from trainer.comm.objects import decode, encode
from trainer.comm.protocol import Comm
from trainer.comm.replicas import ReplicaError, check_replicas
from trainer.errors import InputError, MachineError, Preempted, StorageError, decode_error, encode_error
from trainer.sysinfo.addresses import free_port
from trainer.train.same_environment import check_same, code_hash, differences
from trainer.world.launchers import World


def failing(monkeypatch: pytest.MonkeyPatch, number: int, times: int) -> list[str]:
    asked: list[str] = []

    def getaddrinfo(host: str, *_: object, **__: object) -> None:
        asked.append(host)
        if len(asked) <= times:
            raise socket.gaierror(number, "why")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    return asked


@pytest.mark.parametrize(
    ("number", "times", "limit_s", "asks"),
    [
        (socket.EAI_AGAIN, 3, 60.0, 4),
        (socket.EAI_AGAIN, 10**9, 0.01, None),
        (socket.EAI_NONAME, 10**9, 60.0, 1),
    ],
    ids=["for a while", "for long", "no such name"],
)
def test_a_name_server_that_fails_is_asked_again_and_a_name_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch, number: int, times: int, limit_s: float, asks: int | None
) -> None:
    asked = failing(monkeypatch, number, times)
    monkeypatch.setattr(reach, "RESOLVE_S", limit_s)
    if times == 3:
        reach.check_resolvable("node", 1)
    else:
        with pytest.raises(InputError, match="MASTER_ADDR = 'node' cannot be resolved"):
            reach.check_resolvable("node", 1)
    assert asks in (None, len(asked))


@pytest.mark.parametrize("release", ["2.6.0+cu124", "2.7.1", "2.8.0", torch.__version__])
def test_rank_0_serves_with_a_backend_that_takes_an_open_socket(
    monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    """torch before 2.8 has one that does not, and takes it unless it is told otherwise."""
    port = free_port("127.0.0.1")
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch, "__version__", TorchVersion(release))
    with ThreadPoolExecutor() as other:
        wait = timedelta(seconds=20)
        client = other.submit(lambda: TCPStore("127.0.0.1", port, 2, is_master=False, timeout=wait))
        served = torch_backend._store(World(0, 2, 0, 2, "here", "test"), 20.0)
    assert isinstance(served, TCPStore)
    assert getattr(served, "libuvBackend") == (not release.startswith(("2.6", "2.7")))  # noqa: B009 - untyped
    client.result().set("key", "value")
    assert served.get("key") == b"value"


# Objects that ranks send each other arrive unchanged, and nothing that arrives is executed.


def test_values_come_back_as_they_were() -> None:
    values: list[Any] = [None, True, 0.1, math.inf, 2**70, "line\n\0é", "file-\udcff", [], (1, (2.5, [None]))]
    values += [{"state": {0: {"step": 3.0}}, (1, "a"): ["x"]}, {"tuple": 1, "mapping": 2}]
    assert repr(decode(encode(values))) == repr(values)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", torch.zeros(1), Path()])
def test_an_object_that_is_no_plain_value_is_refused_at_the_sender(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent to other ranks"):
        encode([value])


class Touch:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_a_pickle_is_not_executed(tmp_path: Path) -> None:
    message = torch.frombuffer(bytearray(pickle.dumps(Touch(tmp_path / "ran"))), dtype=torch.uint8)
    with pytest.raises(ValueError, match="a message that no rank sends"):
        decode(message)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"other": 1}', '{"mapping": [[[], 1]]}', "{", '{"mapping": 7}']
)
def test_bytes_that_no_rank_sends_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a message that no rank sends"):
        decode(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))


@pytest.mark.parametrize("kind", [InputError, StorageError, MachineError, Preempted])
def test_an_error_is_the_same_on_every_rank(kind: type[Exception]) -> None:
    found = decode_error(decode(encode(encode_error(kind("two\nlines")))))
    assert type(found) is kind
    assert str(found) == "two\nlines"
    assert decode_error(encode_error(None)) is None


# Buckets: gradients of many parameters in one tensor.


def parameters_of(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def grad_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def numbers_of(buckets: list[Any], parameters: list[nn.Parameter]) -> list[list[int]]:
    places = {id(parameter): number for number, parameter in enumerate(parameters)}
    return [[places[id(parameter)] for parameter in bucket.parameters] for bucket in buckets]


def test_a_bucket_holds_at_most_so_many_bytes_or_one_parameter_and_the_last_ones_are_smaller() -> None:
    parameters = parameters_of(100, 8, 8, 8, 8, 300, 8, 8, 4, 4, 4, 4, 4)
    buckets = buckets_of(parameters, 32 * 4, None, keep=True)
    expected = [[0], [1, 2, 3, 4], [5], [6], [7, 8, 9], [10, 11], [12]]
    assert numbers_of(buckets, parameters) == expected
    assert [bucket.nbytes for bucket in buckets] == [400, 128, 1200, 32, 64, 32, 16]
    assert numbers_of(buckets_of(parameters[:3], 0, None, keep=True), parameters) == [[0], [1], [2]]


def test_a_bucket_has_one_dtype() -> None:
    parameters = [*parameters_of(2, 2), *parameters_of(2, dtype=torch.float64)]
    found = buckets_of(parameters, 1 << 20, None, keep=True)
    assert numbers_of(found, parameters) == [[0, 1], [2]]
    assert [bucket.flat().dtype for bucket in found] == [torch.float32, torch.float64]
    (halves,) = buckets_of(parameters[:2], 1 << 20, torch.float16, keep=True)
    assert halves.flat().dtype == torch.float16


@pytest.mark.parametrize("keep", [False, True])
def test_gradients_become_pieces_of_the_tensor_that_travels(keep: bool) -> None:
    parameters = parameters_of(2, 3)
    (bucket,) = buckets_of(parameters, 1 << 20, None, keep=keep)
    for step in range(2):
        for number, parameter in enumerate(parameters):
            assert not bucket.full
            parameter.grad = torch.full_like(parameter, 2.0 * (number + 1 + step))
            bucket.fill(parameter, 0.5)
        assert bucket.full
        flat = bucket.flat()
        assert flat.tolist() == [1.0 + step] * 2 + [2.0 + step] * 3
        flat.mul_(10)  # as the sum over ranks changes it
        bucket.hand_out(parameters)
        assert not bucket.full
        assert grad_of(parameters[1]).tolist() == [20.0 + 10 * step] * 3
        assert grad_of(parameters[1]).untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_in_half_precision_the_product_is_rounded_once_and_gradients_keep_their_dtype() -> None:
    parameters = parameters_of(4, 2)
    (bucket,) = buckets_of(parameters, 1 << 20, torch.float16, keep=False)
    gradient = torch.tensor([1e5, 3.14159, 1e-7, -2e5])  # the first and last are beyond fp16
    parameters[0].grad = gradient.clone()
    bucket.fill(parameters[0], 0.25)
    bucket.fill(parameters[1], 0.25)
    assert torch.equal(bucket.flat(), torch.cat([(gradient * 0.25).half(), torch.zeros(2).half()]))
    bucket.hand_out(parameters)
    assert torch.equal(grad_of(parameters[0]), (gradient * 0.25).half().float())
    assert grad_of(parameters[1]).tolist() == [0.0, 0.0]
    assert grad_of(parameters[1]).dtype == torch.float32


def test_what_no_rank_used_has_no_gradient_and_what_another_used_has_its() -> None:
    mine, others, nobodys = parameters_of(1, 1, 1)
    (bucket,) = buckets_of([mine, others, nobodys], 1 << 20, None, keep=True)
    bucket.flat().fill_(float("nan"))  # what is left of another step
    mine.grad = torch.ones_like(mine)
    bucket.fill(mine, 0.5)
    assert bucket.has(mine)
    assert not bucket.has(others)
    bucket.fill(others, 0.5)
    bucket.fill(nobodys, 0.5)
    bucket.flat().add_(torch.tensor([0.0, 7.0, 0.0]))
    bucket.hand_out([mine, others])
    assert (grad_of(mine).item(), grad_of(others).item(), nobodys.grad) == (0.5, 7.0, None)


# Ranks compare their parameters: one bit that differs is found, and rows are those of each part.

Held = tuple[str, dict[str, Tensor]]
"""The part of a rank, and its tensors by name; those called "rows" are split."""


def said(*ranks: Held) -> str:
    """What ranks say that compare these tensors; "" if they agree."""

    def rank_main(comm: Any) -> str:
        part, tensors = ranks[comm.world.rank]
        parameters = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
        shards: Any = SimpleNamespace(
            parameters=parameters, split=frozenset(["rows"]), part=part, state=lambda: tensors
        )
        try:
            check_replicas(comm, shards, torch.optim.SGD(parameters.values(), lr=0.1))
        except ReplicaError as error:
            return str(error)
        return ""

    first, *others = run_ranks(len(ranks), rank_main)
    assert others == [first] * len(others), "all ranks say the same"
    return first


def whole(tensor: Tensor) -> Held:
    return "all", {"weight": tensor}


@pytest.mark.parametrize("count", [1, 3, 1001])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_one_bit_that_differs_is_found(count: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)
    other = tensor.clone()
    raw = other.view(torch.uint8)
    for at in {0, raw.numel() // 2, raw.numel() - 1}:
        for bit in (1, 128):
            raw[at] ^= bit
            assert said(whole(tensor), whole(other), whole(tensor)).endswith("on\nrank 1: weight")
            raw[at] ^= bit
    assert said(whole(tensor), whole(other)) == ""
    if count > 1:
        assert "rank 1: weight" in said(whole(tensor), whole(tensor.flip(0))), "the same values, exchanged"


def of_rank(part: str, shared: int, rows: int, name: str = "rows") -> Held:
    return part, {"shared": torch.tensor([shared]), name: torch.tensor([rows])}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (of_rank("first", 1, 5), ""),
        (of_rank("second", 1, 6), ""),
        (of_rank("second", 2, 6), "rank 1: shared"),
        (of_rank("first", 1, 6), "rank 1: rows"),
        (of_rank("first", 1, 5, "other"), "rank 1: other, rows"),
    ],
    ids=["equal", "other rows", "other shared values", "the same rows differ", "other names"],
)
def test_ranks_agree_if_shared_values_do_and_rows_of_one_part_do(other: Held, expected: str) -> None:
    assert said(of_rank("first", 1, 5), other).partition("on\n")[2] == expected


# Comparison of the ranks' environments at the start.
# Only differences are named, with the ranks that have them.


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
