"""Finds the likely cause of a failed build in the output of the failing step. Pure."""

import re

_DISK = "the daemon's disk is full; `docker system prune` deletes unused data"
_MEMORY = "too little memory for the compilers: the machine needs 4 GB for each core"
_CERTIFICATE = (
    "the build does not know the site's certificate authority: name its file in image.site.certificates"
)
_NETWORK = (
    "the build has no network: image.site.index_url and image.site.apt_mirror name mirrors; with "
    "image.site.wheelhouse no index is needed"
)
_HASHES = "a file from the index differs from the pinned one; a mirror that rebuilds packages cannot be used"
_WHEEL = (
    "the index or the wheelhouse lacks a package for this Python: see `clipship stacks explain` and "
    "`clipship image wheelhouse`"
)
_PACKAGE = "the base's distribution has no such package: check image.apt_packages and image.os"
_NEW_COMPILER = (
    "g++ is too new for nvcc: `clipship stacks explain` names the limit; use a base with an older g++"
)
_OLD_COMPILER = "the C++ compiler is too old for this torch: it needs g++ 11"
_BASE = "the base image is not on this machine and cannot be pulled: check image.base"
_REGISTRY = (
    "the daemon does not trust the registry's certificate: its authority belongs in "
    "/etc/docker/certs.d/HOST/ca.crt"
)
_CONFLICT = (
    "image.pip_packages needs another version of a package than the stack pins: pip's message names both"
)
_SECOND = (
    "image.pip_packages brings a second Horovod or NCCL, but an image has exactly one: pip's message "
    "names the package"
)
_GONE = (
    "the package archive has no such file: it is being updated (try again later), or "
    "image.site.apt_mirror is a wrong address"
)
_CREDENTIALS = (
    "the mirror or the index needs a password: image.site.apt_auth and image.site.pip_conf name files with it"
)
_GIT = 'pip installs a package of image.pip_packages with git: set image.apt_packages = ["git"]'
_NO_ARCHIVE = (
    "image.site.apt_mirror is not an archive of the base's distribution: check the address and image.os"
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
    (r"self-test: FAILED: (.*)", r"the image differs from its stack: \1"),
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
    (r"(?m)^(?:#\d+ )?(?:[\d.]+ )?base: (its .*)", r"the base cannot be used: \1"),
    (r"(?m)^(?:#\d+ )?(?:[\d.]+ )?(the base has an MPI of its own: .*)", r"\1"),
    (r"unsupported GNU version", _NEW_COMPILER),
    (r"C\+\+20 or later|strong_ordering", _OLD_COMPILER),
    (r"--mount option requires BuildKit", _BUILDKIT),
)


def likely_cause(output: str) -> str | None:
    """Returns the likely cause from the output of the last step, which failed.

    Returns None if nothing in it is known.
    """
    begin = max((match.start() for match in _STEP.finditer(output)), default=0)
    for pattern, cause in _CAUSES:
        matches = list(re.finditer(pattern, output[begin:]))
        if matches:
            return matches[-1].expand(cause)
    return None
