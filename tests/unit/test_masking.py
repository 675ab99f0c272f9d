"""Secrets are found in every form in which job files hold them.

Nothing that is shown or kept for others contains them.
"""

import errno
import io
import logging
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.terminal import LostConsole
from trainer.cli.main import main
from trainer.data.sample import BadSample
from trainer.text.masking import looks_secret, masked, masked_values, secret_in
from trainer.text.terminal import say, shown
from trainer.world.console import ShownFormatter

HF = "hf_" + "aB3" * 10
SECRETS = [
    ("https://user:s3cr3t@host/a.tar", "https://***@host/a.tar"),
    ("https://s3cr3t@host/a.tar", "https://***@host/a.tar"),
    ("git+https://s3cr3t@github.com/a/b", "git+https://***@github.com/a/b"),
    ("https://user:s3c/r3t@host/a.tar", "https://***@host/a.tar"),
    ("https://user:s3c@r3t@host/a.tar", "https://***@host/a.tar"),
    ("s3://id:s3cr3t@bucket/{0..9}.tar", "s3://***@bucket/{0..9}.tar"),
    ("ftp://:s3cr3t@host/", "ftp://***@host/"),
    ("https://b/0.tar?X-Amz-Expires=9&X-Amz-Signature=s3cr3t&x=1",
     "https://b/0.tar?X-Amz-Expires=9&X-Amz-Signature=***&x=1"),
    ("https://b/0?X-Amz-Credential=s3cr3t%2Fus", "https://b/0?X-Amz-Credential=***"),
    ("https://b/0?X-Amz-Security-Token=s3cr3t", "https://b/0?X-Amz-Security-Token=***"),
    ("https://b/0?X-Goog-Signature=s3cr3t", "https://b/0?X-Goog-Signature=***"),
    ("https://b/0?GoogleAccessId=me&Signature=s3cr3t", "https://b/0?GoogleAccessId=me&Signature=***"),
    ("https://b/0?sv=2024&sig=s3cr3t", "https://b/0?sv=2024&sig=***"),
    ("https://b/0?AWSAccessKeyId=s3cr3t&a=b", "https://b/0?AWSAccessKeyId=***&a=b"),
    ("https://b/0?key=s3cr3t", "https://b/0?key=***"),
    ("einops @ https://i/e.whl?token=s3cr3t#sha256=ab", "einops @ https://i/e.whl?token=***#sha256=ab"),
    ("pipe:curl -H 'Authorization: Bearer s3cr3t' https://b/0",
     "pipe:curl -H 'Authorization: ***' https://b/0"),
    ('pipe:curl -H "X-Api-Key: s3cr3t" https://b/0', 'pipe:curl -H "X-Api-Key: ***" https://b/0'),
    ("pipe:curl -H Authorization:Bearer\\ s3cr3t https://b/0", "pipe:curl -H Authorization:*** https://b/0"),
    ("pipe:curl -H 'Cookie: a=b; session=s3cr3t' https://b", "pipe:curl -H 'Cookie: ***' https://b"),
    ("pipe:curl -u me:s3cr3t https://b/0", "pipe:curl -u *** https://b/0"),
    ("pipe:curl --user 'me:s3cr3t' https://b/0", "pipe:curl --user ***' https://b/0"),
    ("pipe:wget --password s3cr3t https://b/0", "pipe:wget --password *** https://b/0"),
    ("pipe:wget --http-password=s3cr3t https://b", "pipe:wget --http-password=*** https://b"),
    ("pipe:AWS_SECRET_ACCESS_KEY=s3cr3t aws s3 cp s3://a -",
     "pipe:AWS_SECRET_ACCESS_KEY=*** aws s3 cp s3://a -"),
    ("export API_TOKEN='s3cr3t with blanks'; x", "export API_TOKEN='***'; x"),
    ("pipe:x --env 'A=b TOKEN=s3cr3t'", "pipe:x --env 'A=b TOKEN=***'"),
    ('{"password": "s3cr3t"}', '{"password": "***"}'),
    ("AccountName=a;AccountKey=s3cr3t;x=y", "AccountName=a;AccountKey=***;x=y"),
    (f"--set env.X={HF} given", "--set env.X=*** given"),
    ("eyJs3cr3t0000.eyJ0123456789.s-_", "***"),
    ("x-eyJ-eyJs3cr3t0000.eyJ0123456789.s", "x-***"),
    ("-----BEGIN RSA PRIVATE KEY-----\ns3cr3t\n-----END", "-----BEGIN RSA PRIVATE KEY-----***-----END"),
]  # fmt: skip
HARMLESS = [
    "https://host:8080/a@b",
    "http://[::1]:8080/x",
    "s3://bucket/{0000..0099}.tar",
    "git+ssh://git@github.com/a/b",
    "nvcr.io/nvidia/pytorch:24.01-py3@sha256:" + "a" * 64,
    "torch==2.14.1",
    "einops @ https://i/e.whl#sha256=ab",
    "pipe:curl -H \"Authorization: Bearer $HF_TOKEN\" https://b/0",
    'pipe:curl -u "$ME:${PASSWORD}" https://b/0',
    "pipe:curl -H 'Accept: text/plain' https://b/0?part=3&key_frames=2",
    "secret:wandb:api-key",
    "TOKENIZERS_PARALLELISM=false",
    "data.image_key=jpg",
    "step 3/20  epoch 0  loss 2.7  lr 1.00e-03  ETA 0:12",
    "[Errno 28] No space left on device: '/a/b'",
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), SECRETS)
def test_a_secret_is_masked_and_the_rest_stays(text: str, expected: str) -> None:
    assert masked(text) == expected
    assert masked(expected) == expected
    assert secret_in(text)
    assert secret_in(expected) is None


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays_as_it_is(text: str) -> None:
    assert masked(text) == text
    assert secret_in(text) is None


