"""A stand-in for the kubelet of one node: runs its pods' containers as processes of this machine, without images.

It registers the node, renews its lease, watches the pods bound to it, and does what a kubelet tells the API server:
phases, container states, the last DELETE once every process of a pod has ended. Volumes are folders, and a path at
which one is mounted is replaced by its folder in commands and variables: there is no mount namespace.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import urllib3

STRATEGIC = "application/strategic-merge-patch+json"
VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
HEARTBEAT_SECONDS = 5.0
# What containerd's shim is to a real kubelet: the container's parent, which lives on when the kubelet dies.
SHIM = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
container = os.fork()
if container == 0:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    finally:
        os._exit(127)
signal.signal(signal.SIGTERM, lambda number, frame: os.kill(container, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
code = os.waitstatus_to_exitcode(os.waitpid(container, 0)[1])
os._exit(code if code >= 0 else 128 - code)
"""
Tree = dict[str, Any]


def stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Refused(Exception):
    """The API server said no; `status` is its code."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:300]}")
        self.status = status


class Api:
    """The few requests that are needed, with the token of the lab."""

    def __init__(self, server: str, authority: str, token: str) -> None:
        self._server = server
        self._pool = urllib3.PoolManager(
            ca_certs=authority, headers={"Authorization": f"Bearer {token}"}, maxsize=16, retries=False
        )

    def ask(self, method: str, path: str, body: Tree | None = None, content: str = "application/json") -> Tree:
        while True:
            try:
                answer = self._pool.request(
                    method, self._server + path, body=None if body is None else json.dumps(body), timeout=10.0,
                    headers={**self._pool.headers, "Content-Type": content},
                )  # fmt: skip
            except urllib3.exceptions.HTTPError:
                time.sleep(0.2)
                continue
            if answer.status >= 500 or answer.status == 429:
                time.sleep(0.2)
                continue
            if answer.status >= 300:
                raise Refused(answer.status, answer.data.decode(errors="replace"))
            found: Tree = json.loads(answer.data or b"{}")
            return found

    def watch(self, path: str) -> Iterator[Tree]:
        """Events until the server ends it."""
        answer = self._pool.request(
            "GET", self._server + path, preload_content=False, timeout=urllib3.Timeout(connect=5, read=330)
        )
        rest = b""
        try:
            for chunk in answer.stream(amt=None, decode_content=False):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield json.loads(line)
        finally:
            answer.close()


class Container:
    """One process, and how it ended."""

    def __init__(self, spec: Tree, process: subprocess.Popen[bytes]) -> None:
        self.name: str = spec["name"]
        self.image: str = spec.get("image", "")
        self.process = process
        self.started_at = stamp()

    @property
    def exit_code(self) -> int | None:
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def status(self) -> Tree:
        code = self.exit_code
        state: Tree = {"running": {"startedAt": self.started_at}}
        if code is not None:
            reason = "Completed" if code == 0 else "Error"
            state = {
                "terminated": {
                    "exitCode": code, "reason": reason, "startedAt": self.started_at, "finishedAt": stamp(),
                }
            }  # fmt: skip
        return {
            "name": self.name, "image": self.image, "imageID": "none: a process", "restartCount": 0,
            "ready": code is None, "state": state,
        }  # fmt: skip


class RunningPod:
    """The processes of one pod on this node."""

    def __init__(self, node: StandIn, pod: Tree, address: str) -> None:
        self.node, self.pod, self.address = node, pod, address
        meta = pod["metadata"]
        self.name, self.namespace, self.uid = meta["name"], meta["namespace"], meta["uid"]
        self.path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"
        self.folder = node.folder / self.uid[:8]
        self.stopping = threading.Event()
        self.grace_seconds = 30.0
        self.main: list[Container] = []
        self.beside: list[Container] = []

    def run(self) -> None:
        """From start to end, in a thread of its own."""
        self.folder.mkdir()
        spec = self.pod["spec"]
        volumes = {volume["name"]: self._volume(volume) for volume in spec.get("volumes", [])}
        for one in spec.get("initContainers", []):
            container = self._start(one, volumes)
            if one.get("restartPolicy") == "Always":
                self.beside.append(container)
            else:
                container.process.wait()
        self.main = [self._start(one, volumes) for one in spec["containers"]]
        self._report("Running", ready=True)
        self._wait()
        self._sweep()
        failed = any(container.exit_code for container in self.main)
        self._report("Failed" if failed else "Succeeded", ready=False)
        if self.stopping.is_set():
            self._forget()
        self.stopping.wait()
        self._forget()

    def stop(self, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self.stopping.set()

    def end(self) -> None:
        self._sweep()
        self._forget()

    def _wait(self) -> None:
        """Until every main container has ended by itself, or was made to."""
        processes = [container.process for container in self.main]
        while any(process.poll() is None for process in processes) and not self.stopping.wait(0.01):
            pass
        if not self.stopping.is_set():
            return
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self.grace_seconds
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _sweep(self) -> None:
        """What a container's end takes with it: every process that was begun in the pod."""
        mark = f"KUBE_LAB_POD={self.uid}\0".encode()
        while True:
            theirs = []
            for path in Path("/proc").glob("[0-9]*/environ"):
                with suppress(OSError):
                    if mark in path.read_bytes() + b"\0":
                        theirs.append(int(path.parent.name))
            for container in (*self.main, *self.beside):
                container.process.poll()
            if not theirs:
                return
            for pid in theirs:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _start(self, spec: Tree, volumes: dict[str, Path]) -> Container:
        mounts = {mount["mountPath"]: str(volumes[mount["name"]]) for mount in spec.get("volumeMounts", [])}
        variables = self._variables(spec)
        variables = {name: _moved(value, mounts) for name, value in variables.items()}
        words = [*spec.get("command", []), *spec.get("args", [])]
        command = [
            _moved(VARIABLE.sub(lambda match: variables.get(match[1], match[0]), word), mounts) for word in words
        ]
        environ = {
            "PATH": os.environ["PATH"], "HOSTNAME": self.name, "LANG": "C.UTF-8", "HOME": str(self.folder),
            **variables, "KUBE_LAB_POD": self.uid, "KUBE_LAB_PODS": str(self.node.folder),
        }  # fmt: skip
        with (self.node.folder / f"{self.namespace}-{self.name}-{spec['name']}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", SHIM, *command], env=environ, cwd=self.folder,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        return Container(spec, process)

    def _variables(self, spec: Tree) -> dict[str, str]:
        meta = self.pod["metadata"]
        fields = {
            "metadata.name": self.name, "metadata.namespace": self.namespace, "metadata.uid": self.uid,
            "spec.nodeName": self.node.name, "status.podIP": self.address, "status.hostIP": self.address,
        }  # fmt: skip
        for kind in ("labels", "annotations"):
            fields |= {f"metadata.{kind}['{name}']": value for name, value in meta.get(kind, {}).items()}
        found: dict[str, str] = {}
        for entry in spec.get("env", []):
            source = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            value = fields[source] if source else entry.get("value", "")
            found[entry["name"]] = VARIABLE.sub(lambda match: found.get(match[1], match[0]), value)
        return found

    def _volume(self, volume: Tree) -> Path:
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        folder = self.folder / volume["name"]
        folder.mkdir(mode=0o700)
        space = f"/api/v1/namespaces/{self.namespace}"
        if "configMap" in volume:
            found = self.node.api.ask("GET", f"{space}/configmaps/{volume['configMap']['name']}")
            for name, text in found.get("data", {}).items():
                (folder / name).write_text(text)
        elif "secret" in volume:
            found = self.node.api.ask("GET", f"{space}/secrets/{volume['secret']['secretName']}")
            for name, text in found.get("data", {}).items():
                (folder / name).touch(mode=0o400)
                (folder / name).write_bytes(base64.b64decode(text))
        return folder

    def _report(self, phase: str, *, ready: bool) -> None:
        conditions = [
            {"type": kind, "status": str(ready), "lastTransitionTime": stamp()} for kind in ("Ready", "ContainersReady")
        ]
        status = {
            "phase": phase, "podIP": self.address, "podIPs": [{"ip": self.address}], "hostIP": "127.0.0.1",
            "startTime": (self.main or self.beside)[0].started_at, "conditions": conditions,
            "containerStatuses": [container.status() for container in self.main],
            "initContainerStatuses": [container.status() for container in self.beside],
        }  # fmt: skip
        with suppress(Refused):  # it may have been deleted by force
            self.node.api.ask(
                "PATCH", f"{self.path}/status", {"metadata": {"uid": self.uid}, "status": status}, STRATEGIC
            )

    def _forget(self) -> None:
        """No process of it lives: the API server may forget the pod."""
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        with suppress(Refused):
            self.node.api.ask("DELETE", self.path, body)
        shutil.rmtree(self.folder, ignore_errors=True)


