"""Context of `docker build`: the Dockerfile, Clipship's own code, the site's files.

Uses no daemon and no network.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from trainer.config import Job
from trainer.config.image import Site
from trainer.config.image_plugins import PLUGINS
from trainer.config.mirrors import Mirrors
from trainer.errors import InputError
from trainer.image.base import mirrors_of
from trainer.image.dockerfile import dockerfile
from trainer.image.source import source_files
from trainer.text.paste import word

Entry = Path | bytes


def context(job: Job) -> dict[str, Entry]:
    """Returns each file of the build context by its name there, in order.

    Raises InputError that lists what is missing.
    """
    entries = {
        "Dockerfile": dockerfile(job).encode(),
        **source_files(),
        **_site(job.image.site, mirrors_of(job)),
    }
    return entries | _archives(job)


def check_files(site: Site) -> None:
    """Raises InputError if a file that [image.site] names is missing or of the wrong kind."""
    _site(site, Mirrors())
    for name, path in site.secrets.items():
        if not Path(path).is_file():
            raise InputError(f"image.site.{name}: the file {path} does not exist")


def write_folder(entries: Mapping[str, Entry], folder: Path) -> None:
    """Write the context as a folder, for a builder that takes one.

    Raises InputError if the folder is not empty or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is not empty: give a new folder for the context")
    try:
        for name, entry in entries.items():
            _write(folder / name, entry)
        for path in folder.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)  # whatever the umask is: ranks of any user read the image's files
    except OSError as problem:
        raise InputError(f"the context cannot be written to {folder}: {problem}") from None


def _write(path: Path, entry: Entry) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(entry, bytes):
        path.write_bytes(entry)
    elif entry.is_symlink():
        path.symlink_to(entry.readlink())
    else:
        shutil.copyfile(entry, path)
    if not path.is_symlink():
        path.chmod(_mode(entry))


def _mode(entry: Entry) -> int:
    return 0o755 if isinstance(entry, Path) and entry.stat().st_mode & 0o100 else 0o644


def certificates(site: Site) -> bytes:
    """Returns the site's certificates as one file.

    Raises InputError that names a file without a certificate.
    """
    return b"".join(_certificate(Path(name)) for name in site.certificates)


def _site(site: Site, mirrors: Mirrors) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    if site.certificates:
        entries["site/certificates.pem"] = certificates(site)
    for name, address in (("apt-mirror", mirrors.apt), ("apt-security-mirror", mirrors.apt_security)):
        if address:
            entries[f"site/{name}"] = f"{address}\n".encode()
    if site.wheelhouse:
        entries |= {f"site/wheelhouse/{path.name}": path.resolve() for path in _wheels(Path(site.wheelhouse))}
    entries["site/pip.conf"] = _pip_conf(site, mirrors.pip).encode()
    return entries


def _archives(job: Job) -> dict[str, Entry]:
    """Returns the archives of the job's plugins, if the site has a folder of them."""
    if job.image.site.sources is None:
        return {}
    wanted = [archive for name in job.image.plugins if (archive := PLUGINS[name].archive)]
    folder = Path(job.image.site.sources)
    for archive in wanted:
        if not (folder / archive.name).is_file():
            raise InputError(
                f"image.site.sources: {folder} has no {archive.name}, which comes from {archive.url}"
            )
    return {f"site/sources/{archive.name}": (folder / archive.name).resolve() for archive in wanted}


def _certificate(path: Path) -> bytes:
    try:
        text = path.read_bytes()
    except OSError as problem:
        raise InputError(f"image.site.certificates: {path}: {problem.strerror}") from None
    if b"-----BEGIN CERTIFICATE-----" not in text:
        raise InputError(
            f"image.site.certificates: {path} has no certificate in PEM form (-----BEGIN CERTIFICATE-----)"
        )
    return text.rstrip(b"\n") + b"\n"


def _wheels(folder: Path) -> list[Path]:
    packages = sorted(path for path in folder.glob("*") if path.name.endswith((".whl", ".tar.gz")))
    broken = [path for path in packages if not path.is_file()]
    if broken:
        raise InputError(f"image.site.wheelhouse: {broken[0]} is a link to a missing file")
    if not packages:
        raise InputError(
            f"image.site.wheelhouse: {folder} has no wheels; `clipship image wheelhouse JOB {word(folder)}` "
            "fills it"
        )
    return packages


def _pip_conf(site: Site, index: str | None) -> str:
    lines = ["[global]"]
    if site.certificates:
        lines.append("cert = /site/ca.pem")
    if index:
        # pip.conf interpolates % as configparser does
        lines.append(f"index-url = {index.replace('%', '%%')}")
    if site.wheelhouse:
        lines += ["no-index = true", "find-links = /site/wheelhouse"]
    return "\n".join(lines) + "\n"
