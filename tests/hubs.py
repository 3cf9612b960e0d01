"""A hub on this machine's loopback that speaks the few paths the client asks for."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from huggingface_hub import constants

SHA = "a" * 40


class Hub(ThreadingHTTPServer):
    """A loopback hub: name -> files, or an error code of the hub's."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.repos = {}
        self.asked = []


class HubHandler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.server.asked.append(self.path)
        parts = self.path.split("?")[0].strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        parts = parts[2:] if api else parts
        repo = self.server.repos.get("/".join(parts[:2]), "RepoNotFound")
        if isinstance(repo, str):
            status = {"GatedRepo": 403, "RepoNotFound": 401, "Busy": 500}[repo]
            return self._send(status, b"{}", {"X-Error-Code": repo})
        if api and "tree" in parts:
            listing = [
                {"type": "file", "path": path, "size": len(data), "oid": f"{len(data):040x}"}
                for path, data in repo.items()
            ]
            return self._send(200, json.dumps(listing).encode())
        if api and parts[3:] in ([], ["main"]):
            return self._send(200, json.dumps({"id": "/".join(parts[:2]), "sha": SHA}).encode())
        if api:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        data = repo["/".join(parts[4:])]
        return self._send(200, data, {"ETag": f'"{len(data):040x}"', "X-Repo-Commit": SHA})

    def _send(self, status, body, headers=None):
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@contextmanager
def serving(monkeypatch):
    """The loopback hub, with the client online."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
