"""Buckets: gradients of many parameters in one tensor."""

import pytest
import torch
from torch import Tensor, nn

from trainer.comm.buckets import Bucket, buckets_of


def parameters_of(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def grad_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def numbers_of(buckets: list[Bucket], parameters: list[nn.Parameter]) -> list[list[int]]:
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
