"""The whole job files of docs/sites.md, by their names on that page."""

import tomllib

from tests.support.pages import ROOT, blocks
from trainer.config import Job
from trainer.config.loader import job_from_table

PAGE = ROOT / "docs" / "sites.md"


def site_jobs() -> dict[str, Job]:
    """Jobs by the names of their files, without the ending."""
    texts = {block.mark[1]: "\n".join(block.lines) for block in blocks(PAGE) if block.mark[0] == "file"}
    return {
        name.removesuffix(".toml"): job_from_table(tomllib.loads(text), name) for name, text in texts.items()
    }
