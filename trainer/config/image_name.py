"""The name of an image, in its parts and as other tools write it. Pure."""


def for_enroot(reference: str) -> str:
    """Returns the name for enroot and pyxis, which separate the registry's host: HOST#NAME."""
    host, name = _parts(reference)
    return f"{host}#{name}" if host else reference


def full_name(reference: str) -> str:
    """Returns the name with its registry, which is docker.io if none is given, as Docker means it."""
    host, name = _parts(reference)
    return f"{host or 'docker.io'}/{name if host or '/' in name else f'library/{name}'}"


def registry_host(reference: str) -> str:
    """Returns the host of the name's registry, without a port and brackets."""
    host = _parts(full_name(reference))[0]
    return (host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host).strip("[]")


def bare_name(reference: str) -> str:
    """Returns the name without its tag and digest."""
    tagged = reference.partition("@")[0]
    name, colon, tag = tagged.rpartition(":")
    return name if colon and "/" not in tag else tagged


def _parts(reference: str) -> tuple[str, str]:
    """Returns the registry's host with its port, "" if the name has none, and the rest."""
    host, slash, name = reference.partition("/")
    has_host = slash and ("." in host or ":" in host or host == "localhost")
    return (host, name) if has_host else ("", reference)
