"""Folders of an image that no mount may hide. Pure."""

import posixpath
from pathlib import PurePosixPath

_OWN = ("/opt/clipship", "/usr", "/etc", "/bin", "/sbin", "/lib", "/lib64", "/dev", "/proc", "/sys")


def hidden_by(path: str) -> str:
    """Returns the folder of the image that a mount at the path would hide; "" if there is none."""
    place = PurePosixPath(posixpath.normpath(f"/{path.lstrip('/')}"))
    if place.is_relative_to("/proc"):
        return "/proc"
    return next((own for own in _OWN if PurePosixPath(own).is_relative_to(place)), "")
