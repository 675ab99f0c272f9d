"""The client of web servers that fsspec uses: as curl and requests do, it takes what the environment says.

That is proxies (http_proxy, no_proxy), the keys in .netrc, and certificates (REQUESTS_CA_BUNDLE,
SSL_CERT_FILE). No torch.
"""

import re
import ssl
from typing import Any

from aiohttp import ClientResponse, ClientSession, TCPConnector

from trainer.data.storage import certificate_file
from trainer.errors import InputError
from trainer.safe_io.plain import MOST_LINES_BYTES
from trainer.text.wording import many

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_ENCODED = re.compile(r"(?:[\w\-.~:/?#\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2})*", re.ASCII)


class Answer(ClientResponse):
    """An answer of which at most a byte more is kept than the part of a file that was asked for."""

    async def read(self) -> bytes:
        if self._body is None:
            asked = _RANGE.fullmatch(self.request_info.headers.get("Range", ""))
            most = int(asked[2]) - int(asked[1]) + 1 if asked else MOST_LINES_BYTES
            parts: list[bytes] = []
            size = 0
            while size <= most and (part := await self.content.readany()):
                parts.append(part)
                size += len(part)
            if size > most:
                self.close()
                if asked is None:
                    raise InputError(f"{self.url}: its answer is longer than {many(most, 'byte')}")
            self._body = b"".join(parts)[: most + 1]
        return self._body


async def session(**options: Any) -> ClientSession:
    """Returns the client's session; `options` are fsspec's own."""
    certificates = ssl.create_default_context(cafile=certificate_file())
    return ClientSession(
        connector=TCPConnector(ssl=certificates),
        response_class=Answer,
        trust_env=True,
        requote_redirect_url=False,  # a signature holds for the address as it stands
        **options,
    )


def web_options(address: str) -> dict[str, Any]:
    """Returns the options of fsspec's client; an address that is encoded is sent as it stands."""
    return {"get_client": session, "encoded": _ENCODED.fullmatch(address) is not None}
