"""Secrets are found in every form in which job files hold them.

Nothing that is shown or kept for others contains them.
"""

import pytest

from trainer.text.masking import masked, secret_in

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


@pytest.mark.parametrize(("text", "expected"), SECRETS)
def test_a_secret_is_masked_and_the_rest_stays(text: str, expected: str) -> None:
    assert masked(text) == expected
    assert masked(expected) == expected
    assert secret_in(text)
    assert secret_in(expected) is None
