"""The format of every log that people read, apart from `terminal`: a command without a log imports none."""

import logging

from trainer.text.terminal import shown


class ShownFormatter(logging.Formatter):
    """Formatter of every log that people read, on the console and in files."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record's text as `shown` does."""
        return shown(super().format(record))
