"""Actors as pods: one StatefulSet for each class of hosts, of which only the scale sub-resource is read and written.

A StatefulSet has what a fleet needs: its pods are called `<class>-0`, `<class>-1`, … (an actor's id is its host name by
default), the highest go first, and one that dies comes back under its name. The orchestrator's account needs `get` and
`patch` on `statefulsets/scale` in one namespace, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException

from asyncrl_jax.config_fleet import FleetConfig
from asyncrl_jax.orchestrator.fleets.base import FleetUnavailable

_ANSWER_S = 5.0


class KubernetesFleet:
    """A `Fleet` (base.py)."""

    def __init__(self, api: client.ApiClient, settings: FleetConfig):
        self._api: Any = client.AppsV1Api(api)
        self._client = api
        self._namespace = settings.kubernetes_namespace
        self._classes = [one.name for one in settings.host_classes]

    @classmethod
    def connect(cls, settings: FleetConfig) -> KubernetesFleet:
        """By the pod's own account inside a cluster, by the user's configuration elsewhere.

        Raises:
          FleetUnavailable: if there is neither.
        """
        found = client.Configuration()
        try:
            config.load_incluster_config(found)
        except ConfigException:
            try:
                config.load_kube_config(client_configuration=found)
            except ConfigException as error:
                raise FleetUnavailable(f"no account of a Kubernetes cluster: {error}") from error
        return cls(client.ApiClient(found), settings)

    def resize(self, members: Mapping[str, int]) -> None:
        for name, size in members.items():
            if self._replicas(name) != size:
                self._call("patch_namespaced_stateful_set_scale", name, body={"spec": {"replicas": size}})

    def sizes(self) -> dict[str, int]:
        return {name: self._replicas(name) for name in self._classes}

    def close(self) -> None:
        self._client.close()

    def _replicas(self, name: str) -> int:
        return self._call("read_namespaced_stateful_set_scale", name).spec.replicas or 0

    def _call(self, method: str, name: str, **arguments: Any) -> Any:
        try:
            return getattr(self._api, method)(name, self._namespace, _request_timeout=_ANSWER_S, **arguments)
        except ApiException as error:
            where = f"StatefulSet {self._namespace}/{name}"
            raise FleetUnavailable(f"{where}: {error.status} {error.reason}") from error
        except urllib3.exceptions.HTTPError as error:
            raise FleetUnavailable(f"the API server does not answer: {error}") from error
