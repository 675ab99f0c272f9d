"""Clients of the hubs: what is in the cache, what a repository has, and how files of it are downloaded.

Each hub's own library does the work, with the variables that it reads in all programs. A download that was
cut off goes on, and a file counts only if its checksum is the hub's.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from trainer.config.hubs import HUBS, HubRow, hub_of, repository_of
from trainer.errors import InputError
from trainer.safe_io.atomic import write_whole
from trainer.sysinfo.extras import require

_OFFLINE = "HF_HUB_OFFLINE"
"""Variable of ranks that may ask no hub (model.offline)."""
_DEFAULT = "master"
"""Branch of ModelScope that is taken where a name has no revision."""
_BEGUN = ".clipship-files"
"""File in a folder of ModelScope's cache with the names of all that was to be downloaded."""


class HubClient(ABC):
    """One hub's library, for one repository at one revision (None: the newest)."""

    def __init__(self, name: str) -> None:
        """`name` has its hub's prefix, or none for the Hugging Face hub's. Raises InputError for no name."""
        try:
            self.repository, self.revision = repository_of(name)
        except ValueError as problem:
            raise InputError(str(problem)) from None

    @abstractmethod
    def cached(self, cache_dir: str | None, names: Sequence[str]) -> Path | None:
        """Returns the folder that the cache has; None if it has none, or if a download was cut off.

        It may lack files. Those of `names` that the repository has are there, as far as the cache knows which
        it has. Asks nobody.
        """

    @abstractmethod
    def files(self) -> list[str] | None:
        """Returns the names of the repository's files; None if the hub shows this user no such repository."""

    @abstractmethod
    def download(self, cache_dir: str | None, names: Sequence[str]) -> Path:
        """Returns the folder that has those files now."""


class HuggingFace(HubClient):
    """The Hugging Face hub by huggingface_hub, whose cache has a folder for each commit."""

    def cached(self, cache_dir: str | None, names: Sequence[str]) -> Path | None:
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            return self._snapshot(cache_dir, names, asks=False)
        except LocalEntryNotFoundError:
            return None

    def files(self) -> list[str] | None:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            return list(HfApi().list_repo_files(self.repository, revision=self.revision))
        except RepositoryNotFoundError:
            return None

    def download(self, cache_dir: str | None, names: Sequence[str]) -> Path:
        return self._snapshot(cache_dir, names, asks=True)

    def _snapshot(self, cache_dir: str | None, names: Sequence[str], *, asks: bool) -> Path:
        from huggingface_hub import snapshot_download

        # Without names it would take a cache for incomplete that lacks what nobody wants, such as a README.
        return Path(
            snapshot_download(
                self.repository,
                revision=self.revision,
                cache_dir=cache_dir,
                allow_patterns=list(names),
                local_files_only=not asks,
            )
        )


class ModelScope(HubClient):
    """ModelScope by modelscope_hub, which only a download needs: ranks find the folder without it."""

    def cached(self, cache_dir: str | None, names: Sequence[str]) -> Path | None:
        folder = self._folder(cache_dir)
        whole = folder.is_dir() and all((folder / name).is_file() for name in _begun(folder))
        return folder if whole else None

    def files(self) -> list[str] | None:
        if os.environ.get(_OFFLINE) == "1":
            raise InputError(
                f"{self.repository} of ModelScope is not in the cache, and ranks may not ask the hub "
                "(model.offline): `clipship fetch JOB` downloads it beforehand"
            )
        require("modelscope_hub")
        from modelscope_hub import HubApi
        from modelscope_hub.errors import NotExistError

        try:
            found = HubApi().list_repo_files(self.repository, "model", revision=self.revision or _DEFAULT)
        except NotExistError:
            return None
        return [file.path for file in found if not file.is_dir]

    def download(self, cache_dir: str | None, names: Sequence[str]) -> Path:
        from modelscope_hub import HubApi

        folder = self._folder(cache_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / _BEGUN, "\n".join(sorted({*_begun(folder), *names})))
        return Path(
            HubApi().download_repo(
                self.repository,
                "model",
                revision=self.revision or _DEFAULT,
                cache_dir=_modelscope_cache(cache_dir),
                local_dir=folder,
                allow_patterns=list(names),
            )
        )

    def _folder(self, cache_dir: str | None) -> Path:
        """Returns the folder in the client's own layout, in which other programs find it, too."""
        name = self.repository.replace("/", "--")
        return _modelscope_cache(cache_dir) / "models" / name / "snapshots" / (self.revision or _DEFAULT)


def _begun(folder: Path) -> list[str]:
    """Returns the files of a folder whose download has begun, here and before."""
    record = folder / _BEGUN
    return record.read_text(encoding="utf-8").splitlines() if record.is_file() else []


def _modelscope_cache(cache_dir: str | None) -> Path:
    return (
        Path(cache_dir or os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope").expanduser().absolute()
    )


CLIENTS: dict[str, type[HubClient]] = {"hf:": HuggingFace, "modelscope:": ModelScope}
"""Clients by the prefix of their row in `trainer.config.hubs`."""


def client_of(name: str) -> tuple[HubRow, HubClient]:
    """Returns the row of the hub that has a name, and its client."""
    row = hub_of(name) or HUBS[0]
    return row, CLIENTS[row.prefix](name)
