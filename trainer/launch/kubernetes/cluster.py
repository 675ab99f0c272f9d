"""Talks to a cluster through the official client, with the user's kubeconfig; explains its refusals.

The client takes a second to import: only this module imports it, and only commands that ask a cluster import
this module. Imports no torch.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient

from trainer.errors import ClusterError
from trainer.launch.kubernetes.gangs import Gang
from trainer.launch.kubernetes.kind import Kind, Object
from trainer.safe_io.plain import parse_json, read_plain
from trainer.text.terminal import shown

_ANSWER_S = 20.0
_SHOWN = 200
"""Characters that are shown of the client's own message about a kubeconfig."""

Known = Gang | type[Kind]
"""A kind of object that a cluster may not know."""


@dataclass(frozen=True)
class Cluster:
    """A connection to one namespace of one kubeconfig context."""

    api: Any
    context: str
    namespace: str
    server: str

    @property
    def core(self) -> Any:
        return client.CoreV1Api(self.api)

    def ask(
        self,
        method: str,
        api_version: str,
        plural: str,
        name: str = "",
        body: Object | None = None,
        **query: str,
    ) -> Object:
        """Sends a request about objects of the namespace, or the one of this name; returns the answer's JSON.

        The paths of the API are fixed, so the server is not asked which kinds it has. Raises ApiException,
        and ClusterError for the answer of something else.
        """
        path = f"/{'apis' if '/' in api_version else 'api'}/{api_version}/namespaces/{{namespace}}/{plural}"
        answer = DynamicClient(self.api, discoverer=lambda *_: None).request(
            method,
            path + ("/{name}" if name else ""),
            body=body,
            path_params={"namespace": self.namespace, "name": name},
            query_params=list(query.items()),
            content_type="application/merge-patch+json" if method == "patch" else None,
            serializer=lambda _, answer: answer,
            _request_timeout=_ANSWER_S if method == "get" else None,
        )
        if not isinstance(answer, dict):
            raise ClusterError(
                f"what answers for the cluster of context {self.context} at {self.server} is no API server "
                f"but sends {shown(str(answer)[:_SHOWN])!r}: is it a proxy or a page to sign in?"
            )
        return answer

    def read(self, row: type[Kind], name: str) -> Object | None:
        """Returns the object of this kind as the API server has it; None if there is none of this name."""
        group = row.api_version.partition("/")[0]
        with self.asking(f"read the {row.kind}", row=row):
            try:
                return self.ask("get", row.api_version, row.plural, name)
            except ApiException as problem:
                if problem.status == 404 and re.fullmatch(
                    rf'{row.plural}\.{group} ".*" not found', _message(problem)
                ):
                    return None
                raise

    def create(self, row: type[Kind], wanted: Object, **query: str) -> Object:
        """Create the object of this kind, and return it as the API server has it."""
        with self.asking(f"create the {row.kind}", row=row):
            return self.ask("post", row.api_version, row.plural, body=wanted, **query)

    def delete(self, row: type[Kind], name: str, policy: str, what: str) -> None:
        """Delete the object of this kind; `policy` says when what belongs to it goes."""
        with self.asking(what, row=row):
            self.ask("delete", row.api_version, row.plural, name, propagationPolicy=policy)

    @contextmanager
    def asking(self, what: str, otherwise: str = "", *, row: Known | None = None) -> Iterator[None]:
        """Converts every exception of the client inside the block to a ClusterError for people.

        `otherwise` tells a user without the permission how the job can do without this request. `row` is the
        kind of the object, which the cluster may not know.
        """
        try:
            yield
        except ApiException as problem:
            way_out = f", or {otherwise}" if otherwise and lacks_permission(problem) else ""
            raise ClusterError(explain(problem, what, self.namespace, row) + way_out) from None
        except (urllib3.exceptions.HTTPError, OSError) as problem:
            reason = getattr(problem, "reason", None) or problem
            raise ClusterError(
                f"the cluster of context {self.context} does not answer at {self.server}: {reason}"
            ) from None


