"""The name of an image as other tools write it. Pure."""


def for_enroot(reference: str) -> str:
    """Returns the name for enroot and pyxis, which separate the registry's host: HOST#NAME."""
    host, slash, name = reference.partition("/")
    return f"{host}#{name}" if slash and ("." in host or ":" in host or host == "localhost") else reference
