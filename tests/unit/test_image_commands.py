"""Parts of `clipship image` that need no daemon: commands, the refusals before them, and lists of pins."""

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.jobs import tiny_job
from tests.support.pages import ROOT
from tests.support.refusals import refusal
from trainer.config.image import Site
from trainer.config.stack_table import table
from trainer.errors import ClusterError, InputError
from trainer.image import build, builder, sbom, verify, wheelhouse
from trainer.image.builder import Stored, likely_cause


def test_a_name_with_a_digest_is_not_pushed() -> None:
    with pytest.raises(InputError, match="already been pushed"):
        build.push(tiny_job(image={"tag": "registry.example/team/clipship@sha256:" + "0" * 64}))


def test_a_full_disk_is_told_before_the_build_with_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_gb = shutil.disk_usage(tmp_path).free / 1e9
    _daemon_at(monkeypatch, "http+docker://localhost", tmp_path)
    folder = builder.BUILDERS["classic"].folder()
    build.check_disk(folder, "podman system prune", needed_gb=0)
    with pytest.raises(
        ClusterError,
        match=rf"{tmp_path} has \d+ GB free, but a build needs {free_gb + 1000:.0f}: `podman.*--any-disk",
    ):
        build.check_disk(folder, "podman system prune", needed_gb=round(free_gb + 1000))


def test_the_disk_of_a_daemon_elsewhere_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = "http+docker://localhost", "https://build-host:2376"
    for address, root in ((here, "/nowhere/docker"), (elsewhere, tmp_path)):
        _daemon_at(monkeypatch, address, root)
        folder = builder.BUILDERS["classic"].folder()
        assert refusal(build.check_disk, folder, "prune", needed_gb=10**9) == ""


def _daemon_at(monkeypatch: pytest.MonkeyPatch, address: str, root: Path | str) -> None:
    connected = SimpleNamespace(api=SimpleNamespace(base_url=address))
    monkeypatch.setattr(builder, "client", lambda: connected)
    monkeypatch.setattr(builder.Classic, "_said", lambda *_: str(root))