def connect(namespace: str | None, context: str | None = None) -> Cluster:
    """Connect to the named context, else to the current one, of KUBECONFIG or ~/.kube/config.

    Inside a pod without a kubeconfig, connects to the pod's own cluster. `namespace` None means the context's
    own. Raises ClusterError if there is no such context.
    """
    _check_kubeconfig()
    try:
        contexts, current = config.list_kube_config_contexts()
    except config.ConfigException as problem:
        return _inside(namespace, str(problem))
    except Exception as problem:  # strange content can make the client raise anything
        raise _not_a_kubeconfig(problem) from None
    chosen = (
        current if context is None else next((known for known in contexts if known["name"] == context), None)
    )
    if chosen is None:
        names = ", ".join(known["name"] for known in contexts)
        raise ClusterError(
            f"the run was submitted with the context {context!r}, which the kubeconfig lacks; it has: {names}"
        )
    try:
        settings = client.Configuration()
        settings.retries = False  # the client reads it when it is made
        api = config.new_client_from_config(context=chosen["name"], client_configuration=settings)
        own = chosen["context"].get("namespace") or "default"
    except (config.ConfigException, OSError) as problem:
        raise ClusterError(f"context {chosen['name']} of the kubeconfig cannot be used: {problem}") from None
    except Exception as problem:
        raise _not_a_kubeconfig(problem) from None
    return Cluster(api, chosen["name"], namespace or own, api.configuration.host)


def _check_kubeconfig() -> None:
    """Raises ClusterError for a file that the client would wait for, or read without end."""
    for name in filter(None, config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION.split(os.pathsep)):
        path = Path(name).expanduser()
        try:
            read_plain(path, links=True)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as problem:
            why = getattr(problem, "strerror", None) or "it is not UTF-8 text"
            raise ClusterError(
                f"the kubeconfig {path} cannot be read: {why}; let KUBECONFIG name another file"
            ) from None


def _not_a_kubeconfig(problem: Exception) -> ClusterError:
    text = " ".join(str(problem).split())[:_SHOWN]
    return ClusterError(
        f"the kubeconfig is malformed ({type(problem).__name__}: {text}): `kubectl config view` names the "
        "place; or let KUBECONFIG name another file"
    )


def _inside(namespace: str | None, problem: str) -> Cluster:
    try:
        config.load_incluster_config()
    except config.ConfigException:
        raise ClusterError(
            f"no cluster is known: {problem}; set KUBECONFIG, or choose a context with `kubectl config "
            "use-context`"
        ) from None
    api = client.ApiClient()
    own = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
    return Cluster(
        api,
        "the pod's own cluster",
        namespace or (own.read_text().strip() if own.exists() else "default"),
        api.configuration.host,
    )


def explain(problem: ApiException, what: str, namespace: str, row: Known | None = None) -> str:
    """Returns what the API server refused, and what to do; `what` is used as in "cannot WHAT"."""
    message = _message(problem)
    head = f"cannot {what} in namespace {namespace}: "
    match problem.status:
        case 401:
            return (
                f"{head}the cluster does not know you: log in again (the kubeconfig's credentials have "
                "expired or are wrong)"
            )
        case 403 if "exceeded quota" in message:
            return (
                f"{head}it would exceed the quota: {message}; ask for less in [resources], or wait (`kubectl "
                f"describe quota -n {namespace}`)"
            )
        case 403 if "must specify" in message:
            return (
                f"{head}its quota requires limits for every container: {message}; for workers set "
                "resources.mem_gb_per_gpu and kubernetes.cpu_limit, for the launcher "
                'kubernetes.patch.launcher.spec.containers = [{ name = "launcher", '
                'resources.limits.cpu = "1" }]'
            )
        case 403 if "violates PodSecurity" in message:
            return (
                f"{head}the namespace's pod security forbids it: {message}; see run_as_user, mounts, rdma "
                "and patch in [kubernetes]"
            )
        case 403 if "cannot" in message and "resource" in message:
            return (
                f"{head}you lack the permission: {message}; ask the cluster's administrator for a role that "
                "allows it (`kubectl auth can-i`)"
            )
        case 404 if message.startswith('namespaces "'):
            return (
                f"{head}the namespace does not exist: change kubernetes.namespace, or the namespace of the "
                "context (`kubectl get namespaces` lists them)"
            )
        case 404 if row is not None:
            return f"{head}the cluster does not know {row.kind}s ({message}): {row.advice}"
        case _:
            return f"{head}{message}"


def _message(problem: ApiException) -> str:
    """Returns the API server's own sentence."""
    try:
        status: Mapping[str, Any] = parse_json(problem.body or "")
        return str(status["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(str(problem.body or problem.reason).split()) or f"HTTP {problem.status}"


def lacks_permission(problem: ApiException) -> bool:
    """Returns whether the request failed only because RBAC forbids it."""
    message = _message(problem)
    return problem.status == 403 and "cannot" in message and "resource" in message
