"""Turns pictures and texts into features with a trained model, as an evaluation does."""

import os
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from trainer.checkpoint.weights import with_loss_alone
from trainer.comm.device import rank_device
from trainer.config import Job
from trainer.errors import InputError
from trainer.evaluate.features import finite, image_features, text_features
from trainer.model.build import build_alone
from trainer.model.loading import check_hub_weights
from trainer.search.index import Embedded, Features, Picture, PictureFolder
from trainer.world.launchers import World

MOST_THREADS = 16
"""Threads that read and decode pictures at once; on large machines the model is slower than these."""
NARROWEST = 100
"""Largest ratio of a picture's sides. A strip of one pixel would become gigabytes when its shorter side is
resized to the model's."""


class SearchModel:
    """Implements `trainer.search.index.Model` with a trained model.

    It is on this machine's GPU, or on the CPU if torch can use none.
    """

    def __init__(self, job: Job) -> None:
        """Raises InputError if the weights cannot be used."""
        self._job = with_loss_alone(job)
        self._device = rank_device(self._job, World(0, 1, 0, 1, os.uname().nodename, "search"), {})
        self._clip = build_alone(self._job, self._device)
        check_hub_weights(self._job)
        self._clip.model.eval()
        self._one_at_a_time = threading.Lock()

    def features_of_text(self, text: str) -> Features:
        with self._one_at_a_time, torch.no_grad():
            tokens = self._clip.tokenizer([text])
            features = _host(text_features(self._clip, tokens, self._job.model.precision, self._device))
        vector: Features = features[0]
        return vector

    def features_of_pictures(
        self, folder: PictureFolder, pictures: Sequence[Picture]
    ) -> Generator[Embedded, None, None]:
        # threads decode the next block of pictures while one passes the model
        size = self._job.eval.batch_size
        pool = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))
        waiting: deque[list[tuple[Picture, Future[Tensor | str]]]] = deque()
        try:
            for first in range(0, len(pictures), size):
                waiting.append(
                    [
                        (picture, pool.submit(self._pixels, folder, picture))
                        for picture in pictures[first : first + size]
                    ]
                )
                if len(waiting) > 1:
                    yield from self._embedded(waiting.popleft())
            for block in waiting:
                yield from self._embedded(block)
        finally:
            pool.shutdown(cancel_futures=True)

    def _embedded(self, block: Sequence[tuple[Picture, Future[Tensor | str]]]) -> Iterator[Embedded]:
        decoded = [(picture, pixels.result()) for picture, pixels in block]
        images = [pixels for _, pixels in decoded if isinstance(pixels, Tensor)]
        features = iter(self._features(torch.stack(images)) if images else ())
        for picture, pixels in decoded:
            yield picture, pixels if isinstance(pixels, str) else next(features)

    def _features(self, images: Tensor) -> Features:
        with torch.no_grad():
            return _host(image_features(self._clip, images, self._job.model.precision, self._device))

    def _pixels(self, folder: PictureFolder, picture: Picture) -> Tensor | str:
        """Returns the picture as the model takes it, float32 [3, H, W]; or why it cannot be used."""
        try:
            shown = folder.decoded(picture.name)
        except InputError as problem:
            return str(getattr(problem, "what", problem))
        if max(shown.size) > NARROWEST * min(shown.size):
            return f"it has {shown.width} x {shown.height} pixels, which is too narrow for a model"
        return self._clip.eval_transform(shown)


def _host(features: Tensor) -> Features:
    vectors: Features = finite(features).float().cpu().numpy()
    return vectors
