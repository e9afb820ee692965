"""Object store for tests: moto's server, which speaks S3 over HTTP on loopback and keeps everything in memory."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

BUCKET = "bucket"


@dataclass(frozen=True)
class ObjectStore:
    """Server that runs, with one bucket."""

    endpoint: str
    address: str
    """Address of the bucket."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which s3fs finds the server; the keys are checked by nobody."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-tests",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


@contextmanager
def object_store() -> Generator[ObjectStore]:
    """Context manager: a store with an empty bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    server: Any = import_module("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")):
            pass
        yield ObjectStore(endpoint, f"s3://{BUCKET}")
    finally:
        server.stop()
