"""Base class of the kinds of object that can run a job. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

from trainer.comm.backends import Launcher
from trainer.launch.kubernetes.pods import Pods

Object = dict[str, Any]
KindName = Literal["mpijob", "job", "trainjob"]


class Known(Protocol):
    """A kind of object that a cluster may not know."""

    @property
    def kind(self) -> str:
        """Its name in Kubernetes, and in messages."""

    @property
    def advice(self) -> str:
        """Advice for a cluster that does not know the kind."""


class KindRow(ABC):
    """One kind of object. Methods of an object take it as the API server has it."""

    name: ClassVar[KindName]
    """Value of `kubernetes.kind`."""
    kind: ClassVar[str]
    """Its name in Kubernetes, and in messages."""
    group: ClassVar[str]
    version: ClassVar[str]
    plural: ClassVar[str]
    controller: ClassVar[str]
    """Program that makes its pods, in messages."""
    advice: ClassVar[str]
    """Advice for a cluster that does not know the kind."""
    view: ClassVar[type[Pods]]
    """Values of the template, made from a job."""
    template: ClassVar[str]
    succeeded: ClassVar[str]
    """Condition of an object that has ended well."""
    starter: ClassVar[str]
    """Program that starts the ranks."""
    starts_ranks_by: ClassVar[str]
    """The same in a clause."""
    keeps_going: ClassVar[bool]
    """True if the other pods go on when one is gone; MPI ends all."""
    pod_label: ClassVar[str]
    """Label of the pods that has the object's name."""
    output: ClassVar[Mapping[str, str]]
    """Labels of the pods whose logs are the run's output; there is one at a time."""
    output_pod: ClassVar[str]
    """Such a pod, in messages."""
    without: ClassVar[tuple[str, ...]] = ()
    """Keys of [kubernetes] that mean nothing for this kind."""
    unseen: ClassVar[tuple[str, ...]] = ()
    """Parts of the words with which controllers refuse an object before they have seen those beside it."""

    @abstractmethod
    def pods(self, objects: Sequence[Object]) -> dict[str, Object]:
        """Returns the parts of the rendered objects that hold a pod's `template`, by its role."""

    @abstractmethod
    def workers(self, found: Object) -> int:
        """Returns the number of the pods that have ranks."""

    @abstractmethod
    def ended_at(self, found: Object) -> str | None:
        """Returns the time at which the object has ended; None if it has not."""

    @abstractmethod
    def phase(self, found: Object) -> tuple[str, str] | None:
        """Returns a word for what the object does, and since when; None if its status does not say."""

    def conditions(self, found: Object) -> dict[str, Object]:
        """Returns what the object's status says to be true, by the name of the condition."""
        given = found.get("status", {}).get("conditions", [])
        return {each["type"]: each for each in given if each["status"] == "True"}

    def made_by(self, name: str) -> set[str]:
        """Returns the names of other objects that the controller makes for an object of this name."""
        return set()

    @property
    def has_launcher(self) -> bool:
        """True if a pod without ranks starts the ranks of the others."""
        return not self.keeps_going

    @property
    def launcher(self) -> Launcher:
        """Launcher of the ranks, as the backends know it."""
        return self.view.launcher

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}"