@given(st.text(), st.sampled_from(SECRETS), st.text())
def test_a_secret_is_masked_whatever_stands_around_it(
    before: str, secret: tuple[str, str], after: str
) -> None:
    assert "s3cr3t" not in masked(f"{before} {secret[0]} {after}".replace("$", ""))


@given(st.text(alphabet="ab:/@?&='\" ;#-_*$\ntoken"))
def test_masking_twice_changes_nothing_more(text: str) -> None:
    assert masked(masked(text)) == masked(text)


PARTS = [
    "://a:", "https://", "token=", "token='", "-u a:", "Authorization:", "'Authorization:", "a.", "a ",
    "x=${", "-----BEGIN PRIVATE KEY-----", "x-token:'", "password=$(", "-eyJ", ".eyJaaaaaaaaaaa",
]  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_masking_takes_no_time_that_grows_with_the_square_of_a_text(part: str) -> None:
    start = time.monotonic()
    masked(part * (200_000 // len(part)))
    assert time.monotonic() - start < 20  # the square of it takes hours


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "apiKey", "DB_PASSWORD", "X-Amz-Signature"),
        *("sig", "CLIPSHIP_NOTIFY_URL", "SLACK_WEBHOOK_URL"),
    ],
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert looks_secret(name, "abcdef") == "a secret by its name"


@pytest.mark.parametrize(
    "setting",
    [
        "TOKENIZERS_PARALLELISM=abc", "image_key=jpg", "PATH=/bin", "NCCL_DEBUG=INFO",
        "HF_TOKEN_PATH=/home/me/t", "HF_TOKEN=", "HF_TOKEN=$OTHER",
        "WANDB_API_KEY=secret:wandb:api-key", "MAX_TOKEN=77",
    ],
)  # fmt: skip
def test_what_looks_like_no_secret_is_none(setting: str) -> None:
    name, _, value = setting.partition("=")
    assert looks_secret(name, value) is None


def test_tables_are_masked_by_name_and_by_value() -> None:
    table = {
        "train": ("https://a:b@c/0.tar",),
        "env": {"API_KEY": "abc", "A": "b"},
        "patch": {"env": [{"name": "HF_TOKEN", "value": "abc"}]},
        "steps": 3,
    }
    assert masked_values(table) == {
        "train": ["https://***@c/0.tar"],
        "env": {"API_KEY": "***", "A": "b"},
        "patch": {"env": [{"name": "HF_TOKEN", "value": "***"}]},
        "steps": 3,
    }


def test_no_control_character_reaches_a_terminal() -> None:
    assert (
        shown("a\x1b[2Jb\x00c\r\x9b1m\x7f\u202e\udcff\n\té")
        == "a\\u001b[2Jb\\u0000c\\u000d\\u009b1m\\u007f\\u202e\\udcff\n\té"
    )


def test_a_message_to_a_console_that_is_lost_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    full, gone, closed = LostConsole(errno.ENOSPC), LostConsole(errno.EPIPE), io.StringIO()
    closed.close()
    for console in (full, gone, closed):
        monkeypatch.setattr(sys, "stderr", console)
        say("the run goes on")
    assert (full.lost, gone.lost) == ("clipship: the run goes on", "clipship: the run goes on")


@given(st.text(alphabet=st.characters()))
def test_what_is_shown_can_be_written_and_stays_the_same_when_shown_again(text: str) -> None:
    assert shown(shown(text)) == shown(text)
    shown(text).encode()
    assert not any(character < " " and character not in "\n\t" for character in shown(text))


def test_a_log_shows_neither_secrets_nor_what_acts_on_a_terminal() -> None:
    said, more = "%s cannot be read: \x1b]0;x\x07", ("https://a:s3cr3t@h/0.tar",)
    record = logging.LogRecord("clipship", logging.INFO, "", 0, said, more, None)
    text = ShownFormatter("%(message)s").format(record)
    assert text == "https://***@h/0.tar cannot be read: \\u001b]0;x\\u0007"


def test_a_key_of_a_sample_neither_acts_on_a_terminal_nor_forges_a_line() -> None:
    text = str(
        BadSample("0.tar", "a\x1b[2J\n2026-01-01 00:00:00,000 ERROR forged", "decode", "cannot be decoded")
    )
    assert text == "0.tar: sample a\\u001b[2J\\n2026-01-01 00:00:00,000 ERROR forged: cannot be decoded"


def test_logs_shows_what_ranks_said_without_its_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "exit.json").write_text('{"exit_code": 1}')
    said = b"2026-01-01 00:00:00,000 INFO \x1b]0;title\x07 \x00 \x9b \xc2\x9b https://a:s3cr3t@h/\n"
    (tmp_path / "logs" / "rank-00000.log").write_bytes(said)
    assert main(["logs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert (
        out
        == "[0] 2026-01-01 00:00:00,000 INFO \\u001b]0;title\\u0007 \\u0000 \ufffd \\u009b https://***@h/\n"
    )
