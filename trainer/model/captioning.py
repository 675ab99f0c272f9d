"""The part of CoCa's loss for captions (arXiv 2205.01917): the model also writes them.

At each place the model sees the image and the caption so far. The loss is the cross-entropy of the next
token, as the mean over all tokens of the global batch but padding. As the contrastive losses, it is cut into
shares that add up: a micro-batch's share is its own sum, divided by the number of tokens of all ranks.
"""

from collections.abc import Sequence

import torch
from open_clip.coca_model import CoCa
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.comm.protocol import Comm


def writes_captions(model: nn.Module) -> bool:
    """Returns whether the model is one of open_clip's CoCa models."""
    return isinstance(model, CoCa)


def padding_id(model: nn.Module) -> int:
    """Returns the id of the tokens behind a caption's end; a text tower from a hub has its own."""
    config = getattr(model.get_submodule("text"), "config", None)
    found = getattr(config, "pad_token_id", None)
    return int(model.pad_id if found is None else found)  # type: ignore[arg-type]  # nn.Module's __getattr__


def written_tokens(comm: Comm, tokens: Sequence[Tensor], padding: int) -> Tensor:
    """Collective: returns the number of tokens that the captions of all ranks have to be written, a scalar.

    `tokens` are those of this rank's micro-batches, int64 [B, L]. The first token is given.
    """
    own = torch.stack([(part[:, 1:] != padding).sum() for part in tokens]).sum()
    return comm.all_reduce(own[None].double())[0]


def caption_share(written: Tensor, tokens: Tensor, padding: int, total: Tensor) -> Tensor:
    """Returns a micro-batch's share of the mean cross-entropy over `total` tokens, a scalar.

    `written` are logits [B, L - 1, vocabulary], computed from tokens [B, L], int64.
    """
    wide = written if written.dtype == torch.float64 else written.float()
    summed = F.cross_entropy(
        wide.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=padding, reduction="sum"
    )
    return summed / total.to(summed.dtype).clamp(min=1)


def initialise_decoder(model: nn.Module) -> None:
    """Gives random values to the one matrix of a CoCa model that open_clip 3.3 leaves undefined.

    It is the decoder's last one, from its width to the vocabulary; the values are as in open_clip's towers.
    """
    if writes_captions(model):
        projection = model.get_parameter("text_decoder.text_projection")
        nn.init.normal_(projection, std=projection.shape[0] ** -0.5)