class StandIn:
    """One node."""

    def __init__(self, name: str, api: Api, folder: Path, addresses: str) -> None:
        self.name, self.api, self.folder = name, api, folder
        self._addresses = addresses
        self._met = 0
        self._pods: dict[str, RunningPod] = {}

    def run(self) -> None:
        self._register()
        threading.Thread(target=self._beat, daemon=True).start()
        selector = f"fieldSelector=spec.nodeName%3D{self.name}"
        while True:
            listed = self.api.ask("GET", f"/api/v1/pods?{selector}")
            for pod in listed["items"]:
                self._see("LISTED", pod)
            present = {pod["metadata"]["uid"] for pod in listed["items"]}
            for uid in set(self._pods) - present:
                self._pods.pop(uid).stop(0.0)  # deleted by force while we were not looking
            version = listed["metadata"]["resourceVersion"]
            with suppress(urllib3.exceptions.HTTPError):
                for event in self.api.watch(f"/api/v1/pods?{selector}&watch=true&resourceVersion={version}"):
                    if event["type"] == "ERROR":
                        break
                    self._see(event["type"], event["object"])

    def _see(self, kind: str, pod: Tree) -> None:
        uid = pod["metadata"]["uid"]
        running = self._pods.get(uid)
        if kind == "DELETED":
            if running is not None:
                self._pods.pop(uid).stop(0.0)
        elif "deletionTimestamp" in pod["metadata"]:
            if running is not None:
                running.stop(float(pod["metadata"].get("deletionGracePeriodSeconds") or 0))
            else:
                threading.Thread(target=self._drop, args=(pod,), daemon=True).start()
        elif running is None and pod["status"]["phase"] == "Pending":
            self._met += 1
            self._pods[uid] = RunningPod(self, pod, f"{self._addresses}.{1 + self._met % 250}")
            threading.Thread(target=self._pods[uid].run, daemon=True).start()

    def _drop(self, pod: Tree) -> None:
        """A pod that never ran here, or under an earlier stand-in of this node."""
        one = RunningPod(self, pod, "127.0.0.1")
        one.end()

    def _register(self) -> None:
        room = {"cpu": "16", "memory": "32Gi", "pods": "60"}
        body = {"metadata": {"name": self.name, "labels": {"kubernetes.io/hostname": self.name}}}
        with suppress(Refused):
            self.api.ask("POST", "/api/v1/nodes", body)
        status = {"capacity": room, "allocatable": room, "conditions": [self._ready()]}
        self.api.ask("PATCH", f"/api/v1/nodes/{self.name}/status", {"status": status}, STRATEGIC)

    def _ready(self) -> Tree:
        return {"type": "Ready", "status": "True", "reason": "StandIn", "lastHeartbeatTime": stamp()}

    def _beat(self) -> None:
        path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        while True:
            spec = {"holderIdentity": self.name, "leaseDurationSeconds": 40, "renewTime": stamp()}
            try:
                self.api.ask("PATCH", f"{path}/{self.name}", {"spec": spec}, "application/merge-patch+json")
            except Refused:
                with suppress(Refused):  # its namespace is there a moment later
                    self.api.ask("POST", path, {"metadata": {"name": self.name}, "spec": spec})
            with suppress(Refused):
                ready = {"status": {"conditions": [self._ready()]}}
                self.api.ask("PATCH", f"/api/v1/nodes/{self.name}/status", ready, STRATEGIC)
            time.sleep(HEARTBEAT_SECONDS)


def _moved(text: str, mounts: dict[str, str]) -> str:
    for path in sorted(mounts, key=len, reverse=True):
        text = text.replace(path, mounts[path])
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("node")
    parser.add_argument("--server", required=True)
    parser.add_argument("--authority", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--addresses", required=True, help="three of the four numbers of its pods' addresses")
    given = parser.parse_args()
    api = Api(given.server, given.authority, os.environ["KUBELET_TOKEN"])
    StandIn(given.node, api, given.folder, given.addresses).run()


if __name__ == "__main__":
    main()
