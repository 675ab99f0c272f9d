"""The table of builders: which one is taken, its command, and what it refuses (see tests/cluster/image)."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from tests.support.jobs import tiny_job
from tests.support.refusals import refusal
from trainer.cli.main import cli
from trainer.config.loader import dump_job
from trainer.errors import ClusterError, InputError
from trainer.image import build, builder

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
