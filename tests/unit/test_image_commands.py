"""Parts of `clipship image` that need no daemon: commands, the refusals before them, and lists of pins."""

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from tests.support.jobs import tiny_job
from tests.support.pages import ROOT
from tests.support.refusals import refusal
from trainer.cli.main import cli
from trainer.config.loader import dump_job
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
    site = {"certificates": (str(tmp_path / "a.pem"), str(tmp_path / "b.pem"))}
    wheelhouse._index(tiny_job(image={"site": site}).image.site, None, tmp_path)
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


# The table of builders: which one is taken, its command, and what it refuses (see tests/cluster/image).

ID = "a" * 64
IMAGE = f'[{{"Id": "{ID}", "Config": {{}}, "Size": 7}}]'
NO_DAEMON = "the Docker daemon does not answer"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Makes a program of a script, where there are no others and no Docker daemon answers."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)

    def no_daemon(*_: object) -> None:
        raise ClusterError(NO_DAEMON)

    monkeypatch.setattr(builder, "client", no_daemon)

    def make(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return make


def test_a_secret_goes_in_as_a_file_that_no_layer_keeps() -> None:
    job = tiny_job(image={"tag": "x:1", "builder": "buildah", "site": {"pip_conf": "/a/pip.conf"}})
    assert "--secret=id=pip_conf,src=/a/pip.conf" in build.build_command(job, Path("x"))
    assert "--platform=linux/amd64" in build.build_command(job, Path("x"))
    comma = tiny_job(image={"tag": "x:1", "builder": "podman", "site": {"pip_conf": "/a,b"}})
    with pytest.raises(InputError, match=r"site.pip_conf: /a,b has a comma, .* podman .*name a link"):
        build.build_command(comma, Path("x"))


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    file = tmp_path / "job.toml"
    file.write_text(dump_job(tiny_job(image={"tag": "x:1"})))
    return str(file)


def test_buildkit_gets_the_options_to_attach_statements_as_they_are(
    job_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Sequence[str]] = []

    def follow(self: object, command: Sequence[str], folder: str) -> None:
        ran.append(command)
        raise ClusterError("the build failed")

    monkeypatch.setattr(builder.Buildkit, "_follow", follow)
    words = ["image", "build", job_file, "--set", "image.builder=buildkit", "--any-disk"]
    monkeypatch.setattr(builder.Buildkit, "folder", lambda _: None)
    attest = ["--sbom=generator=scanner:1", "--provenance=mode=max"]
    assert CliRunner().invoke(cli, [*words, *attest]).exit_code == 1
    assert CliRunner().invoke(cli, words).exit_code == 1
    assert [[word for word in command if word in attest] for command in ran] == [attest, []]


@pytest.mark.parametrize("name", ["auto", "classic", "podman", "buildah"])
def test_statements_of_another_builder_are_refused(
    job_file: str, name: str, programs: Callable[[str, str], None]
) -> None:
    programs("podman", "exit 1")
    words = ["image", "build", job_file, "--set", f"image.builder={name}", "--provenance=true"]
    taken = {"auto": "podman"}.get(name, name)
    with pytest.raises(InputError, match=f"{taken} builds this image: add --set image.builder=buildkit"):
        CliRunner().invoke(cli, words, catch_exceptions=False)


def test_statements_that_the_push_would_lose_are_refused() -> None:
    job = tiny_job(image={"tag": "x:1", "builder": "buildkit", "compression": "zstd"})
    with pytest.raises(InputError, match=r'image\.compression: "zstd" .* set it to "gzip"'):
        build.build(job, attest=("--sbom=true",))


def test_without_a_daemon_auto_takes_podman_then_buildah_and_says_so(
    programs: Callable[[str, str], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tiny_job(image={"tag": "x:1"}).image
    assert refusal(builder.builder_here, image) == NO_DAEMON
    for name in ("buildah", "podman"):  # podman comes first where both are
        programs(name, "exit 1")
        assert builder.builder_here(image) is builder.BUILDERS[name]
        said = capsys.readouterr().err
        assert said == f'clipship: {NO_DAEMON}; {name} takes its place, as with image.builder = "{name}"\n'
    monkeypatch.setenv("DOCKER_HOST", "unix:///named.sock")
    assert refusal(builder.builder_here, image) == NO_DAEMON


def test_an_image_is_found_where_it_is(
    programs: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    programs("podman", "echo 'Error: x:1: image not known' >&2; exit 125")
    assert refusal(builder.found, "x:1") == NO_DAEMON
    assert "there is no image x:1 on this machine" in refusal(builder.found, "x:1", "podman")
    assert "buildah is not installed" in refusal(builder.found, "x:1", "buildah")
    programs("podman", f"echo '{IMAGE}'")
    holder, stored = builder.found("x:1")
    assert (holder.name, stored.id, stored.size) == ("podman", f"sha256:{ID}", 7)
    assert capsys.readouterr().err == f"clipship: {NO_DAEMON}; podman has x:1\n"


def test_a_builder_that_is_not_installed_is_named_without_a_look_at_the_disk(
    programs: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = SimpleNamespace(api=SimpleNamespace(base_url=""), close=lambda: None)
    monkeypatch.setattr(builder, "client", lambda: daemon)
    for name, program in (("podman", "podman"), ("auto", "docker"), ("buildkit", "docker")):
        job = tiny_job(image={"tag": "x:1", "builder": name})
        for any_disk in (False, True):
            assert f"{program} is not installed" in refusal(partial(build.build, job, any_disk=any_disk))


def test_podman_under_docker_s_name_is_not_taken_for_docker(
    programs: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "client", lambda: SimpleNamespace(close=lambda: None))
    programs("docker", "echo podman version 4.3.1")
    programs("podman", f"echo '{IMAGE}'")
    assert 'image.builder = "podman"' in refusal(builder.found, "x:1", "classic")
    assert builder.found("x:1")[0].name == "podman"


def test_nobody_is_told_to_remove_the_variable_that_clipship_sets(
    programs: Callable[[str, str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "            BuildKit is currently disabled; enable it by removing the DOCKER_BUILDKIT=0"
    lines = ("DEPRECATED: old.", told, "            environment-variable.", "", "Step 1/1")
    programs("docker", "\n".join(f'echo "{line}" >&2' for line in lines) + "\nexit $((1 + DOCKER_BUILDKIT))")
    with pytest.raises(ClusterError, match=r"code 1\nits last lines:\nDEPRECATED: old\.\nStep 1/1$"):
        builder.BUILDERS["classic"]._follow(["docker", "build", "."], str(tmp_path))
    assert capsys.readouterr().err == "DEPRECATED: old.\nStep 1/1\n"


def test_an_export_that_nobody_reads_to_its_end_is_over_before_its_container_goes(
    programs: Callable[[str, str], None], tmp_path: Path
) -> None:
    programs(
        "podman",
        f"""cd {tmp_path}
        case $1 in
            create) echo container ;;
            cp) /bin/cat > added ;;
            export) echo $$ > exporting; exec /bin/cat /dev/zero ;;
            rm) ! kill -0 "$(/bin/cat exporting)" && echo "$4" > removed ;;
        esac""",
    )
    with builder.BUILDERS["podman"].export("x:1", b"a tar") as chunks:
        assert next(chunks)
    assert (tmp_path / "removed").read_text() == "container\n", "podman would have waited for ever"
    assert (tmp_path / "added").read_bytes() == b"a tar"


@pytest.mark.parametrize(
    ("name", "names", "digest"),
    [
        ("debian:12", ("mirror.example/library/debian@2", "docker.io/library/debian@1"), "1"),
        ("debian@sha256:1", ("mirror.example/library/debian@2", "docker.io/library/debian@1"), "1"),
        ("debian:12", ("registry.example/debian@4",), "4"),
        ("debian:12", (), None),
        ("debian:12", ("a.example/debian@1", "b.example/debian@2"), None),
    ],
)
def test_podman_tells_the_digest_of_the_registry_that_was_asked(
    programs: Callable[[str, str], None], name: str, names: tuple[str, ...], digest: str | None
) -> None:
    about = IMAGE.replace('"Size"', f'"RepoDigests": {json.dumps(names)}, "Size"')
    programs("podman", f"case $1 in image) echo '{about}' ;; esac")
    podman = builder.Podman()
    if digest is not None:
        assert podman.digest(name, "linux/amd64") == digest
    else:
        with pytest.raises(ClusterError, match=f"podman pulled {name} and has no digest of it at docker.io/"):
            podman.digest(name, "linux/amd64")


@pytest.mark.parametrize("version", [":1", f"@sha256:{ID}", ""])
def test_buildah_tells_the_digest_of_an_image_however_it_was_named(version: str) -> None:
    about = {"FromImage": f"mirror:5000/library/debian{version}", "FromImageDigest": f"sha256:{ID}"}
    stored = builder.Buildah().described({**about, "FromImageID": ID, "Docker": {"config": {}}})
    assert stored.names == (f"mirror:5000/library/debian@sha256:{ID}",)


def test_another_failure_than_a_missing_image_is_told_as_it_is(programs: Callable[[str, str], None]) -> None:
    programs("podman", "echo 'Error: cannot set up namespace' >&2; exit 125")
    assert "podman: Error: cannot set up namespace" in refusal(builder.found, "x:1", "podman")
