"""The scale sub-resource through the official client, against an API server of the test's own."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from fleet_contract import FleetContract

pytestmark = pytest.mark.kubernetes
kubernetes = pytest.importorskip("kubernetes", reason="the extra `kubernetes` is not installed")

from asyncrl_jax.config_fleet import FleetConfig  # noqa: E402
from asyncrl_jax.orchestrator.fleets.base import FleetUnavailable  # noqa: E402
from asyncrl_jax.orchestrator.fleets.kubernetes import KubernetesFleet  # noqa: E402

PATH = "/apis/apps/v1/namespaces/runs/statefulsets/"
SETTINGS = FleetConfig(kind="kubernetes", classes=("cheap", "dear"), kubernetes_namespace="runs")


class Cluster:
    """Replicas of StatefulSets behind HTTP, and pods that follow them at each tick, one of a class, as real ones do."""

    def __init__(self):
        self.replicas = {"cheap": 0, "dear": 0}
        self.pods = {}  # name: times a pod was made
        self.requests = []
        self.status = 200
        self._made = 0
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(None)

            def do_PATCH(self):
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def answer(self, body):
                cluster.requests.append((self.command, self.path, self.headers.get("Content-Type"), body))
                name, _, resource = self.path.removeprefix(PATH).partition("/")
                known = self.path.startswith(PATH) and resource == "scale" and name in cluster.replicas
                status = cluster.status if known else 404
                if status == 200 and body is not None:
                    cluster.replicas[name] = body["spec"]["replicas"]
                scale = {
                    "kind": "Scale",
                    "apiVersion": "autoscaling/v1",
                    "metadata": {"name": name, "namespace": "runs"},
                    "spec": {"replicas": cluster.replicas[name]} if known else {},
                }
                answer = json.dumps(scale).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def another(self):
        configuration = kubernetes.client.Configuration(host=f"http://127.0.0.1:{self.server.server_port}")
        return KubernetesFleet(kubernetes.client.ApiClient(configuration), SETTINGS)

    def tick(self):
        for name, wanted in self.replicas.items():
            there = [number for number in range(50) if f"{name}-{number}" in self.pods]
            missing = [number for number in range(wanted) if number not in there]
            if missing:
                self._made += 1
                self.pods[f"{name}-{missing[0]}"] = self._made
            elif len(there) > wanted:
                del self.pods[f"{name}-{there[-1]}"]

    def running(self):
        return dict(self.pods)

    def kill(self, name):
        del self.pods[name]

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def world():
    made = Cluster()
    yield made
    made.close()


@pytest.fixture
def fleet(world):
    made = world.another()
    yield made
    made.close()


class TestKubernetesFleet(FleetContract):
    pass


def test_it_asks_for_the_scale_of_a_stateful_set_and_writes_only_what_changes(world, fleet):
    fleet.resize({"cheap": 3})
    fleet.resize({"cheap": 3})
    assert [request[:2] for request in world.requests] == [
        ("GET", f"{PATH}cheap/scale"),
        ("PATCH", f"{PATH}cheap/scale"),
        ("GET", f"{PATH}cheap/scale"),
    ]
    assert world.requests[1][3] == {"spec": {"replicas": 3}}
    assert "patch+json" in world.requests[1][2]


@pytest.mark.parametrize("status", [401, 403, 409, 500, 503])
def test_a_refusal_says_which_set_and_why_and_a_later_try_succeeds(world, fleet, status):
    world.status = status
    with pytest.raises(FleetUnavailable, match=f"StatefulSet runs/cheap: {status}"):
        fleet.resize({"cheap": 1})
    world.status = 200
    fleet.resize({"cheap": 1})
    assert world.replicas["cheap"] == 1


def test_a_set_that_is_not_there_is_named(fleet):
    with pytest.raises(FleetUnavailable, match="StatefulSet runs/other: 404"):
        fleet.resize({"other": 1})


def test_a_server_that_is_gone_is_named(world):
    fleet = world.another()
    world.close()
    with pytest.raises(FleetUnavailable, match="does not answer"):
        fleet.sizes()
    fleet.close()


def test_without_an_account_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setattr(kubernetes.config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(FleetUnavailable, match="no account"):
        KubernetesFleet.connect(SETTINGS)
