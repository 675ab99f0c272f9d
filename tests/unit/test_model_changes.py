"""Keys that change a model's config: size of images, length of captions, dropped patches, preprocessing."""

import pytest

from tests.support.check import problems
from tests.support.jobs import tiny_job


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("image_size=0", "model.image_size"),
        ("image_size=[32]", "model.image_size"),
        ("patch_dropout=1.0", "model.patch_dropout"),
        ("context_length=0", "model.context_length"),
        ("image_std=[0.1, 0.0, 0.1]", "three numbers above 0"),
        ("image_mean=[0.1]", "model.image_mean"),
        ("image_size=32", ""),
        ("image_size=[32, 64]", ""),
    ],
)
def test_wrong_values_are_refused(value: str, message: str) -> None:
    said = problems(tiny_job(), f"--set=model.{value}")
    assert message in said
    assert bool(said) == bool(message)
