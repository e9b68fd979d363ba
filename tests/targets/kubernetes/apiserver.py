"""A real API server of Kubernetes that knows custom resources and nothing else, on loopback, with its etcd.

Both must be on the PATH. Debian sid has etcd (etcd-server), and the sources of the other one, which two
processors build in nine minutes:

    apt-get install --no-install-recommends golang-1.27-go golang-k8s-apiextensions-apiserver-dev
    cd /usr/share/gocode/src/k8s.io/apiextensions-apiserver
    GO111MODULE=off GOPATH=/usr/share/gocode /usr/lib/go-1.27/bin/go build -o /usr/local/bin/ .
"""

import json
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.targets.cluster import free_ports

SERVER, ETCD = "apiextensions-apiserver", "etcd"
SECONDS = 120  # for a start on a busy machine
# What the server wants to speak to, and never does: it asks nobody who a client is, or what that may do.
_NOBODY = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "none", "cluster": {"server": "https://127.0.0.1:1"}}],
    "users": [{"name": "none", "user": {}}],
    "contexts": [{"name": "none", "context": {"cluster": "none", "user": "none"}}],
    "current-context": "none",
}
# They watch objects of Kubernetes' own, of which this server has none.
_WITHOUT = (
    "NamespaceLifecycle,MutatingAdmissionWebhook,ValidatingAdmissionWebhook,MutatingAdmissionPolicy,"
    "ValidatingAdmissionPolicy"
)
_DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def missing() -> str | None:
    """Why there can be no server here; None where there can."""
    absent = [name for name in (SERVER, ETCD, "openssl") if shutil.which(name) is None]
    return f"{', '.join(absent)} not on the PATH: {__name__} says where from" if absent else None


class Server:
    """What is asked of it, as an administrator."""

    def __init__(self, port: int, certificate: Path, key: Path) -> None:
        self._port, self._paths = port, dict[tuple[str, str], str]()
        self._tls = ssl.create_default_context(cafile=str(certificate))
        self._tls.load_cert_chain(certificate, key)

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """The status and the answer. Raises OSError where nobody answers."""
        connection = HTTPSConnection("127.0.0.1", self._port, timeout=SECONDS, context=self._tls)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            said = answer.read()
            # A path that is not served yet is answered in plain words.
            of_api = "json" in answer.headers.get("Content-Type", "")
            return answer.status, json.loads(said) if of_api else {"message": said.decode()}
        finally:
            connection.close()

    def define(self, file: Path) -> None:
        """Has it know a custom resource."""
        definition = YAML(typ="safe", pure=False).load(file)
        spec = definition["spec"]
        spec.pop("conversion", None)  # asks a webhook of its operator
        status, said = self.ask("POST", _DEFINITIONS, definition)
        assert status == 201, said
        where = "/namespaces/default" if spec["scope"] == "Namespaced" else ""
        for version in spec["versions"]:
            api = f"{spec['group']}/{version['name']}"
            self._paths[api, spec["names"]["kind"]] = f"/apis/{api}{where}/{spec['names']['plural']}"
        deadline = time.monotonic() + SECONDS
        while not self._served(definition["metadata"]["name"]):
            assert time.monotonic() < deadline, "it is not served"
            time.sleep(0.1)

    def knows(self, of: dict[str, Any]) -> bool:
        """Whether an object is of a kind that was defined."""
        return (of["apiVersion"], of["kind"]) in self._paths

    def tries(self, of: dict[str, Any]) -> tuple[int, str]:
        """What it says to an object: 201 where it would have it, and all that it has against it."""
        path = self._paths[of["apiVersion"], of["kind"]]
        metadata = of["metadata"] | ({"namespace": "default"} if "/namespaces/" in path else {})
        asked = f"{path}?dryRun=All&fieldValidation=Strict"
        status, said = self.ask("POST", asked, of | {"metadata": metadata})
        return status, "" if status == 201 else said["message"]

    def _served(self, name: str) -> bool:
        _, said = self.ask("GET", f"{_DEFINITIONS}/{name}")
        conditions = {each["type"]: each["status"] for each in said["status"].get("conditions") or ()}
        paths = [path for path in self._paths.values() if path.endswith(f"/{name.partition('.')[0]}")]
        served = all(self.ask("GET", path)[0] == 200 for path in paths)
        return conditions.get("Established") == "True" and served


@contextmanager
def server(root: Path) -> Iterator[Server]:
    """Runs it, with what it writes in the empty directory `root`."""
    port, client, peer = free_ports(3)
    certificate, key, config = root / "certificate", root / "key", root / "kubeconfig"
    subject = ("-subj", "/O=system:masters/CN=test", "-addext", "subjectAltName=IP:127.0.0.1")
    made = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject)
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    config.write_text(json.dumps(_NOBODY))
    kept = f"http://127.0.0.1:{client}"
    with ExitStack() as running, (root / "daemons.log").open("wb") as log:

        def start(*command: str) -> None:
            daemon = subprocess.Popen(command, stdout=log, stderr=log)
            running.callback(daemon.wait, 30)
            running.callback(daemon.terminate)

        start(
            *(ETCD, f"--data-dir={root}/etcd", f"--listen-client-urls={kept}"),
            *(f"--advertise-client-urls={kept}", f"--listen-peer-urls=http://127.0.0.1:{peer}"),
        )
        start(
            *(SERVER, f"--etcd-servers={kept}", "--bind-address=127.0.0.1", f"--secure-port={port}"),
            *(f"--tls-cert-file={certificate}", f"--tls-private-key-file={key}"),
            *(f"--client-ca-file={certificate}", "--authentication-skip-lookup"),
            *(f"--{whose}kubeconfig={config}" for whose in ("", "authentication-", "authorization-")),
            f"--disable-admission-plugins={_WITHOUT}",
        )
        asked, deadline = Server(port, certificate, key), time.monotonic() + SECONDS
        while not _answers(asked):
            assert time.monotonic() < deadline, (root / "daemons.log").read_text()[-3000:]
            time.sleep(0.2)
        yield asked


def _answers(asked: Server) -> bool:
    try:
        return asked.ask("GET", _DEFINITIONS)[0] == 200
    except OSError:
        return False
