"""The ranks' shares of a loss against open_clip's own loss on the whole batch."""

import open_clip
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from trainer.model.loss import SHARES, Gathered

REFERENCES = {"clip": open_clip.loss.ClipLoss(), "siglip": open_clip.loss.SigLipLoss()}


def _batch(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    image, text = (
        normalize(torch.randn(samples, 8, generator=generator, dtype=torch.float64), dim=1) for _ in range(2)
    )
    return image, text


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_shares_of_all_ranks_add_up_to_the_loss_of_the_whole_batch(kind: str, ranks: int) -> None:
    image, text = _batch(12)
    scale, bias = (
        torch.tensor(7.5, dtype=torch.float64),
        torch.tensor(-3.0, dtype=torch.float64) if kind == "siglip" else None,
    )
    own = 12 // ranks
    shares = [
        SHARES[kind](
            Gathered(image[first : first + own], image),
            Gathered(text[first : first + own], text),
            scale,
            bias,
            first,
        )
        for first in range(0, 12, own)
    ]
    expected = (
        REFERENCES[kind](image, text, scale) if bias is None else REFERENCES[kind](image, text, scale, bias)
    )
    torch.testing.assert_close(torch.stack(shares).sum(), expected, rtol=1e-12, atol=0)


def test_siglip_without_a_bias_is_refused() -> None:
    image, text = _batch(2)
    with pytest.raises(ValueError, match="logit bias"):
        SHARES["siglip"](Gathered(image, image), Gathered(text, text), torch.tensor(1.0), None, 0)
