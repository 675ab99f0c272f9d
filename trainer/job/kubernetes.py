"""`[kubernetes]`: what the MPIJob asks for beside `[resources]`."""

import re

from pydantic import field_validator

from trainer.job.fields import Section, Text

_DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class Kubernetes(Section):
    """What the MPIJob asks for beside [resources]. Rendering it comes in a later release."""

    namespace: Text | None = None
    """None: the namespace that kubectl's context names."""

    @field_validator("namespace")
    @classmethod
    def _a_dns_label(cls, value: str | None) -> str | None:
        if value is not None and not _DNS_LABEL.fullmatch(value):
            raise ValueError(f'"{value}" is no namespace; expected at most 63 of a-z, 0-9 and "-", with no "-" at the ends (RFC 1123)')
        return value
