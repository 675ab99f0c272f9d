"""Finds the likely cause of a failed build in the output of the failing step. Pure."""

import re

_DISK = "the daemon's disk is full; `docker system prune` frees what is unused"
_MEMORY = "too little memory for the compilers: give the machine 4 GB a core"
_CERTIFICATE = (
    "the site's own certificate authority is not known in the build: name its file in image.site.certificates"
)
_NETWORK = (
    "the build reaches no network: image.site.index_url and image.site.apt_mirror name mirrors, "
    "image.site.wheelhouse needs none"
)
_HASHES = (
    "the index gave another file than the one that was pinned; a mirror that rebuilds packages cannot be used"
)
_WHEEL = (
    "the index or the wheelhouse lacks a package for this Python: see `clipship stacks explain` and "
    "`clipship image wheelhouse`"
)
_PACKAGE = "the base's distribution has no such package: look at image.apt_packages and image.os"
_NEW_COMPILER = (
    "nvcc refuses a g++ that new: `clipship stacks explain` names the limit; take a base with an older one"
)
_OLD_COMPILER = "the C++ compiler is too old for this torch: it needs g++ 11"
_BASE = "the base image is not on this machine and cannot be pulled: look at image.base"
_REGISTRY = (
    "the daemon does not trust the registry's certificate: its authority belongs into "
    "/etc/docker/certs.d/HOST/ca.crt"
)
_CONFLICT = (
    "image.pip_packages ask for another version of a package than the stack pins: what pip says names both"
)
_SECOND = (
    "image.pip_packages bring a Horovod or an NCCL of their own, and the image would have two: what pip "
    "says names the package"
)
_GONE = (
    "the package archive has no such file: it is being updated (try again later), or "
    "image.site.apt_mirror is a wrong address"
)
_CREDENTIALS = (
    "the mirror or the index wants a password: image.site.apt_auth and image.site.pip_conf name files with it"
)
_GIT = 'a package of image.pip_packages comes by git: image.apt_packages = ["git"]'
_NO_ARCHIVE = (
    "image.site.apt_mirror is no archive of the base's distribution: look at the address and at image.os"
)
_BUILDKIT = 'this Dockerfile has secrets: build it with image.builder = "buildkit" or "auto"'

_STEP = re.compile(r"^(?:Step \d+/\d+ : |#\d+ \[| > \[)", re.MULTILINE)
"""First line of a step, as printed by the classic builder, by BuildKit, or in BuildKit's excerpt of the
failed step."""

# The first match counts: pip also ends with "no matching distribution" if it could not reach an index.
_CAUSES = (
    (r"x509: ", _REGISTRY),
    (
        (
            r"pull access denied|manifest unknown|repository does not exist|No such image"
            r"|(?:Get|Head) \"https?://[^\"]*/v2/"
        ),
        _BASE,
    ),
    (r"proof: FAILED: (.*)", r"what was built is not what the stack says: \1"),
    (r"No space left on device", _DISK),
    (r"\bKilled\b|[Cc]annot allocate memory|code: 137", _MEMORY),
    (
        r"CERTIFICATE_VERIFY_FAILED|[Cc]ertificate verif|SSL certificate problem|unable to get local issuer",
        _CERTIFICATE,
    ),
    (r"Temporary failure|NewConnectionError|Could not connect|Unable to connect|[Nn]o such host", _NETWORK),
    (r"Connection (?:timed out|refused)|Network is unreachable|Read timed out", _NETWORK),
    (r"\(constraint\) (?:horovod|nvidia-nccl-cu\d+)<0", _SECOND),
    (r"404 +Not Found|Unable to fetch some archives", _GONE),
    (r"does not have a Release file", _NO_ARCHIVE),
    (r"\b401\b.{0,40}(?:Unauthorized|Credentials|Error)|403 +Forbidden", _CREDENTIALS),
    (r"Cannot find command 'git'", _GIT),
    (r"ResolutionImpossible|conflicting dependencies", _CONFLICT),
    (r"DO NOT MATCH THE HASHES", _HASHES),
    (r"No matching distribution found|Could not find a version", _WHEEL),
    (r"Unable to locate package|has no installation candidate|E: Version .* was not found", _PACKAGE),
    (r"(?m)^(?:#\d+ )?(?:[\d.]+ )?base: (its .*)", r"the base does not fit: \1"),
    (r"(?m)^(?:#\d+ )?(?:[\d.]+ )?(the base has an MPI of its own: .*)", r"\1"),
    (r"unsupported GNU version", _NEW_COMPILER),
    (r"C\+\+20 or later|strong_ordering", _OLD_COMPILER),
    (r"--mount option requires BuildKit", _BUILDKIT),
)


def likely_cause(output: str) -> str | None:
    """Returns the likely cause from the output of the last step, which failed.

    Returns None if nothing in it is known.
    """
    begin = max((found.start() for found in _STEP.finditer(output)), default=0)
    for pattern, cause in _CAUSES:
        found = list(re.finditer(pattern, output[begin:]))
        if found:
            return found[-1].expand(cause)
    return None