@pytest.fixture
def docker_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a context of the docker command, in use, whose daemon does not run."""
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.delenv("DOCKER_CONTEXT", raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    folder = tmp_path / "contexts/meta" / hashlib.sha256(b"ours").hexdigest()
    folder.mkdir(parents=True)
    endpoint = {"Host": f"unix://{tmp_path}/ours.sock", "SkipTLSVerify": False}
    (folder / "meta.json").write_text(
        json.dumps({"Name": "ours", "Metadata": {}, "Endpoints": {"docker": endpoint}})
    )
    (tmp_path / "config.json").write_text(json.dumps({"currentContext": "ours"}))
    return "ours"


def test_the_daemon_is_that_of_the_docker_command_s_context(
    docker_context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("docker.client.APIClient", lambda **options: asked.append(options["base_url"]))
    builder.client()
    assert asked[-1].endswith(f"/{docker_context}.sock")
    monkeypatch.setenv("DOCKER_CONTEXT", "default")
    builder.client()
    assert asked[-1] == "unix:///var/run/docker.sock"
    monkeypatch.setenv("DOCKER_CONTEXT", "nobody")
    with pytest.raises(ClusterError, match="no Docker context nobody: `docker context ls`"):
        builder.client()
    monkeypatch.setenv("DOCKER_HOST", "unix:///named.sock")
    builder.client()
    assert asked[-1] == "unix:///named.sock"


@pytest.mark.parametrize("text", ["[]", "null", '{"currentContext": 5}', '{"auths": 5}'])
def test_a_damaged_configuration_of_docker_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, docker_context: str, text: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/docker")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ClusterError, match=rf"config\.json or contexts/ in {tmp_path} may be damaged"):
        builder.client()


@pytest.mark.parametrize(
    ("path", "option"),
    [
        ("/a/pip.conf", "id=x,src=/a/pip.conf"),
        ("/a,b/pip.conf", 'id=x,"src=/a,b/pip.conf"'),
        ('/a"b', 'id=x,"src=/a""b"'),
    ],
)
def test_a_secret_s_path_is_one_field_whatever_is_in_it(path: str, option: str) -> None:
    assert builder.BUILDERS["buildkit"].secret("x", path) == option


def test_a_self_test_that_fails_is_named_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = {"Labels": {"org.clipship.torch": "2.14.1", "org.clipship.compiler": "g++"}}
    stored = Stored("sha256:1", (), labels, 1)
    holder = SimpleNamespace(run=lambda _, words: subprocess.CompletedProcess(words, 125, "", "boom"))
    monkeypatch.setattr("trainer.image.verify.found", lambda *_: (holder, stored))
    program = r"/opt/clipship/bin/python -P -m trainer\.image\.selftest --torch 2\.14\.1 --compiler"
    with pytest.raises(ClusterError, match=f"^x:1: {program} ended with exit code 125:\nboom"):
        verify.verify("x:1", "auto")


def test_several_certificates_stay_apart_whatever_their_files_end_with(tmp_path: Path) -> None:
    for name in ("a.pem", "b.pem"):
        (tmp_path / name).write_text(f"-----BEGIN CERTIFICATE-----\n{name}\n-----END CERTIFICATE-----")
    wheelhouse._index(Site(certificates=(str(tmp_path / "a.pem"), str(tmp_path / "b.pem"))), None, tmp_path)
    assert (
        "-----END CERTIFICATE-----\n-----BEGIN CERTIFICATE-----\nb.pem\n-----END CERTIFICATE-----\n"
        in (tmp_path / "ca.pem").read_text()
    )


def test_a_wheelhouse_that_the_job_names_already_can_be_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "trainer.image.wheelhouse._pip", lambda _folder, _index, *words: asked.append(words[-1])
    )
    job = tiny_job(image={"tag": "clipship:1", "site": {"wheelhouse": str(tmp_path)}})
    assert wheelhouse.fill(job, tmp_path) == 0
    assert any(name.endswith("requirements.txt") for name in asked)


@pytest.mark.parametrize(("base", "python"), [("debian:13-slim", "3.13"), ("debian:12-slim", "3.11")])
def test_markers_of_packages_are_judged_for_the_image_and_not_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str, python: str
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr("trainer.image.wheelhouse._pip", lambda _folder, _index, *words: asked.append(words))
    packages = (
        "einops[x]==0.8.1; python_version >= '3.12'",
        "tomli; python_version < '3.12'",
        "grace; platform_machine == 'aarch64'",
        "https://example.com/a-1-py3-none-any.whl",
    )
    image = {"tag": "clipship:1", "base": base, "platform": "linux/arm64", "pip_packages": packages}
    wheelhouse.fill(tiny_job(image=image), tmp_path)
    (words,) = (words for words in asked if "--constraint" in words)
    first = "einops[x]==0.8.1" if python == "3.13" else "tomli"
    assert words[-3:] == (first, "grace", packages[-1])
    assert words[words.index("--python-version") + 1] == python


def test_a_wheelhouse_that_cannot_be_a_folder_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be filled"):
        wheelhouse.fill(tiny_job(image={"tag": "clipship:1"}), Path("/etc/passwd"))


def test_the_script_builds_the_table_s_horovod() -> None:
    script = (ROOT / "docker/build-horovod.sh").read_text()
    assert f"\nreadonly version={table().horovod}\n" in script
    assert table().horovod_sha256 in script


def test_the_list_of_packages_has_four_columns_and_a_fixed_order() -> None:
    words = [sys.executable, "-P", "-m", "trainer.image.sbom"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rows = [line.split("\t") for line in said.splitlines()]
    assert rows == sorted(rows, key=lambda row: (row[0], row[1].lower(), row[2]))
    assert {len(row) for row in rows} == {4}
    assert ["python", "pytest", pytest.__version__, "MIT"] in rows


def test_licences_of_a_system_package_are_the_names_that_its_file_gives(tmp_path: Path) -> None:
    file = tmp_path / "copyright"
    file.write_text(
        "Format: x\nLicense: GPL-2+\tor Artistic\n full text\n\nFiles: *\nLicense: Expat\n\nLicense: Expat\n"
        " text\n"
    )
    assert sbom._licences_of(file) == "GPL-2+ or Artistic, Expat"
    file.write_text("This is free software.\n")
    assert sbom._licences_of(file) == f"see {file}"
    assert sbom._licences_of(tmp_path / "none") == "not stated"


def test_packages_of_a_job_keep_installed_versions_and_bring_no_second_nccl(tmp_path: Path) -> None:
    """`docker/constraints.py` runs in an environment of its own with some packages.

    pip itself reads the output.
    """
    (tmp_path / "Torch-2.6.0.dist-info").mkdir()
    (tmp_path / "Torch-2.6.0.dist-info/METADATA").write_text("Name: Torch\nVersion: 2.6.0\n")
    (tmp_path / "nvidia_nccl_cu12-2.21.5.dist-info").mkdir()
    (tmp_path / "nvidia_nccl_cu12-2.21.5.dist-info/METADATA").write_text(
        "Name: nvidia-nccl_cu12\nVersion: 2.21.5\n"
    )
    script = f"import sys; sys.path[:] = [{str(tmp_path)!r}, *(p for p in sys.path if 'packages' not in p)]"
    code = f"{script}; exec(open({str(ROOT / 'docker/constraints.py')!r}).read())"
    printed = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True
    ).stdout
    others = ["horovod<0", "nvidia-nccl-cu11<0", "nvidia-nccl-cu13<0"]
    assert printed.splitlines() == ["nvidia-nccl-cu12==2.21.5", "torch==2.6.0", *others]
    wheel = tmp_path / "nvidia_nccl_cu13-2.30.7-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "nvidia_nccl_cu13-2.30.7.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: 2.30.7\n",
        )
        archive.writestr("nvidia_nccl_cu13-2.30.7.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("nvidia_nccl_cu13-2.30.7.dist-info/RECORD", "")
    (tmp_path / "constraints.txt").write_text(printed)
    pip = f"-m pip install --dry-run --no-index --find-links={tmp_path}".split()
    words = [sys.executable, *pip, f"--constraint={tmp_path}/constraints.txt", "nvidia-nccl-cu13"]
    refused = subprocess.run(words, capture_output=True, text=True)
    assert refused.returncode != 0
    cause = likely_cause(f"Step 1/1 : RUN x\n{refused.stdout}{refused.stderr}")
    assert "a second Horovod or NCCL" in (cause or "")
