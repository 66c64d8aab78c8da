"""A stand-in for the Hugging Face Hub: the endpoints of its API for uploads and downloads.

https://huggingface.co/docs/hub/api; LFS by the batch API of git-lfs, without xet.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

LARGE = ".safetensors"  # stored by LFS, as the hub's .gitattributes say


class HubServer(ThreadingHTTPServer):
    """repos: name -> its `private` and `gated` flags, and `commits`: {SHA: {path: content}}."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, SimpleNamespace] = {}
        self.lfs: dict[str, bytes] = {}  # by SHA256
        self.requests: list[str] = []  # "GET /path"
        self.sizes: dict[str, int] = {}  # of files that the server does not state correctly
        self.status = 0  # of every answer, where it is not 0
        self.most_downloads: int | None = None  # later ones are answered by 503
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def create(self, name: str, private: bool = False) -> SimpleNamespace:
        self.repos[name] = SimpleNamespace(private=private, gated=False, commits={}, tags={})
        self.commit(name, {".gitattributes": b"*.safetensors filter=lfs\n"})
        return self.repos[name]

    def commit(self, name: str, files: dict[str, bytes]) -> str:
        commits = self.repos[name].commits
        sha = hashlib.sha1(f"{name} {len(commits)}".encode()).hexdigest()
        commits[sha] = files
        return sha

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        return self.repos[name].commits[self.resolve(name, revision)]

    def resolve(self, name: str, revision: str) -> str | None:
        repo = self.repos[name]
        if revision == "main":
            return list(repo.commits)[-1]
        return revision if revision in repo.commits else repo.tags.get(revision)

    def downloads(self) -> list[str]:
        return [line for line in self.requests if line.startswith("GET") and "/resolve/" in line]


Answer = tuple[object, int, dict[str, str]]  # JSON value or bytes, status, headers


def ok(value: object = None, **headers: str) -> Answer:
    return value, 200, headers


def refuse(code: str, status: int = 404) -> Answer:
    return {"error": code}, status, {"X_Error_Code": code}


FORBIDDEN = refuse("Forbidden", 403)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *args: object) -> None:
        pass

    def handle_request(self) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append(f"{self.command} {path}")
        body = self.read_body()
        value, status, headers = self.answer(path, body)
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def answer(self, path: str, body: bytes) -> Answer:
        if self.server.status:
            return refuse("Broken", self.server.status)
        most = self.server.most_downloads
        if most is not None and len(self.server.downloads()) > most:
            return refuse("Broken", 503)
        for method, pattern, function in ROUTES:
            if method != self.command or not (match := re.fullmatch(pattern, path)):
                continue
            groups = match.groupdict()
            if (name := groups.get("name")) is not None:
                if name not in self.server.repos:
                    return refuse("RepoNotFound", 401)
                if self.server.repos[name].gated:
                    return refuse("GatedRepo", 403)
            return function(self, body=body, **groups)
        return refuse("NotFound")

    def is_owner(self) -> bool:
        return self.headers.get("Authorization") == "Bearer hf_owner"

    def create(self, body: bytes) -> Answer:
        details = json.loads(body)
        name = f"{details['organization'] or 'owner'}/{details['name']}"
        if not self.is_owner():
            return FORBIDDEN
        if name in self.server.repos:
            return {"error": "exists", "url": f"{self.server.url}/{name}"}, 409, {}
        # Version 1 of the library sends `private`, version 2 `visibility`.
        self.server.create(name, details.get("private") or details.get("visibility") == "private")
        return ok({"url": f"{self.server.url}/{name}"})

    def validate(self, body: bytes) -> Answer:
        return ok({"errors": [], "warnings": []})

    def info(self, name: str, body: bytes, revision: str = "main") -> Answer:
        sha = self.server.resolve(name, revision)
        if sha is None:
            return refuse("RevisionNotFound")
        files = [self.entry(*item) for item in self.server.files(name, sha).items()]
        siblings = [{"rfilename": f["path"], "size": f["size"], "blobId": f["oid"]} for f in files]
        private = self.server.repos[name].private
        return ok({"id": name, "sha": sha, "private": private, "siblings": siblings})

    def entry(self, path: str, content: bytes) -> dict[str, object]:
        oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        size = self.server.sizes.get(path, len(content))
        entry = {"type": "file", "path": path, "size": size, "oid": oid}
        if path.endswith(LARGE):
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": digest, "size": size, "pointerSize": 130}
        return entry

    def tree(self, name: str, revision: str, body: bytes) -> Answer:
        files = self.server.files(name, revision)
        return ok([self.entry(*item) for item in files.items()])

    def preupload(self, name: str, body: bytes) -> Answer:
        paths = [file["path"] for file in json.loads(body)["files"]]
        modes = {path: "lfs" if path.endswith(LARGE) else "regular" for path in paths}
        files = [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]
        return ok({"files": files}) if self.is_owner() else FORBIDDEN

    def batch(self, name: str, body: bytes) -> Answer:
        objects = [
            {**details, "actions": {"upload": {"href": f"{self.server.url}/lfs/{details['oid']}"}}}
            for details in json.loads(body)["objects"]
        ]
        return ok({"transfer": "basic", "objects": objects})

    def put(self, oid: str, body: bytes) -> Answer:
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.lfs[oid] = body
        return ok({})

    def commit(self, name: str, body: bytes) -> Answer:
        if not self.is_owner():
            return FORBIDDEN
        files = dict(self.server.files(name))
        for line in body.splitlines():
            kind, value = json.loads(line).values()
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = self.server.lfs[value["oid"]]
            elif kind == "deletedFile":
                del files[value["path"]]
        sha = self.server.commit(name, files)
        return ok({"commitUrl": f"{self.server.url}/{name}/commit/{sha}", "commitOid": sha})

    def resolve(self, name: str, revision: str, file: str, body: bytes) -> Answer:
        sha = self.server.resolve(name, revision)
        content = self.server.files(name, sha).get(file)
        if content is None:
            return refuse("EntryNotFound")
        entry = self.entry(file, content)
        etag = entry.get("lfs", entry)["oid"]
        return ok(content, ETag=f'"{etag}"', X_Repo_Commit=sha)


REPO = r"(?P<name>[\w.-]+/[\w.-]+)"
REVISION = r"(?P<revision>[\w.%-]+)"
ROUTES = [
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", "/api/validate-yaml", _Handler.validate),
    ("GET", f"/api/models/{REPO}", _Handler.info),
    ("GET", f"/api/models/{REPO}/revision/{REVISION}", _Handler.info),
    ("GET", f"/api/models/{REPO}/tree/{REVISION}/?", _Handler.tree),
    ("POST", f"/api/models/{REPO}/preupload/main", _Handler.preupload),
    ("POST", f"/{REPO}.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", "/lfs/(?P<oid>[0-9a-f]{64})", _Handler.put),
    ("POST", f"/api/models/{REPO}/commit/main", _Handler.commit),
    ("HEAD", f"/{REPO}/resolve/{REVISION}/(?P<file>.+)", _Handler.resolve),
    ("GET", f"/{REPO}/resolve/{REVISION}/(?P<file>.+)", _Handler.resolve),
]
