"""Builds the control plane of the Kubernetes lab once, and says where it lies; needs nothing but Python and Go.

`python3 tests/kube_lab/build.py` waits for a build that somebody else has begun, and prints the folder: in it are the
binary and the CRDs of Kubeflow's trainer. The folder's name is a digest of everything that goes into it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "control_plane"
BINARY = "kubecontrolplane"
CRDS = "crds"
TRAINER = "github.com/kubeflow/trainer/v2@v2.0.0"
VERSION = "v1.34.4"
FLAGS = "-trimpath -buildvcs=false -mod=readonly"
STAMP = "k8s.io/component-base/version"
LINK = f"-s -w -X {STAMP}.gitVersion={VERSION} -X {STAMP}.gitMajor=1 -X {STAMP}.gitMinor=34"


class NoGo(Exception):
    """There is no Go here; one sentence."""


def build(environ: Mapping[str, str]) -> Path:
    """The folder with the binary, built now where it is not there yet. Raises NoGo, CalledProcessError."""
    folder = cache(environ) / digest()
    if (folder / BINARY).is_file():
        return folder
    go = find_go(environ)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # dies with its process
        if not (folder / BINARY).is_file():
            _build_into(folder, go, environ)
    return folder


def cache(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "transom" / "kube_control_plane"


def digest() -> str:
    content = sha256("\n".join((FLAGS, LINK, TRAINER)).encode())
    for path in sorted(SOURCES.iterdir()):
        content.update(path.name.encode() + b"\0" + path.read_bytes())
    return content.hexdigest()[:16]


def find_go(environ: Mapping[str, str]) -> str:
    found = shutil.which("go", path=environ.get("PATH")) or shutil.which("go", path="/usr/local/go/bin")
    if found is None:
        raise NoGo("this machine has no Go (1.24 or newer), which the Kubernetes control plane is built with")
    return found


def _build_into(folder: Path, go: str, environ: Mapping[str, str]) -> None:
    variables = {**environ, "GOFLAGS": FLAGS, "CGO_ENABLED": "0"}
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        command = [go, "build", "-ldflags", LINK, "-o", str(made / BINARY), "."]
        subprocess.run(command, cwd=SOURCES, env=variables, check=True)
        _copy_crds(made / CRDS, go, temporary, environ)
        made.rename(folder)


def _copy_crds(folder: Path, go: str, cwd: str, environ: Mapping[str, str]) -> None:
    """The trainer's CRDs as its Go module ships them, checked by Go against its sum."""
    variables = {**environ, "GOFLAGS": "-mod=mod"}
    command = [go, "mod", "download", "-json", TRAINER]
    told = subprocess.run(command, cwd=cwd, env=variables, check=True, stdout=subprocess.PIPE).stdout
    found = sorted(Path(json.loads(told)["Dir"]).glob("manifests/base/crds/*.yaml"))
    folder.mkdir()
    for path in found:
        shutil.copyfile(path, folder / path.name)


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build(os.environ)}\n")
    except NoGo as error:
        sys.exit(str(error))
