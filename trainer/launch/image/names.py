"""An image's name as other tools write it. Pure."""


def for_enroot(reference: str) -> str:
    """enroot and pyxis write the registry's host apart from the name: HOST#NAME."""
    host, slash, name = reference.partition("/")
    return f"{host}#{name}" if slash and ("." in host or ":" in host or host == "localhost") else reference
