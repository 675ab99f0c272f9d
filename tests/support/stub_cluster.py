"""An API server of Kubernetes on loopback that keeps what it gets, and answers as a test says."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from tests.support.loopback import Answers, answering

STAMP = "2026-01-01T00:00:00Z"


class Refusal(NamedTuple):
    """An answer that is no object; `message` None is the page of a server that has no such API."""

    status: int
    message: str | None


class Request(NamedTuple):
    """What the server was asked: `asked` is the method and the plural of the kind, such as `post jobs`."""

    asked: str
    group: str
    name: str
    query: dict[str, str]


class StubCluster:
    """Objects by plural and name, and answers by what is asked."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.requests: list[Request] = []
        self._said: dict[str, list[Any]] = {}

    def says(self, asked: str, *answers: Any) -> None:
        """Answers requests so, one after the other; the last one stays.

        An answer is an object, a Refusal, the text of a log, or a function of the request; None is the usual.
        """
        self._said[asked] = list(answers)

    def asked(self, *asked: str) -> list[Request]:
        """The requests of these kinds that are no dry runs."""
        return [each for each in self.requests if each.asked in asked and "dryRun" not in each.query]

    def answer(self, request: Request, body: dict[str, Any]) -> Any:
        self.requests.append(request)
        left = self._said.get(request.asked, [None])
        said = left.pop(0) if len(left) > 1 else left[0]
        if callable(said):
            said = said(request)
        return self._usual(request, body) if said is None else said

    def _usual(self, request: Request, body: dict[str, Any]) -> Any:
        method, plural = request.asked.split()
        key = plural, request.name
        match method:
            case "post":
                metadata = {"uid": "u-1", "creationTimestamp": STAMP, **body["metadata"]}
                made = {**body, "metadata": metadata}
                if "dryRun" not in request.query and "name" in metadata:
                    self.objects[plural, metadata["name"]] = made
                return made
            case "get" if not request.name:
                return {"items": [item for (kind, _), item in self.objects.items() if kind == plural]}
            case "delete":
                return self.objects.pop(key, {})
            case "put" | "patch":
                return body
        group = f".{request.group}" if request.group else ""
        return self.objects.get(key) or Refusal(404, f'{plural}{group} "{request.name}" not found')


@contextmanager
def stub_cluster(kubeconfig: Path) -> Iterator[StubCluster]:
    """Runs the server, which the only context of this kubeconfig names."""
    cluster = StubCluster()

    class Handler(Answers):
        def answer(self) -> None:
            place = urlsplit(self.path)
            *api, _namespaces, _namespace, rest = place.path.strip("/").split("/", 4 + ("apis" in self.path))
            plural, _, name = rest.partition("/")
            name, _, part = name.partition("/")
            query = {key: values[0] for key, values in parse_qs(place.query).items()}
            group = "/".join(api[1:-1])
            request = Request(f"{self.command.lower()} {part or plural}", group, name, query)
            length = int(self.headers.get("Content-Length") or 0)
            said = cluster.answer(request, json.loads(self.rfile.read(length) or b"{}"))
            status, kind = 200, "application/json"
            if isinstance(said, Refusal):
                status = said.status
                said = "404 page not found\n" if said.message is None else {"message": said.message}
            if isinstance(said, str):
                kind = "text/plain"
            content = said.encode() if isinstance(said, str) else json.dumps(said).encode()
            self.send(status, content, {"Content-Type": kind})

    with answering(Handler) as address:
        kubeconfig.write_text(
            f"clusters: [{{name: c, cluster: {{server: '{address}'}}}}]\n"
            "contexts: [{name: one b, context: {cluster: c, user: u, namespace: team}}]\n"
            "users: [{name: u, user: {}}]\ncurrent-context: one b\napiVersion: v1\nkind: Config\n"
        )
        yield cluster
