"""Secrets are found in every form in which job files hold them.

Nothing that is shown or kept for others contains them.
"""

import logging
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.sample import BadSample
from trainer.text.masking import masked, secret_in
from trainer.world.console import ShownFormatter

HF = "hf_" + "aB3" * 10
SECRETS = [
    ("https://user:s3cr3t@host/a.tar", "https://***@host/a.tar"),
    ("https://s3cr3t@host/a.tar", "https://***@host/a.tar"),
    ("https://user:s3c/r3t@host/a.tar", "https://***@host/a.tar"),
    ("https://user:s3c@r3t@host/a.tar", "https://***@host/a.tar"),
    ("ftp://:s3cr3t@host/", "ftp://***@host/"),
    ("https://b/0.tar?X-Amz-Expires=9&X-Amz-Signature=s3cr3t&x=1",
     "https://b/0.tar?X-Amz-Expires=9&X-Amz-Signature=***&x=1"),
    ("https://b/0?X-Amz-Credential=s3cr3t%2Fus", "https://b/0?X-Amz-Credential=***"),
    ("https://b/0?GoogleAccessId=me&Signature=s3cr3t", "https://b/0?GoogleAccessId=me&Signature=***"),
    ("https://b/0?AWSAccessKeyId=s3cr3t&a=b", "https://b/0?AWSAccessKeyId=***&a=b"),
    ("https://b/0?key=s3cr3t", "https://b/0?key=***"),
    ("einops @ https://i/e.whl?token=s3cr3t#sha256=ab", "einops @ https://i/e.whl?token=***#sha256=ab"),
    ("pipe:curl -H 'Authorization: Bearer s3cr3t' https://b/0",
     "pipe:curl -H 'Authorization: ***' https://b/0"),
    ('pipe:curl -H "X-Api-Key: s3cr3t" https://b/0', 'pipe:curl -H "X-Api-Key: ***" https://b/0'),
    ("pipe:curl -H Authorization:Bearer\\ s3cr3t https://b/0", "pipe:curl -H Authorization:*** https://b/0"),
    ("pipe:curl -H 'Cookie: a=b; session=s3cr3t' https://b", "pipe:curl -H 'Cookie: ***' https://b"),
    ("pipe:curl -u me:s3cr3t https://b/0", "pipe:curl -u *** https://b/0"),
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
    "https://host:8080/a@b", "http://[::1]:8080/x", "s3://bucket/{0000..0099}.tar",
    "git+ssh://git@github.com/a/b", "nvcr.io/nvidia/pytorch:24.01-py3@sha256:" + "a" * 64,
    "einops @ https://i/e.whl#sha256=ab", 'pipe:curl -H "Authorization: Bearer $HF_TOKEN" https://b/0',
    'pipe:curl -u "$ME:${PASSWORD}" https://b/0', "secret:wandb:api-key", "TOKENIZERS_PARALLELISM=false",
    "pipe:curl -H 'Accept: text/plain' https://b/0?part=3&key_frames=2",
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


PARTS = [
    "://a:", "https://", "token=", "token='", "-u a:", "Authorization:", "'Authorization:", "a.", "a ",
    "x=${", "-----BEGIN PRIVATE KEY-----", "x-token:'", "password=$(", "-eyJ", ".eyJaaaaaaaaaaa",
]  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_masking_takes_no_time_that_grows_with_the_square_of_a_text(part: str) -> None:
    start = time.monotonic()
    masked(part * (200_000 // len(part)))
    assert time.monotonic() - start < 20  # the square of it takes hours


def test_a_log_shows_neither_secrets_nor_what_acts_on_a_terminal() -> None:
    hostile = "a\x1b[2Jb\x00c\r\x9b1m\x7f\u202e\udcff\n\té"
    record = logging.LogRecord(
        "clipship", logging.INFO, "", 0, "%s of %s", (hostile, "https://a:s3cr3t@h/0"), None
    )
    shown = "a\\u001b[2Jb\\u0000c\\u000d\\u009b1m\\u007f\\u202e\\udcff\n\té"
    assert ShownFormatter("%(message)s").format(record) == f"{shown} of https://***@h/0"


def test_a_key_of_a_sample_neither_acts_on_a_terminal_nor_forges_a_line() -> None:
    forged = "2026-01-01 00:00:00,000 ERROR forged"
    text = str(BadSample("0.tar", f"a\x1b[2J\n{forged}", "decode", "cannot be decoded"))
    assert text == f"0.tar: sample a\\u001b[2J\\n{forged}: cannot be decoded"
