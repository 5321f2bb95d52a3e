"""A real Kubernetes control plane on loopback, with kubelet stand-ins for its nodes; all of it ends with the test."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.kube_lab.build import BINARY, CRDS, build

READY_SECONDS_MAX = 120.0  # two slow cores start three servers in 10 s, with other tests beside them in more
STAND_IN = Path(__file__).resolve().parent / "kubelet_stand_in.py"
CONTROLLERS = (
    "serviceaccount-controller",
    "root-ca-certificate-publisher-controller",
    "namespace-controller",
    "garbage-collector-controller",
    "pod-garbage-collector-controller",
    "job-controller",
    "node-lifecycle-controller",
    "taint-eviction-controller",
)
USERS = ("recover", "uncordoning", *(f"user{number}" for number in range(12)))  # no rights until a test gives some
ADDRESSES = ("api", "etcd", "peer", "controllers", "scheduler")


class ControlPlane:
    """Use it as a context: on return of `__enter__` pods of its nodes run; on exit every process of it is gone."""

    def __init__(self, folder: Path, nodes: Iterable[str], *, node_grace_seconds: int = 40) -> None:
        self.folder = folder
        self.nodes = tuple(nodes)
        self.address = ""
        self.tokens = {user: secrets.token_hex(16) for user in ("admin", *USERS)}
        self.kubelets: dict[str, subprocess.Popen[bytes]] = {}
        self._node_grace_seconds = node_grace_seconds
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        self._subnet = 16 + secrets.randbelow(200)  # of 127/8, so that two labs of one machine do not meet
        self._binary = build(os.environ) / BINARY
        self.certificate = folder / "certs" / "apiserver.crt"

    def __enter__(self) -> ControlPlane:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # for tests

    def kubeconfig(self, user: str = "admin", *, server: str = "") -> Path:
        """A file with which `user` asks the API server, or whoever stands before it at `server`."""
        path = self.folder / f"kubeconfig-{user}{'-' + server.rsplit(':', 1)[1] if server else ''}"
        cluster: dict[str, str] = {"server": server or self.address}
        if not server.startswith("http:"):
            cluster["certificate-authority"] = str(self.certificate)
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "lab", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": self.tokens[user]}}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": user}}],
            "current-context": "lab",
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(content))
        return path

    def ask(self, method: str, path: str, body: Any = None, *, content: str = "application/json") -> Any:
        """As an administrator. Raises HTTPError."""
        request = urllib.request.Request(
            self.address + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.tokens['admin']}", "Content-Type": content},
        )
        with urllib.request.urlopen(request, timeout=10, context=self._tls()) as response:
            return json.loads(response.read() or b"null")

    def make_namespace(self, name: str) -> None:
        self.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}})

    def pods(self, namespace: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("GET", f"/api/v1/namespaces/{namespace}/pods")["items"]
        return found

    def start_kubelet(self, node: str) -> None:
        """A stand-in: it runs the containers of its pods as processes of this machine."""
        number = self.nodes.index(node)
        command = [
            sys.executable, "-P", str(STAND_IN), node,
            "--server", self.address, "--authority", str(self.certificate), "--folder", str(self.folder / "pods"),
            "--addresses", f"127.{self._subnet}.{number}",
        ]  # fmt: skip
        environ = {**os.environ, "KUBELET_TOKEN": self.tokens["admin"]}
        self.kubelets[node] = self._spawn(f"kubelet-{node}", command, environ)

    def kill_kubelet(self, node: str) -> None:
        """The node's pods go on, and nobody speaks for them any more."""
        self.kubelets[node].kill()
        self.kubelets.pop(node).wait()

    def taint(self, node: str, *keys: str) -> None:
        """These taints, with NoExecute, and no others of ours."""
        taints = [{"key": key, "value": "lab", "effect": "NoExecute"} for key in keys]
        body = {"spec": {"taints": taints}}
        self.ask("PATCH", f"/api/v1/nodes/{node}", body, content="application/merge-patch+json")

    def apply_crd(self, name: str) -> None:
        """One of those that Kubeflow's trainer ships."""
        import yaml

        tree = yaml.load((self._binary.parent / CRDS / f"{name}.yaml").read_text(), yaml.CSafeLoader)
        self.ask("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", tree)

    def close(self) -> None:
        for process in (*self.kubelets.values(), *reversed(self._servers.values())):
            if process.poll() is None:
                process.kill()  # the folder is thrown away: nothing to be tidy about
            process.wait()
        self._kill_pods()

    # start

    def _start(self) -> None:
        (self.folder / "certs").mkdir(parents=True)
        (self.folder / "pods").mkdir()
        ports = dict(zip(ADDRESSES, free_ports(len(ADDRESSES)), strict=True))
        self.address = f"https://127.0.0.1:{ports['api']}"
        self._start_etcd(ports)
        self._start_api(ports)
        self._until(self._api_is_ready, "the API server")
        config = str(self.kubeconfig())
        every = ["--kubeconfig", config, "--leader-elect=false", "--bind-address=127.0.0.1"]
        certificates = f"--cert-dir={self.folder / 'certs'}"
        self._server(
            "controller-manager", *every, certificates, f"--secure-port={ports['controllers']}",
            f"--service-account-private-key-file={self.folder / 'certs' / 'accounts.key'}",
            f"--node-monitor-grace-period={self._node_grace_seconds}s", "--node-monitor-period=1s",
            f"--controllers={','.join(CONTROLLERS)}", "--kube-api-qps=500", "--kube-api-burst=1000",
        )  # fmt: skip
        self._server(
            "scheduler", *every, certificates, f"--secure-port={ports['scheduler']}",
            "--kube-api-qps=500", "--kube-api-burst=1000",
        )  # fmt: skip
        for node in self.nodes:
            self.start_kubelet(node)
        self._until(self._nodes_are_ready, "every node")
        self._until(lambda: self._answers(f"https://127.0.0.1:{ports['scheduler']}/healthz"), "the scheduler")
        self._until(self._default_account_is_there, "the default service account")

    def _start_etcd(self, ports: dict[str, int]) -> None:
        client, peer = (f"http://127.0.0.1:{ports[name]}" for name in ("etcd", "peer"))
        self._server(
            "etcd", f"--data-dir={self.folder / 'etcd'}", "--unsafe-no-fsync",
            f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}",
        )  # fmt: skip

    def _start_api(self, ports: dict[str, int]) -> None:
        certificates = self.folder / "certs"
        key = certificates / "accounts.key"
        subprocess.run(
            ["openssl", "genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", str(key)],
            check=True, capture_output=True,
        )  # fmt: skip
        rows = [f'{self.tokens[user]},{user},{user},""' for user in USERS]
        rows.append(f'{self.tokens["admin"]},admin,admin,"system:masters"')
        tokens = certificates / "tokens.csv"
        tokens.touch(mode=0o600)
        tokens.write_text("\n".join(rows) + "\n")
        self._server(
            "apiserver", f"--etcd-servers=http://127.0.0.1:{ports['etcd']}", "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1", f"--secure-port={ports['api']}", f"--cert-dir={certificates}",
            "--service-account-issuer=https://lab", f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}", f"--token-auth-file={tokens}", "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.96.0.0/24", "--max-requests-inflight=0",
        )  # fmt: skip

    def _server(self, part: str, *flags: str) -> None:
        self._servers[part] = self._spawn(part, [str(self._binary), part, *flags], dict(os.environ))

    def _spawn(self, name: str, command: list[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True
            )

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + READY_SECONDS_MAX
        while True:
            for name, process in (*self._servers.items(), *self.kubelets.items()):
                assert process.poll() is None, f"{name} ended: {self._log(name)}"
            try:
                if condition():
                    return
            except (OSError, urllib.error.URLError, ValueError):
                pass
            logs = "\n".join(f"{name}: {self._log(name)}" for name in self._servers)
            assert time.monotonic() < deadline, f"{what} is not ready after {READY_SECONDS_MAX} s:\n{logs}"
            time.sleep(0.05)

    def _log(self, name: str) -> str:
        for candidate in (self.folder / f"{name}.log", self.folder / f"kubelet-{name}.log"):
            if candidate.is_file():
                return candidate.read_text(errors="replace")[-1500:]
        return ""

    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.certificate))

    def _api_is_ready(self) -> bool:
        if not self.certificate.is_file():
            return False
        request = urllib.request.Request(
            self.address + "/readyz", headers={"Authorization": f"Bearer {self.tokens['admin']}"}
        )
        with urllib.request.urlopen(request, timeout=5, context=self._tls()) as response:
            return bool(response.read() == b"ok")

    def _answers(self, url: str) -> bool:
        # The scheduler has a certificate of its own that nobody else asks for; this is a look at loopback, no secret.
        context = ssl._create_unverified_context()
        with urllib.request.urlopen(url, timeout=5, context=context) as response:
            return bool(response.read() == b"ok")

    def _nodes_are_ready(self) -> bool:
        found = self.ask("GET", "/api/v1/nodes")["items"]
        free = [node for node in found if not node["spec"].get("taints")]
        return {node["metadata"]["name"] for node in free} == set(self.nodes)

    def _default_account_is_there(self) -> bool:
        return bool(self.ask("GET", "/api/v1/namespaces/default/serviceaccounts/default"))

    def _kill_pods(self) -> None:
        """Processes of pods outlive their stand-in, as those of a node outlive its kubelet."""
        mark = f"KUBE_LAB_PODS={self.folder / 'pods'}\0".encode()
        for _ in range(20):
            theirs = [pid for pid, environ in environments() if mark in environ]
            if not theirs:
                return
            for pid in theirs:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.05)


def environments() -> list[tuple[int, bytes]]:
    """Process id and environment of every process that may be looked at."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found.append((int(path.parent.name), path.read_bytes() + b"\0"))
        except OSError:
            continue
    return found


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
