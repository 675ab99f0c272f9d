"""Templates of the pages that Clipship writes or serves."""

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined


@cache  # `--watch` fills them every few seconds, which takes far less time than to compile them
def page_templates(package: str) -> Environment:
    """Returns the environment for the templates beside the modules of a package: every value is escaped."""
    return Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
